"""Matrices as pairs of float16, for products on tensor cores with the accuracy of about 22 bits.

A float32 matrix is written as two of float16 and one power of two,

    X ≈ (hi + lo) / scale,    hi = fp16(scale·X),    lo = fp16(scale·X − hi),

with ``scale`` such that the largest entry of ``scale·X`` lies in [2¹⁴, 2¹⁵). Entry by entry the error is at
most 2⁻²²·|x| + 2⁻³⁹·max|X|. A product takes three half-precision products, accumulated in float32,

    A B ≈ (A_lo B_hi + A_hi B_lo + A_hi B_hi) / (scale_A scale_B),

and ‖error‖_F is about 1e-6·‖A‖_F ‖B‖_F or less. Why one half-precision (or tf32) product is not enough: for
the direction P⁻¹ G Q⁻¹ with G = P^½ Z Q^½, condition number 1e6 and a damping of 1e-3 times the mean eigenvalue,
the largest singular values of G are the most damped, so 11 bits of G leave an error of tens of percent.

Nothing here asks the device for a value: no host synchronisation.
"""

from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.cuda.linalg.fp16 import Half, HalfPair
from layerwise.optim.cuda.triton.device import MOST_MATRICES

TOP_EXPONENT = 14  # of the largest scaled entry: one below fp16's last, so that rounding up stays finite
LARGEST_EXPONENT = 112  # of a scale: times 2¹⁴, that of a basis, it stays finite, and its reciprocal normal
MANTISSA_BITS, EXPONENT_BIAS = 23, 127  # of float32


def split(X: Float[Tensor, "*batch m n"], scale: Float32[Tensor, "*batch"] | None = None) -> HalfPair:
    """Matrices as pairs, each with its own scale; `scale` (powers of two) saves the search for the largest entry.

    A matrix with an entry that is NaN or infinite becomes NaN as a whole, so that it cannot pass unseen;
    the other matrices of the stack are not affected. With a given `scale` entries beyond 65504/scale become NaN.

    >>> pair = split(torch.tensor([[1e-20, 1e-22]]))
    >>> f"{pair.value()[0, 1].item():.6e}"
    '1.000000e-22'
    """
    if scale is None and on_kernels(X):
        return _triton().split(X)
    if scale is None:
        scale = pair_scale(X)
    scaled = X * scale[..., None, None] if X.dtype == torch.float64 else X.float() * scale[..., None, None]
    hi = scaled.half()
    return HalfPair(hi, scaled.sub_(hi).half(), scale)


def halved(X: Float[Tensor, "..."] | HalfPair | Half) -> Half:
    """The first halves alone: 11 bits, for products that only correct.

    >>> half = halved(torch.tensor([[1.0, 1 / 3]]))
    >>> (half.hi / half.scale).tolist()
    [[1.0, 0.333251953125]]
    """
    if isinstance(X, Half):
        return X
    if isinstance(X, HalfPair):
        return X.half
    if on_kernels(X):
        return _triton().halved(X)
    scale = pair_scale(X)
    return Half((X * scale[..., None, None]).half(), scale)


def pair_scale(X: Float[Tensor, "*batch m n"]) -> Float32[Tensor, "*batch"]:
    """The power of two that brings the largest entry of each matrix into [2¹⁴, 2¹⁵); 1 for zeros, NaN for NaN or ∞.

    For largest entries below 2⁻⁹⁸ the scale stays at 2¹¹².

    >>> pair_scale(torch.tensor([[[3.0]], [[0.0]]])).tolist()
    [8192.0, 1.0]
    """
    if X.shape[-1] == 0 or X.shape[-2] == 0:
        return torch.ones(X.shape[:-2], dtype=torch.float32, device=X.device)
    return power_of_two_scale(torch.linalg.vector_norm(X, float("inf"), dim=(-2, -1)).float())


def power_of_two_scale(amax: Float32[Tensor, "*batch"]) -> Float32[Tensor, "*batch"]:
    """The same from the largest absolute entries, or from any bound above them (less tight, fewer bits).

    >>> power_of_two_scale(torch.tensor([1.0, 1.9, 2.0])).tolist()
    [16384.0, 16384.0, 8192.0]
    """
    # On the bits, because pow and exp2 of a device may miss a power of two by a rounding.
    exponent = (amax.view(torch.int32) >> MANTISSA_BITS) - EXPONENT_BIAS
    exponent = (TOP_EXPONENT - exponent).clamp(max=LARGEST_EXPONENT)
    scale = ((exponent + EXPONENT_BIAS) << MANTISSA_BITS).view(torch.float32)
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    return torch.where(torch.isfinite(amax), scale, torch.full_like(scale, float("nan")))


def prepared(X: Float[Tensor, "..."] | HalfPair, *, definite: bool = False) -> HalfPair:
    """X as a pair, an operand of several products; `definite`: no entry is larger than the largest of the diagonal."""
    if isinstance(X, HalfPair) or not definite:
        return X if isinstance(X, HalfPair) else split(X)
    largest = X.diagonal(dim1=-2, dim2=-1).amax(-1).float()
    return _triton().split(X, amax=largest) if on_kernels(X) else split(X, power_of_two_scale(largest))


