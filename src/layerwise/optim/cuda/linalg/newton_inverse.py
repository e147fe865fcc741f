"""Inverses of positive definite matrices that are products for the most part.

On a GPU a batch of products runs near the peak of the machine, and triangular inversion and eigendecomposition do not.
Nothing here waits for the device: what went wrong is said by a tensor, one entry a matrix.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.cuda.linalg.fp16 import Half, HalfPair
from layerwise.optim.cuda.linalg.products import TORCH, Products

LEAF = 64
"""Triangles up to this size are inverted by substitution, all at once."""

RESIDUAL_LIMIT = 1e-2
"""Of the relative error of ``X v``, for random v and for ``v = M^½ z``."""

RADIUS_LIMIT = 0.25
"""Of the spectral radius of ``I − X M``. After one step it is the square of what it was: ½ before is ¼ after."""


def triangular_inverse(
    L: Float[Tensor, "*batch n n"], leaf: int = LEAF, products: Products = TORCH
) -> Float[Tensor, "*batch n n"]:
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
        low = products.precise(C, products.precise(_blocks(L, size, row=1, column=0, of=2), A), alpha=-1)
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
    M: Float[Tensor, "*batch n n"], leaf: int = LEAF, products: Products = TORCH
) -> tuple[Float[Tensor, "*batch n n"], Bool[Tensor, "*batch"]]:
    """``M⁻¹ = L⁻ᵀ L⁻¹`` by Cholesky and `triangular_inverse`, and for which matrices it is right.

    >>> X, good = product_inverse(torch.tensor([[[4.0, 0.0], [0.0, 2.0]], [[1.0, 2.0], [2.0, 1.0]]]))
    >>> [round(x, 5) for x in X[0].diagonal().tolist()], good.tolist()
    ([0.25, 0.5], [True, False])
    """
    L, info = torch.linalg.cholesky_ex(M)
    inverse = products.prepared(triangular_inverse(L, leaf, products))
    X = products.precise(inverse.mT, inverse, symmetric=True)
    return X, (info == 0) & torch.isfinite(X).all(-1).all(-1)


def refined_inverse(
    M: Float[Tensor, "*batch n n"] | HalfPair,
    guess: Float[Tensor, "*batch n n"] | HalfPair,
    steps: int = 1,
    products: Products = TORCH,
    probes: Float[Tensor, "n k"] | None = None,
) -> tuple[Float[Tensor, "*batch n n"], Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """``M⁻¹`` from a symmetric guess by Newton's iteration, with the residual and the radius of `inverse_errors`.

    A step is ``R = I − X M, X ← X + R X``: two products, after which ``I − X M`` is R². It converges where the spectral
    radius of R is below one, and diverges elsewhere: use the result only where `accepted`. The product ``R X`` only
    corrects, and may be rough. There is no such function for roots: ``X ← X + (I − Xᵖ M) X/p`` magnifies what does not
    commute with M once eigenvalues differ by more than 3ᵖ, so that only a multiple of I may be its guess.

    >>> M = torch.diag(torch.tensor([4.0, 16.0]))
    >>> X, residual, radius = refined_inverse(M, torch.diag(torch.tensor([0.24, 0.06])))
    >>> [round(x, 4) for x in X.diagonal().tolist()], round(float(residual), 4), bool(accepted(residual, radius))
    ([0.2496, 0.0624], 0.0016, True)
    """
    if steps < 0:
        raise InputError(describe(f"steps={steps}", "a number ≥ 0", "pass e.g. steps=1"))
    X = guess.value() if isinstance(guess, HalfPair) else guess
    operand, damped = guess, products.prepared(M, definite=True)
    for _ in range(steps):
        X_ = products.prepared(operand, definite=True)
        R = products.remainder(X_, damped)
        X = operand = products.rough(R, X_, add=X, symmetric=True)  # rounding would grow in the antisymmetric part
    return X, *_errors(damped, X, probes, products)


def series_inverse(
    M: Float[Tensor, "*batch n n"] | HalfPair,
    guess: Float[Tensor, "*batch n n"] | HalfPair,
    order: int = 4,
    products: Products = TORCH,
    probes: Float[Tensor, "n k"] | None = None,
) -> tuple[Float[Tensor, "*batch n n"], Float[Tensor, "*batch"], Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """``X + R X + … + Rᵒ⁻¹ X``, ``R = I − X M``, after which ``I − X M`` is Rᵒ; an order of 2 is Newton's step.

    One precise product whatever the order: an order of 4 is two steps of `refined_inverse` for little more than one,
    though what rough products leave of R is not corrected by a second R. Beside the residual and the radius comes
    ``‖R‖_F/√n``, what ``‖R v‖/‖v‖`` is in root mean square: how far the guess was.

    >>> M = torch.diag(torch.tensor([4.0, 16.0]))
    >>> X, residual, radius, before = series_inverse(M, torch.diag(torch.tensor([0.2, 0.05])))
    >>> [round(x, 4) for x in X.diagonal().tolist()], round(float(radius), 4), round(float(before), 4)
    ([0.2496, 0.0624], 0.0016, 0.2)
    """
    if order < 2:
        raise InputError(describe(f"order={order}", "a number ≥ 2", "pass e.g. order=4"))
    X = guess.value() if isinstance(guess, HalfPair) else guess
    damped, X_ = products.prepared(M, definite=True), products.prepared(guess, definite=True)
    R, Y = products.remainder(X_, damped), X_
    for _ in range(order - 2):
        Y = products.improved(R, Y, X_, X)
    X = products.rough(R, Y, add=X, symmetric=True)
    return X, *_errors(damped, X, probes, products), _root_mean_square(R)


def _root_mean_square(R: Tensor | Half) -> Tensor:
    """``‖R‖_F/√n``."""
    n = R.shape[-1]
    if isinstance(R, Tensor):
        return torch.linalg.vector_norm(R, dim=(-2, -1)) / n**0.5
    return torch.linalg.vector_norm(R.hi, dim=(-2, -1), dtype=torch.float32) / R.scale / n**0.5


def _errors(M: Any, X: Tensor, probes: Tensor | None, products: Products) -> tuple[Tensor, Tensor]:
    """`inverse_errors`, of pairs where M is one: thin products in float32 would cost as much as all others."""
    if isinstance(M, HalfPair):
        return inverse_errors(M, products.prepared(X, definite=True), probes, products)
    return inverse_errors(M, X, probes)


def inverse_errors(
    M: Float[Tensor, "*batch n n"] | HalfPair,
    X: Float[Tensor, "*batch n n"] | HalfPair,
    probes: Float[Tensor, "n k"] | None = None,
    products: Products = TORCH,
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """How far X is from ``M⁻¹``, in four products with a few columns, v among them: the residual and the radius.

    With ``u = X v`` and ``r = v − M u`` the error of u is ``M⁻¹ r = e + T e + T² e + …``, ``e = X r``, ``T = I − X M``.
    The radius estimates the spectral radius of T, by ``‖Tᵀ r‖/‖r‖``. Of the relative errors of X on random vectors and
    on gradients, ``M^½ z``, the residual estimates the larger, rounding included, within a factor of three: it is the
    larger of ‖e‖/‖u‖ and half the geometric mean of that and ``‖T v‖/‖v‖``, the error on ``M v``, in root mean square,
    over 1 − radius. Both are infinite where they are not numbers, the residual also from a radius of one: what X
    misses altogether only the radius sees.

    >>> residual, radius = inverse_errors(torch.eye(3), 0.9 * torch.eye(3))
    >>> round(float(residual), 4), round(float(radius), 4)
    (0.1111, 0.1)
    """
    like = M.scale if isinstance(M, HalfPair) else M
    v = probe_columns(M.shape[-1], like=like) if probes is None else probes.to(like)
    v = v.expand(*M.shape[:-2], *v.shape)
    u = products.precise(X, v)
    M_u, M_v = _both(M, u, v, products)
    r = v - M_u
    e, XM_v = _both(X, r, M_v, products)
    norms = torch.cat([r - products.precise(M, e), v - XM_v, e, r, v, u], -1).norm(dim=-2).unflatten(-1, (6, -1))
    # Nothing over nothing is zero.
    ratios = norms[..., :3, :] / norms[..., 3:, :].clamp(min=torch.finfo(v.dtype).tiny)
    radius = _or_infinite(ratios[..., 0, :].amax(-1))
    on_images, on_random = ratios[..., 1:, :].square().mean(-1).sqrt().unbind(-1)
    residual = torch.maximum(on_random, (on_random * on_images).sqrt() / 2) / (1 - radius).clamp(min=0)
    return _or_infinite(residual), radius


def _both(A: Any, x: Tensor, y: Tensor, products: Products) -> tuple[Tensor, Tensor]:
    """``A x`` and ``A y`` in one product; made alike in size before, since halves of float16 share a scale."""
    sizes = [t.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(t.dtype).tiny) for t in (x, y)]
    found = products.precise(A, torch.cat([x / sizes[0], y / sizes[1]], -1)).tensor_split(2, -1)
    return found[0] * sizes[0], found[1] * sizes[1]


def _or_infinite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=torch.inf, posinf=torch.inf)


def probe_columns(n: int, columns: int = 8, *, like: Tensor) -> Float[Tensor, "n k"]:
    """`signs`, kept from call to call; up to twice as many rows as columns, the columns of I, which miss nothing.

    >>> probe_columns(3, 1, like=torch.zeros(())).tolist(), probe_columns(2, 1, like=torch.zeros(())).tolist()
    ([[-1.0], [-1.0], [1.0]], [[1.0, 0.0], [0.0, 1.0]])
    """
    return _kept_columns(n, columns, like.dtype, like.device)


@lru_cache(maxsize=64)
def _kept_columns(n: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        like = torch.empty(0, dtype=dtype, device=device)
        return torch.eye(n, dtype=dtype, device=device) if n <= 2 * columns else signs(n, columns, like)


def signs(n: int, columns: int, like: Tensor) -> Float[Tensor, "n k"]:
    """±1 without a pattern, the same at every call: a hash of the position, made where `like` lies.

    >>> signs(3, 2, torch.zeros(())).tolist()
    [[-1.0, -1.0], [1.0, 1.0], [1.0, -1.0]]
    """
    x = torch.arange(1, n * columns + 1, device=like.device)
    for _ in range(2):  # multiply and fold, modulo 2³²
        x = (x * 0x45D9F3B) & 0xFFFFFFFF
        x = x ^ (x >> 16)
    return (1 - 2 * ((x >> 7) & 1)).to(like.dtype).reshape(n, columns)


def accepted(residual: Float[Tensor, "*batch"], radius: Float[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
    """Which inverses may be used: both numbers within `RESIDUAL_LIMIT` and `RADIUS_LIMIT`.

    >>> accepted(torch.tensor([1e-4, 1e-4, torch.inf]), torch.tensor([0.1, 2.0, 0.1])).tolist()
    [True, False, False]
    """
    return (residual <= RESIDUAL_LIMIT) & (radius <= RADIUS_LIMIT)
