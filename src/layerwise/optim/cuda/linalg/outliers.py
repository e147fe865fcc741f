"""Inverses after a matrix has grown in a few directions, where Newton's iteration would diverge.

Newton's ``X ← X + (I − X M) X`` converges only where no eigenvalue of ``X M`` is 2 or more. A second moment that drifts
grows by more than that in some directions (a feature appears), seldom in many. Such directions are found by a few
products with thin matrices, and taken in by a block step of BFGS (Gower and Richtárik 2017):

    X' = W A⁻¹ Wᵀ + (I − W A⁻¹ Wᵀ M) X (I − M W A⁻¹ Wᵀ),    A = Wᵀ M W

after which ``X' M W = W``, and X' is positive definite where X and M are. Where M has grown as a whole, X is scaled
first.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.cuda.linalg.fp16 import HalfPair
from layerwise.optim.cuda.linalg.newton_inverse import probe_columns
from layerwise.optim.cuda.linalg.products import TORCH, Products

COLUMNS, ROWS_A_COLUMN = 32, 24
"""At least so many columns, or one for so many rows. In a GPT (8 sequences, sampled labels, an eighth of the mean
replaced) the factor of the gradients of queries, keys and values has grown by half or more in n/33 directions."""
ITERATIONS = 2


class Drift(NamedTuple):
    """How far an inverse X was from ``M⁻¹`` when it came, as ``T = I − X M`` shows it; one number a matrix each."""

    typical: Float[Tensor, "K"]
    """``‖T v‖/‖v‖`` of random v beside the grown directions, X scaled as it came."""
    grown: Float[Tensor, "K"]
    """The largest ``‖Tᵀ y‖`` of unit vectors y in the grown directions."""


def without_outliers(
    M: Float[Tensor, "K n n"] | HalfPair,
    X: Float[Tensor, "K n n"] | HalfPair,
    columns: int | None = None,
    iterations: int = ITERATIONS,
    products: Products = TORCH,
) -> tuple[Float[Tensor, "K n n"], Drift]:
    """An approximate inverse X of M, scaled, and made exact on the directions in which ``X M`` is largest.

    Beside it, how far X was from the inverse before: what is small there, Newton's iteration can do alone.

    Costs ``2 (iterations + 3)`` products with matrices of `columns` columns (None: by the size of M) and one of twice
    that depth; nothing waits for the device. Where M is not positive definite on those directions the result is not
    finite.

    >>> M = torch.diag(torch.tensor([1.0, 1.0, 50.0]))[None]  # it was I
    >>> X, drift = without_outliers(M, torch.eye(3)[None], columns=1, iterations=6)
    >>> X[0].diagonal().tolist()[2] < 0.03, round(drift.grown.item())
    (True, 49)
    """
    n = M.shape[-1]
    like = M.scale if isinstance(M, HalfPair) else M
    columns = columns or columns_for(n)
    Y = probe_columns(n, min(columns, n), like=like)[:, :columns].expand(M.shape[0], -1, -1)
    Y = _grown_directions(M, X, Y, iterations, products)
    ratio, typical = _typical_ratio(M, X, Y, products)
    ratio = ratio.view(-1, 1, 1)
    W = products.precise(X, Y)
    MW = products.precise(M, W)
    drift = Drift(typical, (Y - MW).norm(dim=-2).amax(-1))
    L = _cholesky(W.mT @ MW)
    W, MW = _divided(W, L), _divided(MW, L)  # now A = I, whatever X was multiplied by
    XMW = ratio * products.precise(X, MW)
    # X − XMW Wᵀ − W (XMW)ᵀ + W (I + MWᵀ X MW) Wᵀ, as one product of thin matrices
    inner = MW.mT @ XMW
    inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
    half = 0.5 * (W @ inner) - XMW
    scaled = HalfPair(X.hi, X.lo, X.scale / ratio.view(-1)).value() if isinstance(X, HalfPair) else ratio * X
    found = products.precise(torch.cat([half, W], -1), torch.cat([W, half], -1).mT, add=scaled, symmetric=True)
    return found, drift


def columns_for(n: int) -> int:
    """How many directions are taken in, a multiple of 16 beyond `COLUMNS`.

    >>> columns_for(8), columns_for(768), columns_for(2304), columns_for(3072)
    (32, 32, 96, 128)
    """
    return max(COLUMNS, -(-n // (16 * ROWS_A_COLUMN)) * 16)


def _grown_directions(
    M: Tensor | HalfPair, X: Tensor | HalfPair, Y: Tensor, iterations: int, products: Products
) -> Float[Tensor, "K n k"]:
    """By the power method on ``M X − c I``, whose left vectors are X⁻¹ times those of ``X M``; orthonormal.

    Most eigenvalues of ``M X`` lie close together, at 1: without c a direction that has doubled would come out of the
    others by a factor of two an iteration, with it by ten. c is the mean eigenvalue where that is less than 1.
    """
    mean = None
    for _ in range(iterations):
        Z = products.rough(M, products.rough(X, Y))
        if mean is None:  # what grew by much would shift the mean, and 1 is then nearer to the others
            mean = ((Y * Z).sum((-2, -1)) / Y.square().sum((-2, -1))).clamp(0.0, 1.0).view(-1, 1, 1)
        Y = _orthonormal(_scaled(Z - mean * Y))
    return Y


def _typical_ratio(
    M: Tensor | HalfPair, X: Tensor | HalfPair, Y: Tensor, products: Products
) -> tuple[Float[Tensor, "K"], Float[Tensor, "K"]]:
    """What X is to be multiplied by, so that ``X M`` is 1 on average beside the directions Y; and how far it is from I.

    All directions may be in Y: then X is right as it is, beside them.
    """
    v = probe_columns(M.shape[-1], like=Y).expand(len(Y), -1, -1)
    v = v - Y @ (Y.mT @ v)
    z = products.rough(X, products.rough(M, v))
    squares = v.square().sum((-2, -1))
    ratio, typical = squares / (v * z).sum((-2, -1)), ((v - z).square().sum((-2, -1)) / squares).sqrt()
    return torch.where((ratio > 0) & (ratio < torch.inf), ratio, 1.0), typical.nan_to_num(nan=0.0)


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
