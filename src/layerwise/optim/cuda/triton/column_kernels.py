"""Triton kernels of `triton.columns`: sums over the rows of listed matrices, and what a running mean makes of them.

Imported on first use only; without Triton the module can be imported, and has no kernels.
"""

from __future__ import annotations

from typing import no_type_check

from layerwise.optim.cuda.triton.product_kernels import _jit_varying, packed_at, tl, triton

__all__ = ["border_kernel", "column_kernel", "triton"]

# `no_type_check` keeps checkers that rewrite functions at import away from kernels, which Triton reads as text.


@_jit_varying("rows_each", "first", by_group=("sums", "squares"))
@no_type_check
def column_kernel(
    X, half, sums, squares, m, n, rows_each, X_row, first,
    LISTED: tl.constexpr, SUMS: tl.constexpr, CAST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows of some columns of one listed matrix: their sums, the sum of all squares, and a copy in half precision.

    Every program writes where no other does, `sums` [K, parts, n] and `squares` [K, parts, blocks], so that the same
    numbers come out every time. With CAST it is the rounded matrix that is summed.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    k = tl.program_id(2)
    matrix = X[0]
    for q in tl.static_range(1, LISTED):
        matrix = tl.where(k == q, X[q], matrix)
    place = (first + k).to(tl.int64)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    start = part * rows_each
    end = tl.minimum(start + rows_each, m)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    square = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for row in range(start, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = (rows[:, None] < end) & (columns[None, :] < n)
        x = tl.load(matrix + rows[:, None].to(tl.int64) * X_row + columns[None, :], mask=inside, other=0.0)
        if CAST:
            rounded = x.to(half.dtype.element_ty)
            here = half + (place * m + rows[:, None]) * n + columns[None, :]
            tl.store(here, rounded, mask=inside)
            x = rounded
        x = x.to(tl.float32)
        square += x * x
        if SUMS:
            total += x
    at = place * tl.num_programs(1) + part
    tl.store(squares + at * tl.num_programs(0) + block, tl.sum(tl.sum(square, axis=1), axis=0))
    if SUMS:
        tl.store(sums + at * n + columns, tl.sum(total, axis=0), mask=columns < n)


@_jit_varying("parts", "blocks", "K", by_group=("count", "sums", "squares"))
@no_type_check
def border_kernel(
    mean, count, weight, skipped, sums, squares, all_finite, by, alpha, rest_hi, rest_lo, log_hi, log_lo, n, parts,
    blocks, K, mean_k, mean_row,
    BORDER: tl.constexpr, PACKED: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Of one mean: whether its layer is taken, its count, the weight of what is new, and the column of the bias.

    Finite squares say that every entry is finite, and that no product of two columns will overflow. The first
    program counts the layers that are left out; for that every program looks at the squares of all, which are few.
    """
    k = tl.program_id(0).to(tl.int64)
    alpha = alpha * tl.load(by)
    groups = tl.arange(0, GROUPS)
    parts_at = tl.arange(0, PARTS)
    each = parts * blocks
    total = tl.zeros((GROUPS,), dtype=tl.float32)
    for start in range(0, each, PARTS):
        here = start + parts_at
        inside = (groups[:, None] < K) & (here[None, :] < each)
        total += tl.sum(tl.load(squares + groups[:, None] * each + here[None, :], mask=inside, other=0.0), axis=1)
    finite = (total < float("inf")) & (total * alpha < float("inf"))  # nan is not less than anything
    asked = (groups < K) & (tl.load(all_finite) != 0)
    take = tl.sum(((groups == k) & finite & asked).to(tl.int32), axis=0)
    if k == 0:
        tl.store(skipped, tl.sum((asked & ~finite).to(tl.int32), axis=0).to(tl.int64))
    t = tl.load(count + k) + take.to(tl.float32)
    # In float64, from two float32 each: 1 − ρᵗ of a ρ near 1 keeps its digits.
    one = tl.full((), 1.0, dtype=tl.float64)
    steps = tl.maximum(t, 1.0).to(tl.float64)
    rest = one * rest_hi + one * rest_lo
    past = tl.exp(steps * log_hi + steps * log_lo)
    w = tl.where(take > 0, (rest / (one - past)).to(tl.float32), 0.0)
    tl.store(count + k, t)
    tl.store(weight + k, w)
    if BORDER:  # noqa: SIM102  known when the kernel is compiled, the next is not
        if take > 0:
            for start in range(0, n, COLUMNS):
                columns = start + tl.arange(0, COLUMNS)
                inside = columns < n
                edge = tl.zeros((COLUMNS,), dtype=tl.float32)
                for part in range(parts):
                    edge += tl.load(sums + (k * parts + part) * n + columns, mask=inside, other=0.0)
                edge *= alpha
                if PACKED:  # beside the diagonal there is only what is in its own tile
                    below = mean + k * mean_k + packed_at(n, columns)
                    beside = mean + k * mean_k + packed_at(columns, n)
                    mirrored = inside & (columns // 16 == n // 16)
                else:
                    below = mean + k * mean_k + n * mean_row + columns  # offsets in one matrix are 32 bits
                    beside = mean + k * mean_k + columns * mean_row + n
                    mirrored = inside
                former = tl.load(below, mask=inside, other=0.0)
                # With weight 1 the former content is ignored, even if it is not finite.
                edge = tl.where(w == 1.0, edge, former + w * (edge - former))
                tl.store(below, edge, mask=inside)
                tl.store(beside, edge, mask=mirrored)
            if PACKED:  # noqa: SIM108 (decided when compiled)
                corner = mean + k * mean_k + packed_at(n, n)
            else:
                corner = mean + k * mean_k + n * (mean_row + 1)
            last = tl.load(corner)
            tl.store(corner, tl.where(w == 1.0, 1.0, last + w * (1.0 - last)))
