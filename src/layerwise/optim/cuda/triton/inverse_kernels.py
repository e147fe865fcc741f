"""The Triton kernel of `linalg.block_inverse`."""

from __future__ import annotations

from typing import no_type_check

from layerwise.optim.cuda.triton.product_kernels import _jit, tl, triton

__all__ = ["leaf_kernel", "triton"]


@_jit
@no_type_check
def eliminated(m, positive, HALF: tl.constexpr):
    """X with ``X m Xᵀ = I``, lower triangular, and whether all pivots were positive numbers (1 is taken elsewhere).

    Gauss's elimination of ``[m I]`` by columns, rows of the right half divided by the roots of their pivots. What is
    left of m stays symmetric: a pivot's row is its column.
    """
    i = tl.arange(0, HALF)
    row, column = i[:, None], i[None, :]
    x = tl.where(row == column, 1.0, 0.0)
    for j in range(0, HALF):
        pivots = tl.sum(tl.where(row == j, m, 0.0), 0)
        solved = tl.sum(tl.where(row == j, x, 0.0), 0)
        below = tl.sum(tl.where(column == j, m, 0.0), 1)
        d = tl.max(tl.where(i == j, pivots, float("-inf")), 0)
        fine = (d > 0.0) & (d < float("inf"))
        positive = tl.where(fine, positive, 0)
        d = tl.where(fine, d, 1.0)
        share = tl.where(i > j, below / d, 0.0)[:, None]
        m -= share * pivots[None, :]
        x = tl.where(row == j, x / tl.sqrt(d), x - share * solved[None, :])
    return x, positive


@_jit
@no_type_check
def leaf_kernel(M, X, good, n, M_k, M_row, X_k, X_row, HALF: tl.constexpr):
    """X with ``X M Xᵀ = I`` of one block of n rows, at most 2 HALF of them, by halves as `block_inverse`; one warp.

    Of M the lower triangle is read. `good` becomes 0 where a pivot is not a positive number. The upper right quarter of
    X is not written.
    """
    k = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HALF)
    row, column = i[:, None], i[None, :]
    low, high = tl.maximum(row, column), tl.minimum(row, column)
    M += k * M_k
    X += k * X_k
    identity = tl.where(row == column, 1.0, 0.0)
    first = low < n
    a = tl.where(first, tl.load(M + low * M_row + high, mask=first, other=0.0), identity)
    x, positive = eliminated(a, tl.full((), 1, tl.int32), HALF)
    tl.store(X + row * X_row + column, x, mask=first)
    if n > HALF:
        second, between = low + HALF < n, (row + HALF < n) & (column < n)
        b = tl.load(M + (row + HALF) * M_row + column, mask=between, other=0.0)
        c = tl.load(M + (low + HALF) * M_row + high + HALF, mask=second, other=0.0)
        # Three TF32 products are as accurate as float32's here, and compile in two thirds of the time.
        L = tl.dot(b, tl.trans(x), input_precision="tf32x3")
        c = tl.where(second, c - tl.dot(L, tl.trans(L), input_precision="tf32x3"), identity)
        y, positive = eliminated(c, positive, HALF)
        tl.store(X + (row + HALF) * X_row + column + HALF, y, mask=second)
        z = tl.dot(y, tl.dot(L, x, input_precision="tf32x3"), input_precision="tf32x3")
        tl.store(X + (row + HALF) * X_row + column, -z, mask=between)
    tl.store(good + k, 0, mask=positive == 0)
