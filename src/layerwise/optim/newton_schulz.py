"""Orthogonal factors ``U Vᵀ`` of matrices ``U S Vᵀ``: nearly, by Newton–Schulz iteration, or by singular values."""

import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.linalg import gram

COEFFICIENTS = (3.4445, -4.775, 2.0315)
FP16_NORM = 8.0
"""The Frobenius norm that matrices are given before they are rounded to fp16, whose smallest normal number is 6e-5: the
entries of 768 × 3072 are then about 5e-3, and no entry of a product, S² among them, comes near 65504."""
FP16_LIMITS = (3, 2)
"""In fp16, how many steps are taken on one Gram matrix, and how many of their polynomials are multiplied before they
are applied. Eigenvalues of the Gram matrix below 1e-5 of the largest are rounding errors, of either sign, and each step
multiplies them by up to a² = 12. A product of k polynomials has a diagonal of up to aᵏ, rounded by 2⁻¹² of that, where
its eigenvalue for a large singular value is about 1."""


def newton_schulz(
    X: Float[Tensor, "K O I"],
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    squares: Float[Tensor, "K"] | None = None,
    factor: float = 1.0,
    keep_dtype: bool = True,
    divide: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Float[Tensor, "K O I"]:
    """Nearly ``factor · U Vᵀ`` of each ``X = U S Vᵀ``: singular values end between about 0.7 and 1.2.

    A quintic iteration, ``X ← a X + (b X Xᵀ + c (X Xᵀ)²) X`` (Jordan et al. 2024), on the matrix itself or, where one
    side is long, on its Gram matrix. On CUDA it is in fp16, on other devices in bfloat16, but on a CPU without
    instructions for that, where its products are some hundred times slower, in float32. `squares` are the squared norms
    of X, where they are known; `divide` divides matrices by a number each and rounds to fp16, where that is faster than
    torch. The result has the dtype of X, or without `keep_dtype` that of the iteration.
    """
    if dtype is None:
        dtype = dtype_of_products(X.device)
    fp16, tall = dtype == torch.float16, X.shape[-2] > X.shape[-1]
    unit = FP16_NORM if fp16 and steps else 1.0
    if fp16:
        exact = torch.promote_types(X.dtype, torch.float32)
        norm = torch.linalg.vector_norm(X, dim=(-2, -1), dtype=exact) if squares is None else squares.sqrt()
        Y = (divide or _divided_to_fp16)(X, norm.clamp_min(eps).div_(unit))
    else:
        Y = X.to(dtype)
        norm = Y.flatten(1).norm(dim=1) if squares is None else squares.sqrt()
        Y = Y / norm.clamp_min(eps).to(Y.dtype).view(-1, 1, 1)
    Y = Y.mT if tall else Y
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a CPU without bfloat16: torch goes on
        if _gram_pays(Y.shape[-2], Y.shape[-1], dtype):
            Y = _on_gram(Y, steps, coefficients, factor, unit, FP16_LIMITS if fp16 else (steps, steps))
        else:
            Y = _on_matrix(Y, steps, coefficients, factor, unit)
    Y = Y.mT if tall else Y
    return Y.to(X.dtype) if keep_dtype else Y


def _divided_to_fp16(X: Tensor, by: Float[Tensor, "K"]) -> Tensor:
    """Divided before it is rounded, in one pass and laid out in memory as it was."""
    return torch.div(X, by.view(-1, 1, 1), out=torch.empty_like(X, dtype=torch.float16))


def _gram_pays(short: int, long: int, dtype: torch.dtype) -> bool:
    """Whether the Gram matrix saves time: in fp16, where it is computed twice and products of small matrices take as
    long as their launch, later than in float32. In bfloat16 it would lose too many digits."""
    if dtype == torch.float16:
        return short >= 128 and long >= 2 * short
    return dtype != torch.bfloat16 and long >= 1.5 * short


def _on_matrix(Y: Tensor, steps: int, coefficients: tuple[float, float, float], factor: float, unit: float) -> Tensor:
    """The iteration as it is written, for ``Y/unit``; the factor is a part of its last step."""
    a, b, c = coefficients
    for left in reversed(range(steps)):
        S, last = _gram(Y), 1.0 if left else factor / unit
        W = torch.baddbmm(S, S, S, beta=b / unit**2, alpha=c / unit**4)
        if _is_transposed(Y):
            Y = torch.baddbmm(Y.mT, Y.mT, W.mT, beta=a * last, alpha=last).mT
        else:
            Y = torch.baddbmm(Y, W, Y, beta=a * last, alpha=last)
    return Y


def _on_gram(
    Y: Tensor,
    steps: int,
    coefficients: tuple[float, float, float],
    factor: float,
    unit: float,
    limits: tuple[int, int],
) -> Tensor:
    """The same on ``S = Y Yᵀ`` alone, which is smaller than a wide Y: ``p = a + bS + cS²``, ``Z ← pZ``, ``S ← p²S``.

    Small singular values are below the rounding of S, but there p is a to the same rounding, for some steps: after at
    most ``limits[0]`` S is computed anew. Y becomes ZY when ``limits[1]`` polynomials are multiplied. Not for bfloat16.
    """
    (a, b, c), (most, multiplied) = coefficients, limits
    while steps:
        now = -(-steps // -(-steps // most))  # as equal as can be, the longer first: 5 are 3 + 2
        steps -= now
        S, Z = _gram(Y), None
        for taken in range(1, now + 1):
            last = 1.0 if steps or taken < now else factor / unit
            p = torch.baddbmm(S, S, S, beta=b * last / unit**2, alpha=c * last / unit**4)
            p.diagonal(dim1=-2, dim2=-1).add_(a * last)
            Z = p if Z is None else p @ Z
            if taken < now:
                S = p @ (p @ S)
            if taken == now or taken % multiplied == 0:
                Y, Z = (Y.mT @ Z.mT).mT if _is_transposed(Y) else Z @ Y, None
    return Y


def _gram(Y: Tensor) -> Tensor:
    """``Y Yᵀ``; of half precision it stays in that."""
    return Y @ Y.mT if Y.dtype.itemsize == 2 else gram(Y.mT)


def _is_transposed(Y: Tensor) -> bool:
    """Whether fp16 products are written as those of Yᵀ, the order of its memory, so that no result has to be copied."""
    return Y.dtype == torch.float16 and Y.mT.is_contiguous() and not Y.is_contiguous()


def dtype_of_products(device: torch.device) -> torch.dtype:
    """What the iteration is computed in: a GPU multiplies fp16 as fast as bfloat16, and it has three more bits."""
    if device.type in ("cuda", "meta"):
        return torch.float16
    return torch.bfloat16 if fast_bfloat16(device) else torch.float32


@cache
def fast_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products in bfloat16; what cannot be found out counts as no."""
    if device.type != "cpu":
        return True
    with suppress(AttributeError):
        if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
            return True
    with suppress(OSError):  # torch has no such question for ARM
        flags = re.search(r"^Features\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return flags is not None and "bf16" in flags[1].split()
    return False


def polar(X: Float[Tensor, "K O I"]) -> Float[Tensor, "K O I"]:
    """``U Vᵀ`` of each ``X = U S Vᵀ``; directions whose singular value is zero are left out."""
    U, S, Vh = torch.linalg.svd(X.double() if X.dtype == torch.float64 else X.float(), full_matrices=False)
    kept = S.amax(-1, keepdim=True) * max(X.shape[-2:]) * torch.finfo(S.dtype).eps < S
    return ((U * kept.unsqueeze(-2)) @ Vh).to(X.dtype)
