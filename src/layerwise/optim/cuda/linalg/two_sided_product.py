"""Products ``P X Q`` of pairs with symmetric P and Q, where the three products of each side are one with long sums.

A product of pairs is ``A_hi B_lo + A_lo B_hi + A_hi B_hi`` (`split_fp16`). As three calls of cuBLAS, float32 results
are written, and read again twice. As one product of matrices side by side,

    [A_hi  A_lo  A_hi] [B_lo; B_hi; B_hi],

they are written once: on an H200 a quarter faster for matrices of 768 to 3072, as precise in a test with random ones.
Both operands have a half twice, so they are made for the moment: that of a packed matrix is unpacked at each step
anyhow, and that of a float32 matrix is split.
"""

import torch
from jaxtyping import Float, Float16, Float32
from torch import Tensor

from layerwise.optim.cuda.linalg import packed, packed_fp16, split_fp16
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.triton import packed as triton_packed
from layerwise.optim.cuda.triton import splits as triton_splits
from layerwise.optim.cuda.triton.device import MOST_MATRICES, available

MOST_ENTRIES = 2**31 - 2**16
"""Of an operand: kernels have offsets of 32 bits in a matrix."""


def takes(P: Tensor, X: Tensor, Q: Tensor) -> bool:
    """Whether all operands are small enough.

    >>> H = packed_fp16.zeros(1, 2, 16)
    >>> takes(H, torch.empty(1, 16, 16), H), takes(H, torch.empty(1, 2**16, 2**15, device="meta"), H)
    (True, False)
    """
    sizes = [packed.size(H) ** 2 for H in (P, Q)] + [X.shape[-2] * X.shape[-1]]
    return 3 * max(sizes) <= MOST_ENTRIES


def long_between(
    P: Float16[Tensor, "K 2 T 16 16"],
    P_scale: Float32[Tensor, "K"],
    X: Float32[Tensor, "K O I"],
    Q: Float16[Tensor, "K 2 S 16 16"],
    Q_scale: Float32[Tensor, "K"],
    largest: Float[Tensor, "K"] | None = None,
    before: Float32[Tensor, "K"] | None = None,
) -> Scaled:
    """``P X Q`` of packed pairs, not yet divided; `largest`: what no entry of each X exceeds, where that is known.

    `before`, the largest magnitudes of the last ``P X``, or zeros, becomes those of this one, and spares a search for
    them (`fp16_steps`).

    >>> H, scale = packed_fp16.zeros(1, 2, 16), torch.ones(1)
    >>> packed_fp16.put_(H, scale, 3 * torch.eye(16)[None])
    >>> found = long_between(H, scale, torch.ones(1, 16, 16), H, scale)
    >>> by = found.scales[0] * found.scales[1]
    >>> (found.C / by)[0, 0, 0].item()
    9.0
    """
    other, scale = tripled(X, above=True, largest=largest)
    C = _product(side_by_side(P), other)
    scales = [P_scale * scale]
    other, scale = tripled(C, above=False, before=before)
    C = _product(other, one_above_the_other(Q))
    return Scaled(C, (*scales, scale * Q_scale))


def side_by_side(H: Float16[Tensor, "K 2 T 16 16"]) -> Float16[Tensor, "K n m"]:
    """``[hi lo hi]``, n rows."""
    n = packed.size(H)
    out = torch.empty(len(H), n, 3, n, dtype=torch.float16, device=H.device)
    _unpack(H, out.transpose(1, 2))
    return out.flatten(2)


def one_above_the_other(H: Float16[Tensor, "K 2 T 16 16"]) -> Float16[Tensor, "K m n"]:
    """``[hi; lo; hi]``, n columns."""
    n = packed.size(H)
    out = torch.empty(len(H), 3, n, n, dtype=torch.float16, device=H.device)
    _unpack(H, out)
    return out.flatten(1, 2)


