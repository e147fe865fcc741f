"""Orthogonal factors ``U Vᵀ`` of matrices ``U S Vᵀ``: nearly, by Newton–Schulz iteration, or by singular values."""

import re
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.linalg import gram

COEFFICIENTS = (3.4445, -4.775, 2.0315)


def newton_schulz(
    X: Float[Tensor, "K O I"],
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    squares: Float[Tensor, "K"] | None = None,
    factor: float = 1.0,
) -> Float[Tensor, "K O I"]:
    """Nearly ``factor · U Vᵀ`` of each ``X = U S Vᵀ``: singular values end between about 0.7 and 1.2.

    A quintic iteration, ``X ← a X + (b X Xᵀ + c (X Xᵀ)²) X`` (Jordan et al. 2024), in bfloat16; on a CPU without
    instructions for it, where its products are some hundred times slower, in float32. `squares` are the squared norms
    of X, where they are known.
    """
    tall = X.shape[-2] > X.shape[-1]
    Y = X.mT if tall else X
    if dtype is None:
        dtype = torch.bfloat16 if fast_bfloat16(X.device) else torch.float32
    Y = Y.to(dtype)
    norm = Y.flatten(1).norm(dim=1) if squares is None else squares.sqrt()
    Y = Y / norm.clamp_min(eps).to(Y.dtype).view(-1, 1, 1)
    wide = Y.shape[-1] >= 1.5 * Y.shape[-2]
    iterate = _on_gram if wide and dtype != torch.bfloat16 else _on_matrix
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a CPU without bfloat16: torch goes on
        Y = iterate(Y, steps, coefficients, factor)
    return (Y.mT if tall else Y).to(X.dtype)


def _on_matrix(Y: Tensor, steps: int, coefficients: tuple[float, float, float], factor: float) -> Tensor:
    """The iteration as it is written; the factor is a part of its last step."""
    a, b, c = coefficients
    for left in reversed(range(steps)):
        S, last = Y @ Y.mT if Y.dtype == torch.bfloat16 else gram(Y.mT), 1.0 if left else factor
        Y = torch.baddbmm(Y, torch.baddbmm(S, S, S, beta=b, alpha=c), Y, beta=a * last, alpha=last)
    return Y


def _on_gram(Y: Tensor, steps: int, coefficients: tuple[float, float, float], factor: float) -> Tensor:
    """The same on ``S = Y Yᵀ`` alone, which is smaller than a wide Y: ``p = a + bS + cS²``, ``Z ← pZ``, ``S ← p²S``.

    Small singular values are below the rounding of S, but there p is a to the same rounding. Not for bfloat16.
    """
    a, b, c = coefficients
    S, Z = gram(Y.mT), None
    for left in reversed(range(steps)):
        p = torch.baddbmm(S, S, S, beta=b, alpha=c)
        p.diagonal(dim1=-2, dim2=-1).add_(a)
        Z = p if Z is None else p @ Z
        if left:
            S = p @ (p @ S)
    found = Y if Z is None else Z @ Y
    return found if factor == 1.0 else factor * found


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
