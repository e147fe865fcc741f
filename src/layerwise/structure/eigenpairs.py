"""Leading eigenpairs with their residuals, and how they are found: dense, by the Gram matrix of rows, or Lanczos."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.linalg import guarded_eigh, lanczos_top
from layerwise.foundations.linalg.checks import MatMul
from layerwise.foundations.linalg.krylov import lanczos_steps
from layerwise.foundations.random import stream

DENSE = 3000
"""Matrices up to this size are decomposed as they are, in float64."""
WHOLE = 1000
"""Up to this size a full decomposition is as fast as Lanczos."""
BLOCK = 16
"""Columns that Lanczos multiplies at once."""


class Eigenpairs(NamedTuple):
    """The largest eigenvalues, descending, their vectors as columns, and the residuals ``‖H h − λ h‖``."""

    values: Float[Tensor, "k"]
    vectors: Float[Tensor, "d k"]
    residuals: Float[Tensor, "k"]


def check_count(k: int, d: int) -> None:
    """``1 ≤ k ≤ d``."""
    if not isinstance(k, int) or not 1 <= k <= d:
        raise InputError(
            describe(f"k={k!r} eigenpairs of a matrix of size {d}", f"an integer from 1 to {d}", "choose k")
        )


def dense_pairs(matrix: Float[Tensor, "d d"], k: int) -> Eigenpairs:
    """In float64: by a full decomposition, or for few pairs of a large matrix by Lanczos to the last digits."""
    matrix = matrix.double()
    if len(matrix) > WHOLE and k <= len(matrix) // 20:
        found = lanczos_pairs(
            matrix.matmul, len(matrix), k, dtype=matrix.dtype, device=matrix.device, tol=1e-13, max_steps=500, seed=0
        )
        if (found.residuals <= 1e-11 * found.values[0].abs()).all():
            return found
    values, vectors = guarded_eigh(matrix, name="layer Hessian", clamp=False)
    values, vectors = values[-k:].flip(0), vectors[:, -k:].flip(1)
    return Eigenpairs(values, vectors, torch.linalg.vector_norm(matrix @ vectors - vectors * values, dim=0))


def lanczos_pairs(
    matmul: MatMul, d: int, k: int, *, dtype: torch.dtype, device: torch.device, tol: float, max_steps: int, seed: int
) -> Eigenpairs:
    """By block Lanczos with full reorthogonalisation.

    A narrow block finds no more copies of an eigenvalue than it has columns. Whether some are missing is looked at by
    a few steps on what is orthogonal to the vectors found; if so, the block gets as many columns as pairs are wanted.
    """
    options: dict[str, Any] = {"dtype": dtype, "device": device, "tol": tol, "max_steps": max_steps}
    for block in (BLOCK, k):
        values, vectors, residuals = lanczos_top(
            matmul, d, k, generator=stream(seed, "eigenpairs"), block=block, **options
        )
        found = Eigenpairs(values.flip(0), vectors.flip(1), residuals.flip(0))
        if k <= BLOCK or k == d or not _misses_some(matmul, found, tol, seed):
            break
    return found


def _misses_some(matmul: MatMul, found: Eigenpairs, tol: float, seed: int) -> bool:
    """Whether a Ritz value of the orthogonal complement, which is never too large, is above the least one found."""
    V = found.vectors

    def rest(X: Tensor) -> Tensor:
        return X - V @ (V.mT @ X)

    top, _ = spectral_norm(lambda X: rest(matmul(rest(X))), len(V), V[0, 0], 1e-3, 24, seed)
    rounding = max(tol, 1e-5 if V.dtype == torch.float32 else 1e-9)
    return top > float(found.values[-1]) + rounding * float(found.values[0].abs())


def spectral_norm(matmul: MatMul, d: int, like: Tensor, tol: float, max_steps: int, seed: int) -> tuple[float, float]:
    """The largest |eigenvalue| of a symmetric operator, from both ends of one Lanczos run, and its residual."""
    start = torch.randn(d, 1, generator=stream(seed, "spectral norm"), dtype=torch.float64).to(like)
    best = (0.0, 0.0)
    for form in lanczos_steps(matmul, start, max_steps):
        steps = len(form.alphas)
        if steps % 8 and steps < max_steps and float(form.betas[-1]) > 0:
            continue
        theta, S = guarded_eigh(form.matrices()[0].double(), name="Lanczos tridiagonal matrix", clamp=False)
        residuals = float(form.betas[-1]) * S[-1].abs()
        at = int(theta.abs().argmax())
        best = (float(theta[at].abs()), float(residuals[at]))
        other = -1 if at == 0 else 0  # the other end need not be found, if only it is nearer to zero
        if best[1] <= tol * best[0] and float(theta[other].abs() + residuals[other]) <= best[0]:
            break
    return best
