"""Triton kernels of `eigenbasis_elementwise`; imported as `elementwise_kernels` is."""

from __future__ import annotations

from typing import no_type_check

from layerwise.optim.cuda.triton.elementwise_kernels import (
    _jit,
    _jit_varying,
    block,
    keep_largest,
    lerp,
    stored,
    tile,
    tl,
    unscaled,
)
from layerwise.optim.cuda.triton.elementwise_kernels import triton as triton
from layerwise.optim.cuda.triton.split_kernels import final_scale, foreseen_scale


@_jit
@no_type_check
def moved_squares(former, r, w, factor):
    """former + w·(factor·r² − former); an entry whose square is not finite is left."""
    x = factor * (r * r)
    return tl.where(x < float("inf"), tl.where(w == 1.0, x, former + w * (x - former)), former)


@_jit
@no_type_check
def squares_ema_kernel(s, R, scales, weight, factor, entries, s_k, R_k, SCALES: tl.constexpr, BLOCK: tl.constexpr):
    """One block of running means of squares."""
    k = tl.program_id(1).to(tl.int64)
    w = tl.load(weight + k)
    if w != 0.0:  # a weight of zero leaves the means alone, and costs nothing
        at, inside = block(entries, BLOCK)
        r = unscaled(tl.load(R + k * R_k + at, mask=inside, other=0.0).to(tl.float32), scales, k, SCALES)
        former = tl.load(s + k * s_k + at, mask=inside, other=0.0).to(tl.float32)
        # What is left is written as it was: a mask of its own for every entry would make narrow stores.
        tl.store(s + k * s_k + at, stored(moved_squares(former, r, w, factor), s.dtype.element_ty), mask=inside)


@_jit
@no_type_check
def divisor(s_P, s_Q, left, right, constant, k, rows, columns, rows_total, width, tiny, HAS_FACTORS: tl.constexpr):
    """What is added to the means: max(s_P·right + left·s_Q + constant, tiny)."""
    added = tl.load(constant + k)
    if HAS_FACTORS:
        p = tl.load(s_P + k * rows_total + rows, mask=rows < rows_total, other=0.0)
        q = tl.load(s_Q + k * width + columns, mask=columns < width, other=0.0)
        added = p * tl.load(right + k) + tl.load(left + k) * q + added
    return tl.where(added < tiny, tiny, added)  # NaN stays NaN


