"""Triton kernels of `triton.packed`: between squares and the lower triangle of their tiles of 16 × 16.

A store is wide where neighbours in a row of the square are neighbours in a thread, and share their mask: so blocks are
turned before their mirror image is stored, and masks change at tiles alone.

Imported on first use only; without Triton the module can be imported, and has no kernels.
"""

from __future__ import annotations

from typing import no_type_check

from layerwise.optim.cuda.triton.product_kernels import _jit, _jit_varying, lower_tile, packed_at, tl, triton
from layerwise.optim.cuda.triton.split_kernels import power_of_two

__all__ = ["ema_kernel", "mirror_kernel", "put_kernel", "square_kernel", "triton"]


@_jit
@no_type_check
def ema_kernel(P, new, weight, m, n, P_k, new_k, new_row, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """P ← P + weight·(new − P) on one block on or below the diagonal; `new` is PACKED, or a square, zero from m on."""
    index, k = tl.program_id(0), tl.program_id(1).to(tl.int64)
    w = tl.load(weight + k)
    if w != 0.0:
        i, j = lower_tile(index)
        rows = i * BLOCK + tl.arange(0, BLOCK)
        columns = j * BLOCK + tl.arange(0, BLOCK)
        kept = (rows[:, None] < n) & (columns[None, :] // 16 <= rows[:, None] // 16)
        place = packed_at(rows[:, None], columns[None, :])
        here = P + k * P_k + place
        if PACKED:
            x = tl.load(new + k * new_k + place, mask=kept, other=0.0).to(tl.float32)
        else:
            inside = kept & (rows[:, None] < m) & (columns[None, :] < m)
            x = tl.load(new + k * new_k + rows[:, None] * new_row + columns[None, :], mask=inside, other=0.0)
            x = x.to(tl.float32)
        former = tl.load(here, mask=kept, other=0.0)
        # With weight 1 the former content is ignored, even if it is not finite.
        tl.store(here, tl.where(w == 1.0, x, former + w * (x - former)), mask=kept)


@_jit
@no_type_check
def square_kernel(
    out, lo, scale, P, largest, shift, fill, own, n, P_k, out_k,
    HALVES: tl.constexpr, SHIFTED: tl.constexpr, FILLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block on or below the diagonal, and its mirror image, of the square: in float32 (0), one half or two.

    The power of two comes from the bits of the `largest` entry, and is left in `scale`.
    """
    index, k = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, j = lower_tile(index)
    rows = i * BLOCK + tl.arange(0, BLOCK)
    columns = j * BLOCK + tl.arange(0, BLOCK)
    kept = (rows[:, None] < n) & (columns[None, :] // 16 <= rows[:, None] // 16)
    mirrored = (rows[:, None] < n) & (columns[None, :] // 16 < rows[:, None] // 16)
    x = tl.load(P + k * P_k + packed_at(rows[:, None], columns[None, :]), mask=kept, other=0.0)
    on = rows[:, None] == columns[None, :]
    if SHIFTED:
        x = tl.where(on, x + tl.load(shift + k), x)
    if FILLED:
        x = tl.where(on & (rows[:, None] >= own), tl.load(fill + k), x)
    here = k * out_k + rows[:, None] * n + columns[None, :]
    there = k * out_k + columns[None, :] * n + rows[:, None]
    if HALVES > 0:
        factor = power_of_two(tl.load(largest + k))
        if index == 0:
            tl.store(scale + k, factor)
        x *= factor
    upper = x.to(out.dtype.element_ty)
    tl.store(out + here, upper, mask=kept)
    tl.store(out + there, upper, mask=mirrored)
    if HALVES == 2:
        lower = (x - upper.to(tl.float32)).to(tl.float16)
        tl.store(lo + here, lower, mask=kept)
        tl.store(lo + there, lower, mask=mirrored)


@_jit
@no_type_check
def mirror_kernel(out, P, n, P_k, P_half, HALVES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """One block on or below the diagonal, and its mirror image, of the square: as it is, each half by itself."""
    index, k = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, j = lower_tile(index)
    rows = i * BLOCK + tl.arange(0, BLOCK)
    columns = j * BLOCK + tl.arange(0, BLOCK)
    source = P + (k // HALVES) * P_k + (k % HALVES) * P_half + packed_at(rows[:, None], columns[None, :], TILE)
    out += k * n * n
    here, there = rows[:, None] * n + columns[None, :], columns[:, None] * n + rows[None, :]
    if i != j:
        x = tl.load(source, mask=rows[:, None] < n, other=0.0)
        tl.store(out + here, x, mask=rows[:, None] < n)
        tl.store(out + there, tl.trans(x), mask=rows[None, :] < n)
    else:  # made whole first, so that every row is stored at once
        kept = columns[None, :] // TILE <= rows[:, None] // TILE
        inside = (rows[:, None] < n) & (columns[None, :] < n)
        x = tl.load(source, mask=kept & (rows[:, None] < n), other=0.0)
        x = tl.where(kept, x, tl.trans(x))
        tl.store(out + here, x, mask=inside)


@_jit_varying(by_group=("scale", "largest", "where"))
@no_type_check
def put_kernel(
    P, scale, X, largest, where, n, P_k, P_half, X_k, X_row,
    PAIR: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hi and, with PAIR, lo of scale·X on one block on or below the diagonal, into tiles; see `split_kernel`."""
    index, k = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wanted = True
    if MASKED:
        wanted = tl.load(where + k) != 0
    if wanted:
        factor = power_of_two(tl.load(largest + k).to(tl.int32, bitcast=True))
        if index == 0:
            tl.store(scale + k, factor)
        i, j = lower_tile(index)
        rows = i * BLOCK + tl.arange(0, BLOCK)
        columns = j * BLOCK + tl.arange(0, BLOCK)
        kept = (rows[:, None] < n) & (columns[None, :] < n) & (columns[None, :] // TILE <= rows[:, None] // TILE)
        x = tl.load(X + k * X_k + rows[:, None] * X_row + columns[None, :], mask=kept, other=0.0).to(tl.float32)
        x *= factor
        upper = x.to(tl.float16)
        here = P + k * P_k + packed_at(rows[:, None], columns[None, :], TILE)
        tl.store(here, upper, mask=kept)
        if PAIR:
            tl.store(here + P_half, (x - upper.to(tl.float32)).to(tl.float16), mask=kept)
