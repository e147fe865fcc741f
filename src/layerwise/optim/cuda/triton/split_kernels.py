"""Triton kernels of `triton.splits`: float32 matrices into halves, each with its power of two."""

from __future__ import annotations

from typing import no_type_check

from layerwise.optim.cuda.triton.product_kernels import _jit, _jit_varying, tl, triton

__all__ = ["split_kernel", "triton"]


@_jit
@no_type_check
def power_of_two(bits):
    """`split_fp16.power_of_two_scale` of a magnitude's bits: 1 for zero, NaN for what is not finite."""
    exponent = tl.minimum(14 - ((bits >> 23) - 127), 112)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, scale)
    return tl.where((bits & 0x7F800000) == 0x7F800000, float("nan"), scale)


@_jit
@no_type_check
def foreseen_scale(before, k, ROOM: tl.constexpr, HEADROOM: tl.constexpr):
    """The scale that the largest magnitude of the last time asks for, with headroom; see `fp16_steps`."""
    return power_of_two(tl.load(before + k)) / (ROOM * HEADROOM)


@_jit
@no_type_check
def final_scale(largest, before, k, ROOM: tl.constexpr, HEADROOM: tl.constexpr):
    """That scale, or where it does not fit the one of this time; and whether it fits."""
    foreseen = foreseen_scale(before, k, ROOM, HEADROOM)
    bits = tl.load(largest + k)
    scaled = bits.to(tl.float32, bitcast=True) * foreseen
    top = 32768.0 / ROOM
    # Zeros fit any scale that is a number; where the last time was not finite, this one's own is taken.
    fits = ((bits == 0) & (foreseen == foreseen)) | ((scaled < top) & (scaled >= top / (HEADROOM * HEADROOM)))
    return tl.where(fits, foreseen, power_of_two(bits) / ROOM), fits


@_jit
@no_type_check
def entry(X, at, width, X_row, LINEAR: tl.constexpr):
    """Where entries of a matrix lie whose rows may be apart."""
    if LINEAR:  # noqa: SIM108 (decided when compiled)
        place = X + at
    else:
        place = X + (at // width).to(tl.int64) * X_row + at % width
    return place


@_jit_varying(by_group=("scale", "largest", "where"))
@no_type_check
def split_kernel(
    hi, lo, scale, X, largest, where, number, entries, width, X_k, X_row, out_k,
    BOUNDED: tl.constexpr, PAIR: tl.constexpr, LINEAR: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """hi and, with PAIR, lo of scale·X in one pass.

    The scale is the number if that is made of what BOUNDED the entries, else it times what the largest magnitude gives.
    With CUT finite entries that float16 cannot hold are cut off.
    """
    index, k = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wanted = True
    if MASKED:
        wanted = tl.load(where + k) != 0
    if wanted:
        factor = number
        if not BOUNDED:
            factor *= power_of_two(tl.load(largest + k).to(tl.int32, bitcast=True))
        if index == 0:
            tl.store(scale + k, factor)
        at = index * BLOCK + tl.arange(0, BLOCK)
        inside = at < entries
        source = entry(X + k * X_k, at, width, X_row, LINEAR)
        scaled = tl.load(source, mask=inside, other=0.0).to(tl.float32) * factor
        if CUT:
            scaled = tl.where(tl.abs(scaled) < float("inf"), tl.minimum(tl.maximum(scaled, -65504.0), 65504.0), scaled)
        upper = scaled.to(tl.float16)
        tl.store(hi + k * out_k + at, upper, mask=inside)
        if PAIR:
            tl.store(lo + k * out_k + at, (scaled - upper.to(tl.float32)).to(tl.float16), mask=inside)