def product(
    A: Float[Tensor, "..."] | HalfPair,
    B: Float[Tensor, "..."] | HalfPair,
    *,
    add: Float[Tensor, "..."] | None = None,
    alpha: int | float = 1,
    identity: int | float = 0,
    symmetric: bool = False,
    out: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "..."]:
    """``identity·I + add + alpha·A B`` in float32, batch axes broadcast; written into `out`, which may be `add`.

    A result that is said to be `symmetric` is exactly that, as `add` is then: a GPU computes half of it. Products below
    about 2⁻¹¹⁹ become zero.

    >>> A = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> product(A, A.mT, alpha=-1, identity=1, symmetric=True).tolist()
    [[-4.0, -11.0], [-11.0, -24.0]]
    """
    left, right = prepared(A), prepared(B)
    _check_axes(left, right)
    beside = add is None or (add.stride(-1) == 1 and add.shape[:-2] == left.shape[:-2])
    if beside and _triton().takes(left, right):
        how: dict[str, Any] = {"alpha": alpha, "identity": identity, "symmetric": symmetric, "out": out}
        return _triton().pair_product(left, right, add=add, **how)
    C = _unscaled(_summed(_terms(left, right)), left, right)
    if add is not None:
        C = torch.add(add, C, alpha=alpha)
    elif alpha != 1:
        C = C * alpha
    if identity != 0:
        C = C + identity * torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    C = (C + C.mT) / 2 if symmetric and (add is not None or identity != 0) else C
    return C if out is None else out.copy_(C)


def scaled_product(A: HalfPair | Half, B: HalfPair | Half) -> tuple[Tensor, Tensor]:
    """``(C, scale)`` with ``A B = C/scale``, of pairs or of halves: a chain of products need divide only once.

    On a GPU these are cuBLAS's products, which for large matrices are faster than Triton's. The scale overflows when
    both matrices are smaller than about 2⁻⁵⁰.

    >>> C, scale = scaled_product(halved(torch.eye(2)), halved(torch.eye(2)))
    >>> (C / scale).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    _check_axes(A, B)
    pairs = isinstance(A, HalfPair) and isinstance(B, HalfPair)
    return _summed(_terms(A, B) if pairs else [(A.hi, B.hi)]), A.scale * B.scale


def whole_product(A: HalfPair | Half, B: HalfPair | Half) -> tuple[Tensor, Tensor]:
    """Like `scaled_product`, but of a pair and a half both halves of the pair take part: two products.

    For a half that is exact as it is kept, such as a basis in which second moments are measured.

    >>> C, scale = whole_product(split(torch.tensor([[1 / 3]])), halved(torch.eye(1)))
    >>> f"{(C / scale).item():.6f}"
    '0.333333'
    """
    _check_axes(A, B)
    return _summed(_terms(A, B)), A.scale * B.scale


def _terms(A: HalfPair | Half, B: HalfPair | Half) -> list[tuple[Tensor, Tensor]]:
    """What is multiplied: small terms first, and of two second halves nothing."""
    small = [(A.lo, B.hi)] if isinstance(A, HalfPair) else []
    small += [(A.hi, B.lo)] if isinstance(B, HalfPair) else []
    return [*small, (A.hi, B.hi)]


def rough_product(
    A: Float[Tensor, "..."] | HalfPair | Half, B: Float[Tensor, "..."] | HalfPair | Half, *, symmetric: bool = False
) -> Tensor:
    """The products ``A B`` of first halves, 11 bits each, summed in float32: a third of the work of `product`.

    >>> rough_product(torch.eye(2), torch.tensor([[1.0], [1 / 3]])).tolist()
    [[1.0], [0.333251953125]]
    """
    left, right = halved(A), halved(B)
    _check_axes(left, right)
    if _triton().takes(left, right):
        return _triton().pair_product(left, right, symmetric=symmetric)
    return _unscaled(_summed([(left.hi, right.hi)]), left, right)


def _check_axes(A: HalfPair | Half, B: HalfPair | Half) -> None:
    if A.shape[-1] != B.shape[-2]:
        raise InputError(
            describe(
                f"a product of {tuple(A.shape)} with {tuple(B.shape)}",
                "as many columns on the left as rows on the right",
                "check the axes, or transpose with `.mT`",
            )
        )


def _unscaled(C: Tensor, A: HalfPair | Half, B: HalfPair | Half) -> Tensor:
    # The reciprocals are exact, and their product may be subnormal, where scale_A·scale_B would be infinite.
    return C.mul_((A.scale.reciprocal() * B.scale.reciprocal())[..., None, None])


def _summed(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of products of halves in float32: small ones come first."""
    (A, B), *rest = pairs
    if A.device.type != "cuda":  # the same rounded operands, so that the error is the one of the GPU
        C = A.float() @ B.float()
        for A, B in rest:
            C += A.float() @ B.float()
        return C
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    C = torch.bmm(_stacked(A, batch), _stacked(B, batch), out_dtype=torch.float32)
    for left, right in rest:
        torch.baddbmm(C, _stacked(left, batch), _stacked(right, batch), out_dtype=torch.float32, out=C)
    return C.reshape(*batch, A.shape[-2], B.shape[-1])


def _stacked(part: Tensor, batch: torch.Size) -> Tensor:
    """A stack [K, m, n] of the broadcast matrices."""
    return part.expand(*batch, *part.shape[-2:]).reshape(-1, *part.shape[-2:])


def on_kernels(X: Float[Tensor, "*batch m n"]) -> bool:
    """Whether kernels split these matrices: on a GPU with Triton, not of float64, no more than a launch takes.

    >>> on_kernels(torch.eye(2))
    False
    """
    few = X.shape[:-2].numel() <= MOST_MATRICES
    return X.dtype != torch.float64 and few and _triton().available(X.device)


def _triton() -> Any:
    """Imported late, because it imports this module."""
    from layerwise.optim.cuda.triton import products as triton_products

    return triton_products
