"""The Triton kernel of `linalg.block_inverse`."""

from __future__ import annotations

from typing import no_type_check

from layerwise.optim.cuda.triton.product_kernels import _jit, tl, triton

__all__ = ["leaf_kernel", "triton"]


@_jit
@no_type_check
def leaf_kernel(M, X, good, n, M_k, M_row, X_k, X_row, BLOCK: tl.constexpr):
    """X with ``X M Xᵀ = I`` of one block of n rows, lower triangular, in registers.

    Gauss's elimination of ``[M I]`` by columns, rows of the right half divided by the roots of their pivots. Of M the
    lower triangle is read. `good` becomes 0 where a pivot is not a positive number; 1 is taken in its place.
    """
    k = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    row, column = i[:, None], i[None, :]
    inside = (row < n) & (column < n)
    identity = tl.where(row == column, 1.0, 0.0)
    at = M + k * M_k + tl.maximum(row, column) * M_row + tl.minimum(row, column)
    m = tl.where(inside, tl.load(at, mask=inside, other=0.0), identity)
    x = identity
    positive = tl.full((), 1, tl.int32)
    for j in range(0, n):
        below = tl.sum(tl.where(column == j, m, 0.0), 1)
        pivots = tl.sum(tl.where(row == j, m, 0.0), 0)
        solved = tl.sum(tl.where(row == j, x, 0.0), 0)
        d = tl.sum(tl.where(i == j, pivots, 0.0), 0)
        fine = (d > 0.0) & (d < float("inf"))
        positive = tl.where(fine, positive, 0)
        d = tl.where(fine, d, 1.0)
        share = tl.where(i > j, below / d, 0.0)[:, None]
        m -= share * pivots[None, :]
        x = tl.where(row == j, x / tl.sqrt(d), x - share * solved[None, :])
    tl.store(X + k * X_k + row * X_row + column, x, mask=inside)
    tl.store(good + k, 0, mask=positive == 0)