@_jit_varying(by_group=("largest",))
@no_type_check
def damped_quotient_kernel(
    R, scales, s, out, s_P, s_Q, left, right, constant, largest, before, tiny, all_finite, M, weight, squares_weight,
    factor, rows_total, width, R_k, s_k, out_k, M_k,
    SCALES: tl.constexpr, HAS_FACTORS: tl.constexpr, HAS_LARGEST: tl.constexpr, AVERAGED: tl.constexpr,
    SQUARED: tl.constexpr, ROOM: tl.constexpr, HEADROOM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of R/(s + max(s_P·right + left·s_Q + constant, tiny)).

    With AVERAGED the average M is moved towards R, and divided in its place; with SQUARED the means s are moved towards
    factor·R² before; in a step that is left out both stay. With ROOM the quotient is multiplied by the scale that was
    foreseen.
    """
    k = tl.program_id(1).to(tl.int64)
    rows, columns = tile(width, ROWS, COLUMNS)
    inside = (rows < rows_total) & (columns < width)
    at = rows * width + columns
    added = divisor(s_P, s_Q, left, right, constant, k, rows, columns, rows_total, width, tiny, HAS_FACTORS)
    r = unscaled(tl.load(R + k * R_k + at, mask=inside, other=0.0).to(tl.float32), scales, k, SCALES)
    mean = tl.load(s + k * s_k + at, mask=inside, other=1.0).to(tl.float32)
    if SQUARED:  # a weight of zero leaves the means as they are
        w = tl.where(tl.load(all_finite) != 0, squares_weight, 0.0)
        kept = stored(moved_squares(mean, r, w, factor), s.dtype.element_ty)
        tl.store(s + k * s_k + at, kept, mask=inside)
        mean = kept.to(tl.float32)
    if AVERAGED:
        m = tl.load(M + k * M_k + at, mask=inside, other=0.0).to(tl.float32)
        taken = tl.load(all_finite) != 0
        r = tl.where(taken & (tl.abs(r) < float("inf")), lerp(m, r, weight), m)  # else it would stay so for ever
        r = r.to(M.dtype.element_ty).to(tl.float32)
        tl.store(M + k * M_k + at, r.to(M.dtype.element_ty), mask=inside & taken)
    y = tl.div_rn(r, mean + added)
    written = y
    if ROOM > 0:
        written = y * foreseen_scale(before, k, ROOM, HEADROOM)
    tl.store(out + k * out_k + at, stored(written, out.dtype.element_ty), mask=inside)
    if HAS_LARGEST:
        keep_largest(largest, k, tl.where(inside, y, 0.0))


@_jit_varying(by_group=("largest",))
@no_type_check
def quotient_again_kernel(
    R, scales, s, out, s_P, s_Q, left, right, constant, largest, before, scale, tiny,
    rows_total, width, R_k, s_k, out_k,
    SCALES: tl.constexpr, HAS_FACTORS: tl.constexpr, ROOM: tl.constexpr, HEADROOM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same quotient, where the scale that was foreseen does not fit."""
    k = tl.program_id(1).to(tl.int64)
    by, fits = final_scale(largest, before, k, ROOM, HEADROOM)
    if tl.program_id(0) == 0:
        tl.store(scale + k, by)
    if not fits:
        rows, columns = tile(width, ROWS, COLUMNS)
        inside = (rows < rows_total) & (columns < width)
        at = rows * width + columns
        added = divisor(s_P, s_Q, left, right, constant, k, rows, columns, rows_total, width, tiny, HAS_FACTORS)
        r = unscaled(tl.load(R + k * R_k + at, mask=inside, other=0.0).to(tl.float32), scales, k, SCALES)
        y = tl.div_rn(r, tl.load(s + k * s_k + at, mask=inside, other=1.0).to(tl.float32) + added)
        tl.store(out + k * out_k + at, stored(by * y, out.dtype.element_ty), mask=inside)


@_jit
@no_type_check
def sides_scaled(y, a, b, k, rows, columns, rows_total, width, HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr):
    """y·a·b."""
    if HAS_ROWS:
        y = y * tl.load(a + k * rows_total + rows, mask=rows < rows_total, other=0.0).to(tl.float32)
    if HAS_COLUMNS:
        y = y * tl.load(b + k * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    return y


@_jit_varying(by_group=("largest",))
@no_type_check
def scaled_kernel(
    R, scales, out, a, b, largest, before, rows_total, width, R_k, out_k,
    SCALES: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_LARGEST: tl.constexpr,
    ROOM: tl.constexpr, HEADROOM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of R·a·b; with ROOM it is multiplied by the scale that was foreseen."""
    k = tl.program_id(1).to(tl.int64)
    rows, columns = tile(width, ROWS, COLUMNS)
    inside = (rows < rows_total) & (columns < width)
    at = rows * width + columns
    r = unscaled(tl.load(R + k * R_k + at, mask=inside, other=0.0).to(tl.float32), scales, k, SCALES)
    y = sides_scaled(r, a, b, k, rows, columns, rows_total, width, HAS_ROWS, HAS_COLUMNS)
    written = y
    if ROOM > 0:
        written = y * foreseen_scale(before, k, ROOM, HEADROOM)
    tl.store(out + k * out_k + at, stored(written, out.dtype.element_ty), mask=inside)
    if HAS_LARGEST:
        keep_largest(largest, k, tl.where(inside, y, 0.0))


@_jit_varying(by_group=("largest",))
@no_type_check
def scaled_again_kernel(
    R, scales, out, a, b, largest, before, scale, rows_total, width, R_k, out_k,
    SCALES: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr, ROOM: tl.constexpr,
    HEADROOM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same, where the scale that was foreseen does not fit."""
    k = tl.program_id(1).to(tl.int64)
    by, fits = final_scale(largest, before, k, ROOM, HEADROOM)
    if tl.program_id(0) == 0:
        tl.store(scale + k, by)
    if not fits:
        rows, columns = tile(width, ROWS, COLUMNS)
        inside = (rows < rows_total) & (columns < width)
        at = rows * width + columns
        r = unscaled(tl.load(R + k * R_k + at, mask=inside, other=0.0).to(tl.float32), scales, k, SCALES)
        y = sides_scaled(r, a, b, k, rows, columns, rows_total, width, HAS_ROWS, HAS_COLUMNS)
        tl.store(out + k * out_k + at, stored(by * y, out.dtype.element_ty), mask=inside)
