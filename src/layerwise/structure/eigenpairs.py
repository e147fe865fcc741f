"""Leading eigenpairs with their residuals, and how they are found: dense, by the Gram matrix of rows, or Lanczos."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.linalg import guarded_eigh, lanczos_top
from layerwise.foundations.linalg.checks import MatMul
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
    """By block Lanczos with full reorthogonalisation."""
    values, vectors, residuals = lanczos_top(
        matmul,
        d,
        k,
        generator=stream(seed, "eigenpairs"),
        dtype=dtype,
        device=device,
        tol=tol,
        max_steps=max_steps,
        block=BLOCK,
    )
    return Eigenpairs(values.flip(0), vectors.flip(1), residuals.flip(0))
