"""Products with orthogonal matrices kept in halves of one fixed scale: how large the results are is known beforehand.

No entry of an orthogonal U exceeds 1, so that 2¹⁴·U fits float16 without a search for its largest. ``T = U Y`` has the
norm of Y, and no entry beyond ``√n max|Y|``. So a Y whose scaled entries stay below 2⁷ leaves `ROOM` for T in float16,
with the scale of Y, up to n = 2¹⁶. That costs nothing: the largest scaled entry is 2⁶ or more, and what float16 loses
among its subnormal numbers is 2⁻²⁵ an entry, ``2⁻³¹ √(O I)`` of the norm: 2⁻¹⁸ if both are 8192.

Should a matrix not be orthogonal at all, finite entries are cut off at float16's largest; NaN and infinity stay. Not by
cuBLAS (`writes_halves`), whose results then may be infinite.
"""

import math

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from layerwise.optim.cuda.elementwise_torch import cut
from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.linalg.fp16 import Half, HalfPair
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton import splits as triton_splits
from layerwise.optim.cuda.triton.device import MOST_MATRICES, available, on_gpu, processors

BASIS_SCALE = 2.0**split_fp16.TOP_EXPONENT
ROOM = 2.0**8
TILE = 128 * 256
"""Entries of a result that cuBLAS's larger products compute together."""


def basis_half(U: Float[Tensor, "*K n n"]) -> Half:
    """An orthogonal matrix as one half with the fixed scale.

    >>> basis_half(torch.eye(2)).hi.tolist(), basis_half(0.1 * torch.eye(2)).scale
    ([[16384.0, 0.0], [0.0, 16384.0]], tensor(16384.))
    """
    if _on_kernels(U):
        return triton_splits.halved(U, bound=1.0, cut=True)
    scale = torch.full(U.shape[:-2], BASIS_SCALE, dtype=torch.float32, device=U.device)
    return Half(cut(U.float() * BASIS_SCALE, torch.float16).half(), scale)


def bounded_pair(X: Float[Tensor, "*K m n"], bound: float) -> HalfPair:
    """A matrix as a pair, where a number is known that no entry exceeds.

    >>> bounded_pair(torch.tensor([[3.0, 1.0]]), 4.0).scale
    tensor(4096.)
    """
    if _on_kernels(X):
        return triton_splits.split(X, bound=bound, cut=True)
    number = triton_splits.bound_scale(bound)
    scale = torch.full(X.shape[:-2], number, dtype=torch.float32, device=X.device)
    return split_fp16.split(cut(X.float() * number, torch.float16) / number, scale)


def with_room(Y: Float[Tensor, "K m n"], largest: Float32[Tensor, "K"] | None = None) -> Half:
    """A matrix as a half that leaves room for what it is turned into; `largest`: of each one's entries, where known.

    >>> half = with_room(torch.tensor([[[3.0, 1.0]]]))
    >>> half.hi.tolist(), half.scale
    ([[[96.0, 32.0]]], tensor([32.]))
    """
    if _on_kernels(Y):
        return triton_splits.halved(Y, amax=largest, room=ROOM)
    scale = (split_fp16.pair_scale(Y) if largest is None else split_fp16.power_of_two_scale(largest)) / ROOM
    return Half((Y * scale[..., None, None]).half(), scale)


def rough_between(P: Half | None, Y: Half, Q: Half | None) -> Scaled:
    """``P Y Q`` of orthogonal matrices with the fixed scale (one may be missing) and a Y with room, in 11 bits.

    The product with the smaller matrix comes first, and is in float16. Large ones are cuBLAS's, which needs little more
    than half of Triton's time for them, and their result is in float16, too: half the bytes for who reads it next.

    >>> U = basis_half(torch.eye(2)[None].flip(-1))
    >>> found = rough_between(U, with_room(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])), None)
    >>> (found.C / found.scales[0]).tolist()
    [[[3.0, 4.0], [1.0, 2.0]]]
    """
    sides = [(U, left) for U, left in ((P, True), (Q, False)) if U is not None]
    *first, (U, left) = sorted(sides, key=lambda side: side[0].shape[-1])
    for smaller, before in first:
        Y = Half(turned(smaller, Y.hi, before), Y.scale)
    A, B = (U, Y) if left else (Y, U)
    if writes_halves(Y):
        return _narrow(A, B, U, Y.scale)
    C, scale = split_fp16.scaled_product(A, B)
    return Scaled(C, (scale,))


