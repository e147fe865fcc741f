"""The Triton kernel of `triton.joins`."""

from __future__ import annotations

from typing import no_type_check

from layerwise.optim.cuda.triton.product_kernels import _jit, tl, triton

__all__ = ["join_kernel", "triton"]


@_jit
@no_type_check
def join_kernel(out, hi, lo, scale, entries, hi_k, lo_k, BLOCK: tl.constexpr):
    """out ← (hi + lo)/scale, BLOCK entries of one matrix."""
    index, k = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = index * BLOCK + tl.arange(0, BLOCK)
    inside = at < entries
    upper = tl.load(hi + k * hi_k + at, mask=inside, other=0.0).to(tl.float32)
    lower = tl.load(lo + k * lo_k + at, mask=inside, other=0.0).to(tl.float32)
    # The scale is a power of two, whose reciprocal is exact.
    tl.store(out + k * entries + at, (upper + lower) * (1.0 / tl.load(scale + k)), mask=inside)
