"""Triton kernels of `triton_splits`: float32 matrices into halves, each with its power of two."""

from __future__ import annotations

from typing import no_type_check

from layerwise.foundations.linalg.triton_kernels import _jit, tl, triton

__all__ = ["split_kernel", "triton"]


@_jit
@no_type_check
def power_of_two(amax):
    """`half_pairs.power_of_two_scale` on the bits: 1 for zero, NaN for what is not finite."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = 14 - ((bits >> 23) - 127)
    exponent = tl.minimum(tl.maximum(exponent, -120), 120)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, scale)
    return tl.where((bits & 0x7F800000) == 0x7F800000, float("nan"), scale)


@_jit
@no_type_check
def split_kernel(
    hi, lo, scale, X, amax, where, bound_scale, entries, width, X_k, X_row, out_k,
    FROM: tl.constexpr, PAIR: tl.constexpr, LINEAR: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hi and, with PAIR, lo of scale·X in one pass. FROM says where the scale is found: 0 given, 1 amax, 2 a number."""
    index, k = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wanted = True
    if MASKED:
        wanted = tl.load(where + k) != 0
    if wanted:
        if FROM == 0:
            factor = tl.load(scale + k)
        elif FROM == 1:
            factor = power_of_two(tl.load(amax + k).to(tl.float32))
        else:
            factor = bound_scale
        if FROM != 0:  # noqa: SIM102 (decided when compiled, the next when run)
            if index == 0:
                tl.store(scale + k, factor)
        at = index * BLOCK + tl.arange(0, BLOCK)
        inside = at < entries
        if LINEAR:  # noqa: SIM108 (decided when compiled)
            source = X + k * X_k + at
        else:
            source = X + k * X_k + (at // width).to(tl.int64) * X_row + at % width
        scaled = tl.load(source, mask=inside, other=0.0).to(tl.float32) * factor
        upper = scaled.to(tl.float16)
        tl.store(hi + k * out_k + at, upper, mask=inside)
        if PAIR:
            tl.store(lo + k * out_k + at, (scaled - upper.to(tl.float32)).to(tl.float16), mask=inside)
