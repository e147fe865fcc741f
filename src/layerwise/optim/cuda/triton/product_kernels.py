"""Triton kernels of `triton.products`: tiles of symmetric products and of products of half-precision pairs.

Imported on first use only; without Triton the module can be imported, and has no kernels.
"""

from __future__ import annotations

from typing import no_type_check

from layerwise.optim.cuda.triton.elementwise_kernels import _jit, _jit_varying, tl, triton

__all__ = ["gram_finish_kernel", "gram_kernel", "pair_product_kernel", "triton"]

# `no_type_check` keeps checkers that rewrite functions at import away from kernels, which Triton reads as text.


@_jit
@no_type_check
def lower_tile(index):
    """The tile (i, j ≤ i) with the given index, counting the lower triangle row by row."""
    i = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > index, i - 1, i)  # the root is rounded: correct it by one either way
    i = tl.where((i + 1) * (i + 2) // 2 <= index, i + 1, i)
    return i, index - i * (i + 1) // 2


@_jit
@no_type_check
def packed_at(rows, columns, TILE: tl.constexpr = 16):
    """Where the entries lie in the tiles of `packed`: those on and below the diagonal, row by row."""
    i = rows // TILE
    return (
        (i * (i + 1) // 2) * (TILE * TILE) + (rows % TILE) * TILE + (columns // TILE) * (TILE * TILE) + columns % TILE
    )


@_jit
@no_type_check
def grouped_tile(index, tiles_m, tiles_n, GROUP: tl.constexpr):
    """The tile (i, j) with the given index, in groups of rows, so that programs near in time share operands."""
    width = GROUP * tiles_n
    first = (index // width) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    return first + (index % width) % rows, (index % width) // rows


@_jit
@no_type_check
def store_update(total, stride, i, j, rows, columns, n, product, weight, PACKED: tl.constexpr):
    """total ← total + weight·(product − total) on one tile, and its mirror image when i ≠ j, unless that is packed."""
    inside = (rows[:, None] < n) & (columns[None, :] < n)
    if PACKED:
        inside = inside & (columns[None, :] // 16 <= rows[:, None] // 16)
        here = total + packed_at(rows[:, None], columns[None, :])
    else:
        here = total + rows[:, None] * stride + columns[None, :]
    former = tl.load(here, mask=inside, other=0.0)
    # With weight 1 the former content is ignored, even if it is not finite.
    updated = tl.where(weight == 1.0, product, former + weight * (product - former))
    tl.store(here, updated, mask=inside)
    if not PACKED:  # noqa: SIM102 (decided when compiled, the next when run)
        if i != j:
            tl.store(total + columns[None, :] * stride + rows[:, None], updated, mask=inside)


@_jit_varying("rows_each")
@no_type_check
def gram_kernel(
    total, X, weight, by, alpha, partial, m, n, rows_each,
    total_k, total_row, X_k, X_row,
    LISTED: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """One tile of alpha·XᵀX: written into the total, or (SPLIT) the part of some rows into `partial`.

    X is a tuple: one stack, or as many matrices of equal strides as there are totals.
    """
    index, part, k = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    w = tl.load(weight + k)
    if w != 0.0:  # a weight of zero leaves the total alone, whatever X is, and costs nothing
        i, j = lower_tile(index)
        left = i * BLOCK + tl.arange(0, BLOCK)
        right = j * BLOCK + tl.arange(0, BLOCK)
        matrix = X[0]
        for q in tl.static_range(1, LISTED):
            matrix = tl.where(k == q, X[q], matrix)
        matrix += k * X_k
        start = part * rows_each
        end = tl.minimum(start + rows_each, m)
        rows = start + tl.arange(0, BLOCK_ROWS)
        left_at = matrix + left[:, None] + rows[None, :].to(tl.int64) * X_row
        right_at = matrix + rows[:, None].to(tl.int64) * X_row + right[None, :]
        acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for row in range(start, end, BLOCK_ROWS):
            inside = row + tl.arange(0, BLOCK_ROWS) < end
            a = tl.load(left_at, mask=(left[:, None] < n) & inside[None, :], other=0.0)
            b = tl.load(right_at, mask=inside[:, None] & (right[None, :] < n), other=0.0)
            acc = tl.dot(a, b, acc)
            left_at += BLOCK_ROWS * X_row
            right_at += BLOCK_ROWS * X_row
        acc *= alpha * tl.load(by)
        if not SPLIT:
            store_update(total + k * total_k, total_row, i, j, left, right, n, acc, w, PACKED)
        else:
            tile = (part + tl.num_programs(1) * k) * tl.num_programs(0) + index
            line, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
            tl.store(partial + tile * BLOCK * BLOCK + line[:, None] * BLOCK + column[None, :], acc)


@_jit_varying("parts")
@no_type_check
def gram_finish_kernel(
    total, weight, partial, parts, n, total_k, total_row,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """The sum of the parts that `gram_kernel` left, LINES lines of a tile at a time, written into the total."""
    index, chunk, k = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    w = tl.load(weight + k)
    if w != 0.0:
        i, j = lower_tile(index)
        line = chunk * LINES + tl.arange(0, LINES)
        column = tl.arange(0, BLOCK)
        acc = tl.zeros((LINES, BLOCK), dtype=tl.float32)
        for part in range(parts):
            tile = (part + parts * k) * tl.num_programs(0) + index
            acc += tl.load(partial + tile * BLOCK * BLOCK + line[:, None] * BLOCK + column[None, :])
        store_update(total + k * total_k, total_row, i, j, i * BLOCK + line, j * BLOCK + column, n, acc, w, PACKED)


@_jit
@no_type_check
def cut_off(x):
    """What is too large for float16; NaN and infinity stay."""
    return tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -65504.0), 65504.0), x)


@_jit
@no_type_check
def added(
    acc, D, D_row, b, identity, rows, columns, m, n,
    HAS_D: tl.constexpr, HAS_IDENTITY: tl.constexpr, SKEW: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """A tile of the product with what is added to it, and what its mirror image has: D with the other sign if SKEW."""
    if HAS_IDENTITY:
        acc += tl.where(rows[:, None] == columns[None, :], identity, 0.0)
    mirrored = acc
    if HAS_D:
        inside = (rows[:, None] < m) & (columns[None, :] < n)
        former = tl.load(D + rows[:, None] * D_row + columns[None, :], mask=inside, other=0.0)
        # With beta 0 the matrix D is ignored, even if it is not finite.
        d = tl.where(b == 0.0, 0.0, b * former.to(tl.float32))
        acc += d
        if SKEW:
            mirrored -= d
        else:
            mirrored = acc
    if CUT:
        acc, mirrored = cut_off(acc), cut_off(mirrored)
    return acc, mirrored


@_jit
@no_type_check
def store_symmetric(
    C, C_row, acc, D, D_row, b, identity, i, j, n,
    HAS_D: tl.constexpr, HAS_IDENTITY: tl.constexpr, SKEW: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tile (i, j ≤ i) and its mirror image; on the diagonal the tile mirrors itself.

    Masks are the same for neighbours in a row, also on the diagonal: so stores are wide.
    """
    rows, columns = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    lower, upper = added(acc, D, D_row, b, identity, rows, columns, n, n, HAS_D, HAS_IDENTITY, SKEW, CUT)
    lower, upper = lower.to(C.dtype.element_ty), tl.trans(upper.to(C.dtype.element_ty))
    lower = tl.where((i == j) & (rows[:, None] < columns[None, :]), upper, lower)
    here = C + rows[:, None] * C_row + columns[None, :]
    there = C + columns[:, None] * C_row + rows[None, :]
    tl.store(here, lower, mask=(rows[:, None] < n) & (columns[None, :] < n))
    tl.store(there, upper, mask=(columns[:, None] < n) & (rows[None, :] < n) & (i != j))


@_jit_varying(by_group=("A_scale", "B_scale", "alpha", "beta"))
@no_type_check
def pair_product_kernel(
    C, A_hi, A_lo, B_hi, B_lo, A_scale, B_scale, D, alpha, beta, alpha_number, beta_number, identity, m, n, depth,
    A_k, A_row, A_column, B_k, B_row, B_column, C_k, C_row, D_k, D_row,
    A_PAIR: tl.constexpr, B_PAIR: tl.constexpr, HAS_D: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr,
    HAS_IDENTITY: tl.constexpr, SYMMETRIC: tl.constexpr, SKEW: tl.constexpr, CUT: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of identity·I + beta·D + alpha·(A_lo B_hi + A_hi B_lo + A_hi B_hi)/(A_scale B_scale).

    All in one accumulator; without A_PAIR or B_PAIR there is no A_lo or B_lo. Numbers that hold for all matrices come
    by value. With SYMMETRIC only tiles on and below the diagonal are computed, and mirrored; with SKEW the matrix D is
    antisymmetric.
    """
    index, k = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if SYMMETRIC:
        i, j = lower_tile(index)
    else:
        i, j = grouped_tile(index, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP)
    rows = i * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = j * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_DEPTH)
    A_at = k * A_k + rows[:, None] * A_row + inner[None, :] * A_column
    B_at = k * B_k + inner[:, None] * B_row + columns[None, :] * B_column
    A_hi += A_at
    A_lo += A_at
    B_hi += B_at
    B_lo += B_at
    A_inside = rows[:, None] < m
    B_inside = columns[None, :] < n
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, depth, BLOCK_DEPTH):
        if EVEN_DEPTH:
            A_mask, B_mask = A_inside, B_inside
        else:
            A_mask = A_inside & (inner[None, :] < depth - start)
            B_mask = (inner[:, None] < depth - start) & B_inside
        a_hi = tl.load(A_hi, mask=A_mask, other=0.0)
        b_hi = tl.load(B_hi, mask=B_mask, other=0.0)
        if A_PAIR:
            a_lo = tl.load(A_lo, mask=A_mask, other=0.0)
            acc = tl.dot(a_lo, b_hi, acc)
            A_lo += BLOCK_DEPTH * A_column
        if B_PAIR:
            b_lo = tl.load(B_lo, mask=B_mask, other=0.0)
            acc = tl.dot(a_hi, b_lo, acc)
            B_lo += BLOCK_DEPTH * B_row
        acc = tl.dot(a_hi, b_hi, acc)
        A_hi += BLOCK_DEPTH * A_column
        B_hi += BLOCK_DEPTH * B_row
    # Reciprocals of powers of two are exact; their product may be subnormal, where that of the scales overflows.
    acc *= (1.0 / tl.load(A_scale + k)) * (1.0 / tl.load(B_scale + k))
    if HAS_ALPHA:
        acc *= tl.load(alpha + k)
    acc *= alpha_number
    b = beta_number
    if HAS_BETA:
        b *= tl.load(beta + k)
    C += k * C_k
    if HAS_D:
        D += k * D_k
    if not SYMMETRIC:
        acc, _ = added(acc, D, D_row, b, identity, rows, columns, m, n, HAS_D, HAS_IDENTITY, SKEW, CUT)
        here = C + rows[:, None] * C_row + columns[None, :]
        tl.store(here, acc.to(C.dtype.element_ty), mask=(rows[:, None] < m) & (columns[None, :] < n))
    else:
        store_symmetric(C, C_row, acc, D, D_row, b, identity, i, j, n, HAS_D, HAS_IDENTITY, SKEW, CUT, BLOCK_M)