def writes_halves(X: Half) -> bool:
    """Whether cuBLAS may write a result of this size in float16.

    Where it has a tile for every processor it does not cut sums into parts, whose totals it might keep in float16; and
    not where it was told to sum in that.
    """
    if X.hi.ndim != 3 or not on_gpu(X.device):
        return False
    sums_in_half = getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
    return not sums_in_half and X.hi.numel() >= processors(X.device) * TILE


def _narrow(A: Half, B: Half, U: Half, scale: Float32[Tensor, "K"]) -> Scaled:
    """``A B``, one of them U, in float16. No entry exceeds the norm of Y, which is below ``2⁷ √(O I)``.

    Where one entry of Y is alone and both sides are large, results are subnormal numbers: an error of 2⁻¹⁰ of the norm
    at 4096 × 4096 in the worst case, with a foreseen scale that is eight times too small.
    """
    most = 2.0**7 * (A.shape[-2] * B.shape[-1]) ** 0.5
    down = 2.0 ** min(0, 15 - math.ceil(math.log2(most)))
    out = torch.empty(*A.shape[:-1], B.shape[-1], dtype=torch.float16, device=A.device)
    torch.baddbmm(out, A.hi, B.hi, beta=0, alpha=down / BASIS_SCALE, out=out)
    return Scaled(out, (scale * down,))


def between(P: Half | None, X: HalfPair, Q: Half | None) -> Scaled:
    """``P X Q`` of a pair and bases, which are taken for exact: X, and what the first product leaves, are multiplied in
    both halves, without a search for the largest entry of that.

    >>> U = basis_half(torch.eye(2)[None].flip(-1))
    >>> found = between(U, split_fp16.split(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])), U)
    >>> (found.C / found.scales[0] / found.scales[1]).tolist()
    [[[4.0, 3.0], [2.0, 1.0]]]
    """
    scales = ()
    if P is not None:
        C, scale = split_fp16.whole_product(P, X)
        if Q is None:
            return Scaled(C, (scale,))
        X, scales = bounded_pair(C, product_bound(P.shape[-1])), (scale,)
    assert Q is not None
    C, scale = split_fp16.whole_product(X, Q)
    return Scaled(C, (*scales, scale))


def turned(U: Half, Y: Tensor, left: bool) -> Tensor:
    """``U Y`` or ``Y U`` in float16."""
    other = Half(Y, U.scale)  # its own scale is that of the result, too: one for both cancels
    A, B = (U, other) if left else (other, U)
    if writes_halves(other):
        out = torch.empty(*A.shape[:-1], B.shape[-1], dtype=torch.float16, device=Y.device)
        return torch.baddbmm(out, A.hi, B.hi, beta=0, alpha=1 / BASIS_SCALE, out=out)
    if triton_products.takes(A, B):
        out = torch.empty(*A.shape[:-1], B.shape[-1], dtype=torch.float16, device=Y.device)
        return triton_products.pair_product(A, B, alpha=BASIS_SCALE, out=out, cut=True)
    C, _ = split_fp16.scaled_product(A, B)
    return cut(C.mul_(1 / BASIS_SCALE), torch.float16).half()


def product_bound(n: int) -> float:
    """Of 2¹⁴ U, with n columns, times entries below 2¹⁵; twice that, for the rounding of U.

    What a pair loses by so loose a bound is ``2⁻³⁹ √n max|X|`` an entry: 2⁻²² of the norm even where one entry of
    3072 × 3072 is alone.
    """
    return 2.0 ** (2 * split_fp16.TOP_EXPONENT + 2) * n**0.5


def _on_kernels(X: Tensor) -> bool:
    return X.dtype != torch.float64 and X.shape[:-2].numel() <= MOST_MATRICES and available(X.device)
