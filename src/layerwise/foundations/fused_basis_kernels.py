"""Triton kernels of `fused_basis`; imported as `fused_kernels` is."""

from __future__ import annotations

from typing import no_type_check

from layerwise.foundations.fused_kernels import _jit, block, tile, tl


@_jit
@no_type_check
def squares_ema_kernel(s, R, weight, factor, entries, s_k, R_k, BLOCK: tl.constexpr):
    """One block of s + weight·(factor·R² − s); an entry whose square is not finite is left."""
    k = tl.program_id(1).to(tl.int64)
    w = tl.load(weight + k)
    if w != 0.0:  # a weight of zero leaves the means alone, and costs nothing
        at, inside = block(entries, BLOCK)
        r = tl.load(R + k * R_k + at, mask=inside, other=0.0).to(tl.float32)
        x = factor * (r * r)
        former = tl.load(s + k * s_k + at, mask=inside, other=0.0)
        new = tl.where(w == 1.0, x, former + w * (x - former))
        tl.store(s + k * s_k + at, new, mask=inside & (x < float("inf")))


@_jit
@no_type_check
def damped_quotient_kernel(
    R, s, out, s_P, s_Q, left, right, constant, tiny, rows_total, width, R_k, s_k, out_k,
    HAS_FACTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of R/(s + max(s_P·right + left·s_Q + constant, tiny))."""
    k = tl.program_id(1).to(tl.int64)
    rows, columns = tile(width, ROWS, COLUMNS)
    inside = (rows < rows_total) & (columns < width)
    at = rows * width + columns
    added = tl.load(constant + k)
    if HAS_FACTORS:
        p = tl.load(s_P + k * rows_total + rows, mask=rows < rows_total, other=0.0)
        q = tl.load(s_Q + k * width + columns, mask=columns < width, other=0.0)
        added = p * tl.load(right + k) + tl.load(left + k) * q + added
    added = tl.where(added < tiny, tiny, added)  # NaN stays NaN
    damped = tl.load(s + k * s_k + at, mask=inside, other=1.0) + added
    r = tl.load(R + k * R_k + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + k * out_k + at, tl.div_rn(r, damped).to(out.dtype.element_ty), mask=inside)


@_jit
@no_type_check
def scaled_kernel(
    R, out, a, b, rows_total, width, R_k, out_k,
    HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of R·a·b."""
    k = tl.program_id(1).to(tl.int64)
    rows, columns = tile(width, ROWS, COLUMNS)
    inside = (rows < rows_total) & (columns < width)
    at = rows * width + columns
    y = tl.load(R + k * R_k + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_ROWS:
        y = y * tl.load(a + k * rows_total + rows, mask=rows < rows_total, other=0.0).to(tl.float32)
    if HAS_COLUMNS:
        y = y * tl.load(b + k * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(out + k * out_k + at, y.to(out.dtype.element_ty), mask=inside)
