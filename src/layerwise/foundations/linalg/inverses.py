"""Inverses of positive definite matrices that are products for the most part.

On a GPU a batch of products runs near the peak of the machine, and triangular inversion and eigendecomposition do not.
Nothing here waits for the device: what went wrong is said by a tensor, one entry a matrix.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe

LEAF = 64
"""Triangles up to this size are inverted by substitution, all at once."""


def triangular_inverse(L: Float[Tensor, "*batch n n"], leaf: int = LEAF) -> Float[Tensor, "*batch n n"]:
    """The inverse of lower triangular matrices, by halves:

        [A 0; B C]⁻¹ = [A⁻¹ 0; −C⁻¹ B A⁻¹  C⁻¹]

    The smallest triangles on the diagonal are inverted together; then pairs are joined, each level in two batched
    products. The strict upper triangle of L is not read.

    >>> L = torch.tensor([[2.0, 0.0], [1.0, 4.0]])
    >>> triangular_inverse(L, leaf=1).tolist()
    [[0.5, 0.0], [-0.125, 0.25]]
    """
    n = L.shape[-1]
    levels = max(0, math.ceil(math.log2(n / leaf))) if n > leaf else 0
    size = math.ceil(n / 2**levels)
    L = _padded(L, size * 2**levels)
    D = _blocks(L, size, row=0, column=0, of=1)
    X = torch.linalg.solve_triangular(D, torch.eye(size, dtype=L.dtype, device=L.device).expand_as(D), upper=False)
    for _ in range(levels):
        A, C = X[..., 0::2, :, :], X[..., 1::2, :, :]
        low = -(C @ (_blocks(L, size, row=1, column=0, of=2) @ A))
        X = torch.cat([torch.cat([A, torch.zeros_like(A)], -1), torch.cat([low, C], -1)], -2)
        size *= 2
    return X[..., 0, :n, :n]


def _padded(L: Tensor, size: int) -> Tensor:
    """With ones on the diagonal that is added."""
    n = L.shape[-1]
    if n == size:
        return L
    whole = torch.eye(size, dtype=L.dtype, device=L.device).expand(*L.shape[:-2], size, size).clone()
    whole[..., :n, :n] = L
    return whole


def _blocks(L: Tensor, size: int, *, row: int, column: int, of: int) -> Tensor:
    """``[..., count, size, size]``: along the diagonal of squares of `of` × `of` blocks, the block (row, column)."""
    count = L.shape[-1] // (of * size)
    whole = L.unflatten(-1, (count, of, size)).unflatten(-4, (count, of, size))
    chosen = whole[..., :, row, :, :, column, :]
    return chosen.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def product_inverse(
    M: Float[Tensor, "*batch n n"], leaf: int = LEAF
) -> tuple[Float[Tensor, "*batch n n"], Bool[Tensor, "*batch"]]:
    """``M⁻¹ = L⁻ᵀ L⁻¹`` by Cholesky and `triangular_inverse`, and for which matrices it is right.

    >>> X, good = product_inverse(torch.tensor([[[4.0, 0.0], [0.0, 2.0]], [[1.0, 2.0], [2.0, 1.0]]]))
    >>> [round(x, 5) for x in X[0].diagonal().tolist()], good.tolist()
    ([0.25, 0.5], [True, False])
    """
    L, info = torch.linalg.cholesky_ex(M)
    inverse = triangular_inverse(L, leaf)
    X = inverse.mT @ inverse
    return X, (info == 0) & torch.isfinite(X).all(-1).all(-1)


def refined_inverse(
    M: Float[Tensor, "*batch n n"], guess: Float[Tensor, "*batch n n"], steps: int = 2
) -> tuple[Float[Tensor, "*batch n n"], Float[Tensor, "*batch"]]:
    """``M⁻¹`` from a symmetric guess by Newton's iteration ``X ← 2X − X M X``, and how far it is off.

    The distance is ``‖I − X M‖_F``, which bounds the relative error of ``X v``. Each step squares it, from guesses
    whose distance in operator norm is below one; from others the iteration diverges, and the distance says so. There
    is no such function for roots: ``X ← X + (I − Xᵖ M) X/p`` magnifies what does not commute with M once eigenvalues
    differ by more than 3ᵖ, so that only a multiple of I may be its guess.

    >>> M = torch.diag(torch.tensor([4.0, 16.0]))
    >>> X, distance = refined_inverse(M, torch.diag(torch.tensor([0.24, 0.06])), steps=2)
    >>> [round(x, 5) for x in X.diagonal().tolist()], bool(distance < 1e-5)
    ([0.25, 0.0625], True)
    """
    if steps < 0:
        raise InputError(describe(f"steps={steps}", "a number ≥ 0", "pass e.g. steps=2"))
    X = guess
    for _ in range(steps):
        X = 2 * X - X @ M @ X
        X = (X + X.mT) / 2  # rounding would grow in the antisymmetric part
    rest = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device) - X @ M
    return X, rest.flatten(-2).norm(dim=-1).nan_to_num(nan=torch.inf)