def tripled(
    X: Float32[Tensor, "K O I"],
    *,
    above: bool,
    largest: Float[Tensor, "K"] | None = None,
    before: Float32[Tensor, "K"] | None = None,
) -> tuple[Float16[Tensor, "K m n"], Float32[Tensor, "K"]]:
    """``[lo; hi; hi]`` one above the other, or side by side, and the scales.

    >>> found, scale = tripled(torch.ones(1, 1, 2) / 3, above=True)
    >>> found.shape, f"{((found[:, 0].float() + found[:, 1]) / scale)[0, 0].item():.6f}"
    (torch.Size([1, 3, 2]), '0.333333')
    """
    K, O, I = X.shape
    if above:
        out = blocks = torch.empty(K, 3, O, I, dtype=torch.float16, device=X.device)
    else:
        out = torch.empty(K, O, 3, I, dtype=torch.float16, device=X.device)
        blocks = out.transpose(1, 2)
    if available(X.device) and K <= MOST_MATRICES:
        scale = triton_splits.tripled(X, blocks, largest, before)
    else:
        if before is not None:
            largest = before.copy_(torch.linalg.vector_norm(X, float("inf"), dim=(-2, -1)))
        pair = split_fp16.split(X) if largest is None else split_fp16.split(X, split_fp16.power_of_two_scale(largest))
        scale = pair.scale
        for place, half in enumerate((pair.lo, pair.hi, pair.hi)):
            blocks[:, place] = half
    return (out.flatten(1, 2) if above else out.flatten(2)), scale


def _unpack(H: Tensor, out: Tensor) -> None:
    if available(H.device) and H.shape[:2].numel() <= MOST_MATRICES:
        triton_packed.mirrored(H, packed.size(H), out)
        return
    halves = packed_fp16.unpack(H)
    out[:, :2], out[:, 2] = halves, halves[:, 0]


def _product(A: Float16[Tensor, "K m l"], B: Float16[Tensor, "K l n"]) -> Float32[Tensor, "K m n"]:
    if A.device.type == "cuda":
        return torch.bmm(A, B, out_dtype=torch.float32)
    return A.float() @ B.float()


# --- in fp16 alone -------------------------------------------------------------------------------------------

ROW = 2.0**15
"""Times the largest sum of a row's magnitudes: taken for the largest entry, it makes that sum at most 1 once it is
scaled, so that a product with the matrix exceeds nothing that the other operand does not."""


def row_bound(X: Float32[Tensor, "K n n"]) -> Float32[Tensor, "K"]:
    """What a symmetric matrix in fp16 is scaled by, in place of its largest entry, for `half_between`.

    >>> row_bound(torch.tensor([[[1.0, -2.0], [-2.0, 1.0]]])).item() / ROW
    3.0
    """
    return torch.linalg.vector_norm(X, 1, dim=-1).amax(-1) * ROW


def half_between(P: Half | None, X: Float32[Tensor, "K O I"], Q: Half | None, largest: Tensor | None = None) -> Scaled:
    """``P X Q`` of matrices that are scaled by `row_bound`, with fp16 results: two products, and no search for scales.

    >>> P = Half(torch.full((1, 1, 1), 0.5).half(), torch.tensor([0.25]))
    >>> found = half_between(P, torch.full((1, 1, 1), 3.0), None)
    >>> found.C.dtype, (found.C.float() / found.scales[0] / found.scales[1]).item()
    (torch.float16, 6.0)
    """
    if available(X.device) and len(X) <= MOST_MATRICES:
        half = triton_splits.halved(X, amax=largest)
    else:
        half = split_fp16.halved(X)
    C, scales = half.hi, (half.scale,)
    if P is not None:
        C, scales = _half_product(P.hi, C), (*scales, P.scale)
    if Q is not None:
        C, scales = _half_product(C, Q.hi), (*scales, Q.scale)
    return Scaled(C, scales)


def _half_product(A: Float16[Tensor, "K m l"], B: Float16[Tensor, "K l n"]) -> Float16[Tensor, "K m n"]:
    return A @ B if A.device.type == "cuda" else (A.float() @ B.float()).half()
