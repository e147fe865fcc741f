"""Inverses of positive definite matrices by products of blocks: exact at once, without iteration.

With ``M = [A Bᵀ; B C]`` the inverse X of Cholesky's factor L is found by halves, down to leaves of 64 rows,

    X₁₁ = X(A),   L₂₁ = B X₁₁ᵀ,   X₂₂ = X(C − L₂₁ L₂₁ᵀ),   X₂₁ = −X₂₂ L₂₁ X₁₁,        M⁻¹ = XᵀX

Nearly all of the work is products of large blocks, which a GPU runs near its peak. In float32 it is as accurate as
Cholesky's factorization itself; in split fp16, where one direction is much larger than others, to a tenth of that.
(``C − B A⁻¹ Bᵀ`` with explicit inverses needs half the products, but loses the square of the condition number: at 2·10⁵
nothing is left in float32.) Nothing waits for the device: which matrices are not positive
definite is said by a tensor, and every matrix of one size takes the same launches.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float, Int8
from torch import Tensor

from layerwise.optim.cuda.linalg.split_fp16 import prepared, product
from layerwise.optim.cuda.triton.device import MOST_MATRICES, available, ceil, kernels, on

LEAF = 64
"""Rows of the blocks that one program of a kernel eliminates."""
LARGE = 512
"""Rows from which blocks are multiplied in split fp16; smaller ones in float32, one launch a product."""
STRIP, ALIGNED = 1024, 16
"""Rows of X at least that are multiplied at a time for ``XᵀX``, since what is above the diagonal is zero; in units."""


@torch.no_grad()
def block_inverse(
    M: Float[Tensor, "K n n"], *, leaf: int = LEAF, large: int = LARGE
) -> tuple[Float[Tensor, "K n n"], Bool[Tensor, "K"]]:
    """``M⁻¹``, and for which matrices it is right: those that are finite and positive definite. M is overwritten.

    >>> X, good = block_inverse(torch.tensor([[[4.0, 2.0], [2.0, 2.0]], [[1.0, 2.0], [2.0, 1.0]]]), leaf=1)
    >>> [[round(x, 5) for x in row] for row in X[0].tolist()], good.tolist()
    ([[0.5, -0.5], [-0.5, 1.0]], [True, False])
    """
    good = torch.ones(len(M), dtype=torch.int8, device=M.device)
    X = inverse_factor(M, good, leaf=leaf, large=large)
    with ieee_float32(M.device):
        inverse = _gram(X, large)
    # An entry of X that is not finite is in a sum of squares on the diagonal.
    return inverse, (good != 0) & torch.isfinite(inverse.diagonal(dim1=-2, dim2=-1)).all(-1)


def inverse_factor(
    M: Float[Tensor, "K n n"], good: Int8[Tensor, "K"], *, leaf: int = LEAF, large: int = LARGE
) -> Float[Tensor, "K n n"]:
    """X, lower triangular, with ``X M Xᵀ = I``; zero is written into `good` where a pivot is not positive."""
    X = torch.zeros_like(M, memory_format=torch.contiguous_format)
    with ieee_float32(M.device):
        _eliminate(M, X, good, leaf, large)
    return X


def _eliminate(M: Tensor, X: Tensor, good: Tensor, leaf: int, large: int) -> None:
    n = M.shape[-1]
    if n <= leaf:
        leaf_inverse(M, X, good, leaf)
        return
    h = leaf * ceil(ceil(n, leaf), 2)
    B, C, X_21 = M[:, h:, :h], M[:, h:, h:], X[:, h:, :h]
    X_11, X_22 = X[:, :h, :h], X[:, h:, h:]
    _eliminate(M[:, :h, :h], X_11, good, leaf, large)
    if n < large:
        L = torch.bmm(B, X_11.mT)
        C.baddbmm_(L, L.mT, alpha=-1)
        _eliminate(C, X_22, good, leaf, large)
        X_21.baddbmm_(X_22, torch.bmm(L, X_11), alpha=-1)
        return
    left = prepared(X_11)
    L_ = prepared(product(B, left.mT))
    product(L_, L_.mT, add=C, alpha=-1, symmetric=True, out=C)
    _eliminate(C, X_22, good, leaf, large)
    product(X_22, product(L_, left), alpha=-1, out=X_21)


def _gram(X: Tensor, large: int) -> Tensor:
    """``XᵀX`` of lower triangular matrices, the last rows first."""
    n = X.shape[-1]
    if n < large:
        return torch.bmm(X.mT, X)
    height = ALIGNED * ceil(n, ALIGNED * max(1, n // STRIP))
    *others, last = range(0, n, height)
    rows = prepared(X[:, last:])
    total = product(rows.mT, rows, symmetric=True)
    for start in reversed(others):
        end = start + height
        rows, corner = prepared(X[:, start:end, :end]), total[:, :end, :end]
        product(rows.mT, rows, add=corner, symmetric=True, out=corner)
    return total


def leaf_inverse(
    M: Float[Tensor, "K n n"], X: Float[Tensor, "K n n"], good: Int8[Tensor, "K"], leaf: int = LEAF
) -> None:
    """X of one block of at most `leaf` rows, in one launch where Triton runs; the lower triangle of M is read.

    >>> X, good = torch.zeros(1, 2, 2), torch.ones(1, dtype=torch.int8)
    >>> leaf_inverse(torch.tensor([[[4.0, 0.0], [2.0, 2.0]]]), X, good)
    >>> [[round(x, 5) for x in row] for row in X[0].tolist()], good.tolist()
    ([[0.5, 0.0], [-0.5, 1.0]], [1])
    """
    K, n = M.shape[:2]
    if M.dtype == torch.float32 and K <= MOST_MATRICES and available(M.device):
        half = max(16, (1 << (leaf - 1).bit_length()) // 2)
        with on(M.device):
            kernels("inverse_kernels").leaf_kernel[(K,)](
                M, X, good, n, *M.stride()[:2], *X.stride()[:2], HALF=half, num_warps=1
            )
        return
    L, info = torch.linalg.cholesky_ex(M)
    right = (info == 0) & torch.isfinite(L.diagonal(dim1=-2, dim2=-1)).all(-1)
    good.mul_(right)
    identity = torch.eye(n, dtype=M.dtype, device=M.device).expand_as(M)
    X.copy_(torch.linalg.solve_triangular(torch.where(right[:, None, None], L, identity), identity, upper=False))


@contextmanager
def ieee_float32(device: torch.device) -> Iterator[None]:
    """Products in float32 proper: what is subtracted from a pivot must not be rounded to TF32's 11 bits."""
    matmul = torch.backends.cuda.matmul
    name, exact = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, name)
    if device.type != "cuda" or before == exact:
        yield
        return
    setattr(matmul, name, exact)
    try:
        yield
    finally:
        setattr(matmul, name, before)
