"""Inverses after a matrix has grown in a few directions, where Newton's iteration would diverge.

Newton's ``X ← X + (I − X M) X`` converges only where no eigenvalue of ``X M`` is 2 or more. A second moment that drifts
grows by more than that in some directions (a feature appears), seldom in many. Such directions are found by a few
products with thin matrices, and taken in by a block step of BFGS (Gower and Richtárik 2017):

    X' = W A⁻¹ Wᵀ + (I − W A⁻¹ Wᵀ M) X (I − M W A⁻¹ Wᵀ),    A = Wᵀ M W

after which ``X' M W = W``, and X' is positive definite where X and M are.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.linalg.inverses import probe_columns

COLUMNS = 32
ITERATIONS = 2


def without_outliers(
    M: Float[Tensor, "K n n"],
    X: Float[Tensor, "K n n"],
    columns: int = COLUMNS,
    iterations: int = ITERATIONS,
) -> Float[Tensor, "K n n"]:
    """An approximate inverse X of M, made exact on the directions in which ``X M`` is largest.

    Costs ``2 (iterations + 2)`` products with matrices of `columns` columns and two passes over X; nothing waits for
    the device. Where M is not positive definite on those directions the result is not finite.

    >>> M = torch.diag(torch.tensor([1.0, 1.0, 50.0]))[None]  # it was I
    >>> without_outliers(M, torch.eye(3)[None], columns=1, iterations=6)[0].diagonal().tolist()[2] < 0.03
    True
    """
    n = M.shape[-1]
    Y = probe_columns(n, min(columns, n), like=M).expand(len(M), -1, -1)
    for _ in range(iterations):
        Y = M @ (X @ _scaled(Y))  # the power method on M X, whose left vectors are X⁻¹ times those of X M
        Y = _scaled(Y)
        Y = _orthonormal(Y)
    W = X @ Y
    MW = M @ W
    L = _cholesky(W.mT @ MW)
    W, MW = _divided(W, L), _divided(MW, L)  # now A = I
    XMW = X @ MW
    # X − XMW Wᵀ − W (XMW)ᵀ + W (I + MWᵀ X MW) Wᵀ, as one product of thin matrices
    inner = MW.mT @ XMW
    inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
    half = 0.5 * (W @ inner) - XMW
    change = half @ W.mT
    return X + change + change.mT


def _scaled(Y: Tensor) -> Tensor:
    return Y / Y.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(Y.dtype).tiny)


def _orthonormal(Y: Tensor) -> Tensor:
    """Columns made orthonormal by Cholesky of their products; a little is added, since powers grow alike."""
    return _divided(Y, _cholesky(Y.mT @ Y))


def _cholesky(A: Tensor) -> Tensor:
    """The factor of the nearly singular product of some columns; not finite where that fails."""
    little = A.diagonal(dim1=-2, dim2=-1).amax(-1) * torch.finfo(A.dtype).eps * A.shape[-1]
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    L, info = torch.linalg.cholesky_ex(A + little.view(-1, 1, 1) * identity)
    return torch.where((info == 0).view(-1, 1, 1), L, torch.nan)


def _divided(Y: Tensor, L: Tensor) -> Tensor:
    """``Y L⁻ᵀ``."""
    return torch.linalg.solve_triangular(L.mT, Y, upper=True, left=False)
