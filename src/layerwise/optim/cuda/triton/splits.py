"""`split_fp16.split` and `split_fp16.halved` on a GPU: a search for the largest entries, by torch, and one pass."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.cuda.linalg.split_fp16 import TOP_EXPONENT, Half, HalfPair
from layerwise.optim.cuda.triton.device import ceil, kernels, on

SPLIT_BLOCK = 4096
HEADROOM = 8.0
"""How much larger than at the last time entries may be, for a scale that is foreseen to fit; and how much smaller."""


def split(
    X: Float[Tensor, "*K m n"],
    *,
    amax: Float[Tensor, "*K"] | None = None,
    bound: int | float | None = None,
    cut: bool = False,
    out: HalfPair | None = None,
    where: Bool[Tensor, "*K"] | None = None,
) -> HalfPair:
    """The same as `split_fp16.split` in one pass over X, and another for its largest entries, unless they are known.

    `amax` or `bound` (one number for all) says what no entry exceeds; twice that is held in any case, and with `cut`
    finite entries that are not are cut off, else they become infinite or NaN. With `out`, matrices with contiguous
    entries, the result is written there, and only where `where` is true: elsewhere nothing is read or changed. A
    transposed X gives a transposed pair; no copy is made where rows or columns of X are adjacent.
    """
    if out is None and X.stride(-1) != 1 and X.stride(-2) == 1:
        return split(X.mT, amax=amax, bound=bound, cut=cut).mT
    if out is None:
        shape, device = X.shape, X.device
        hi, lo = (torch.empty(shape, dtype=torch.float16, device=device) for _ in range(2))
        out = HalfPair(hi, lo, torch.empty(shape[:-2], dtype=torch.float32, device=device))
    _launch(X, out.hi, out.lo, out.scale, amax, bound, where, cut)
    return out


def halved(
    X: Float[Tensor, "*K m n"],
    *,
    amax: Float[Tensor, "*K"] | None = None,
    bound: int | float | None = None,
    cut: bool = False,
    room: int | float = 1.0,
    out: Half | None = None,
    where: Bool[Tensor, "*K"] | None = None,
) -> Half:
    """The same as `split_fp16.halved`, its scales over `room` (a power of two); see `split`."""
    if out is None and X.stride(-1) != 1 and X.stride(-2) == 1:
        return halved(X.mT, amax=amax, bound=bound, cut=cut, room=room).mT
    if out is None:
        hi = torch.empty(X.shape, dtype=torch.float16, device=X.device)
        out = Half(hi, torch.empty(X.shape[:-2], dtype=torch.float32, device=X.device))
    _launch(X, out.hi, None, out.scale, amax, bound, where, cut, room)
    return out


def _launch(
    X: Tensor,
    hi: Tensor,
    lo: Tensor | None,
    scale: Tensor,
    amax: Tensor | None,
    bound: int | float | None,
    where: Tensor | None,
    cut: bool,
    room: int | float = 1.0,
) -> None:
    m, n = X.shape[-2:]
    if X.numel() == 0:
        scale.fill_(1.0)
        return
    X = _stacked(X)
    if bound is None and amax is None:
        amax = largest_of(X)
    out_k = _matrix_stride(hi)
    if (lo is not None and out_k != _matrix_stride(lo)) or hi.shape[-2:] != (m, n) or not scale.is_contiguous():
        raise InputError(describe(f"out of shape {tuple(hi.shape)}", "halves alike, of the shape of X", "allocate it"))
    with on(X.device):
        kernels("split_kernels").split_kernel[(ceil(m * n, SPLIT_BLOCK), X.shape[0])](
            hi, hi if lo is None else lo, scale, X, scale if amax is None else amax.reshape(-1).float().contiguous(),
            X if where is None else where.contiguous().view(torch.uint8),
            (1.0 if bound is None else bound_scale(bound)) / room,
            m * n, n, X.stride(0), X.stride(1), out_k,
            BOUNDED=bound is not None, PAIR=lo is not None, LINEAR=_linear(X), MASKED=where is not None,
            CUT=cut, BLOCK=SPLIT_BLOCK, num_warps=8,
        )  # fmt: skip


def largest_of(X: Float[Tensor, "K m n"]) -> Float[Tensor, "K"]:
    """The largest magnitude of each matrix; NaN where there is one."""
    return torch.linalg.vector_norm(X, torch.inf, dim=(-2, -1))


def _stacked(X: Tensor) -> Tensor:
    """As a stack [K, m, n] with adjacent columns."""
    X = X.reshape(-1, *X.shape[-2:])
    return X if X.stride(2) == 1 or X.shape[2] == 1 else X.contiguous()


def _linear(X: Tensor) -> bool:
    return X.stride(1) == X.shape[2] or X.shape[1] == 1


def bound_scale(bound: int | float) -> float:
    """The power of two that brings a number into [2¹⁴, 2¹⁵).

    >>> bound_scale(2.0), bound_scale(1.5)
    (8192.0, 16384.0)
    """
    return 2.0 ** (TOP_EXPONENT + 1 - math.frexp(bound)[1])


def _matrix_stride(half: Tensor) -> int:
    """From one matrix of a stack to the next, whose entries are contiguous."""
    m, n = half.shape[-2:]
    if half.ndim > 3 and not half.is_contiguous():
        raise InputError(describe(f"out of strides {half.stride()}", "a stack [K, m, n]", "flatten the batch axes"))
    if (n > 1 and half.stride(-1) != 1) or (m > 1 and half.stride(-2) != n):
        raise InputError(describe(f"out of strides {half.stride()}", "contiguous matrices", "allocate it anew"))
    return half.stride(0) if half.ndim == 3 else m * n
