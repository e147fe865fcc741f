"""`packed` and `packed_fp16` on a GPU: each function one launch. Nothing here asks the device for a value."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Float16, Float32
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.cuda.linalg.fp16 import Half, HalfPair
from layerwise.optim.cuda.triton.device import ceil, kernels, on
from layerwise.optim.cuda.triton.splits import largest_of

BLOCK = 64
MIRROR_BLOCK, MIRROR_WARPS = 128, 8
"""Of halves that are unpacked: a program stores rows of 256 bytes, and three programs, as many as registers allow, have
96 KiB under way on a multiprocessor, by estimate three times what hides the latency of the memory."""

Numbers = Float32[Tensor, "K"]


def unpack(
    P: Float32[Tensor, "K T 16 16"], n: int, shift: Numbers | None, own: int | None, fill: Numbers | None
) -> Float32[Tensor, "K n n"]:
    """`packed.unpack`."""
    M = torch.empty(len(P), n, n, dtype=torch.float32, device=P.device)
    shift, fill = (None if x is None else x.contiguous() for x in (shift, fill))
    _square(P, n, M, (None, None, None), (shift, fill, n if own is None else own))
    return M


def split(P: Float32[Tensor, "K T 16 16"], n: int, largest: Numbers, halves: int) -> HalfPair | Half:
    """`packed.split`; `largest` is what no entry exceeds."""
    hi, *rest = (torch.empty(len(P), n, n, dtype=torch.float16, device=P.device) for _ in range(halves))
    scale = torch.empty(len(P), dtype=torch.float32, device=P.device)
    _square(P, n, hi, (rest[0] if rest else None, scale, largest.contiguous().view(torch.int32)), (None, None, n))
    return HalfPair(hi, rest[0], scale) if rest else Half(hi, scale)


def _square(P: Tensor, n: int, out: Tensor, of_halves: tuple[Any, ...], added: tuple[Any, ...]) -> None:
    (lo, scale, bits), (shift, fill, own) = of_halves, added
    halves = 0 if scale is None else 1 if lo is None else 2
    if P.numel():
        with on(P.device):
            kernels("packed_kernels").square_kernel[(_blocks(n), len(P))](
                out, lo, scale, _whole(P), bits, shift, fill, own, n, P.stride(0), n * n,
                HALVES=halves, SHIFTED=shift is not None, FILLED=fill is not None, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip


def ema_(P: Float32[Tensor, "K T 16 16"], new: Float[Tensor, "K *m"], n: int, weight: Numbers) -> None:
    """`packed.ema_`."""
    packed = new.ndim == 4
    new = _whole(new) if packed else new if new.stride(-1) == 1 else new.contiguous()
    if P.numel():
        with on(P.device):
            kernels("packed_kernels").ema_kernel[(_blocks(n), len(P))](
                _whole(P), new, weight.contiguous(), new.shape[-1], n, P.stride(0), new.stride(0), new.stride(1),
                PACKED=packed, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip


def mirrored(H: Float16[Tensor, "K h T t t"], n: int) -> Float16[Tensor, "K h n n"]:
    """`packed_fp16.unpack`; tiles may have any size t, a power of two, and reach beyond n."""
    K, halves = H.shape[:2]
    out = torch.empty(K, halves, n, n, dtype=H.dtype, device=H.device)
    if out.numel():
        with on(H.device):
            kernels("packed_kernels").mirror_kernel[(_blocks(n, MIRROR_BLOCK), K * halves)](
                out, _whole(H), n, H.stride(0), H.stride(1),
                HALVES=halves, TILE=H.shape[-1], BLOCK=MIRROR_BLOCK, num_warps=MIRROR_WARPS,
            )  # fmt: skip
    return out


def put_(
    H: Float16[Tensor, "K h T t t"],
    scale: Float32[Tensor, "K"],
    X: Float32[Tensor, "K n n"],
    where: Bool[Tensor, "K"] | None = None,
    largest: Float32[Tensor, "K"] | None = None,
) -> None:
    """`packed_fp16.put_`; where nothing bounds the entries, after a search for the largest."""
    X, n = X if X.stride(-1) == 1 else X.contiguous(), X.shape[-1]
    if X.numel():
        largest = largest_of(X) if largest is None else largest.contiguous()
        with on(X.device):
            kernels("packed_kernels").put_kernel[(_blocks(n), len(X))](
                _whole(H), scale, X, largest, X if where is None else where.contiguous().view(torch.uint8),
                n, H.stride(0), H.stride(1), X.stride(0), X.stride(1),
                PAIR=H.shape[1] == 2, MASKED=where is not None,
                TILE=H.shape[-1], BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip


def _blocks(n: int, block: int | None = None) -> int:
    across = ceil(n, block or BLOCK)
    return across * (across + 1) // 2


def _whole(P: Tensor) -> Tensor:
    """Tiles in one piece; matrices may be apart."""
    if len(P) and not P[0].is_contiguous():
        raise InputError(describe(f"tiles with strides {P.stride()}", "tiles in one piece", "call `.contiguous()`"))
    return P
