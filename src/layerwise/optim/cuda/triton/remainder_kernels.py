"""The Triton kernel of `triton.remainders`."""

from __future__ import annotations

from typing import no_type_check

from layerwise.optim.cuda.triton.product_kernels import _jit, tl, triton

__all__ = ["remainder_kernel", "triton"]


@_jit
@no_type_check
def remainder_kernel(R, C, A_scale, B_scale, unit, entries, n, BLOCK: tl.constexpr):
    """R ← unit·(I − C/(A_scale B_scale)) in float16, BLOCK entries of one matrix of n columns."""
    index, k = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = index * BLOCK + tl.arange(0, BLOCK)
    inside = at < entries
    # Reciprocals of powers of two are exact; their product may be subnormal, where that of the scales overflows.
    factor = (1.0 / tl.load(A_scale + k)) * (1.0 / tl.load(B_scale + k))
    x = tl.load(C + k * entries + at, mask=inside, other=0.0) * factor
    one = tl.where(at % (n + 1) == 0, 1.0, 0.0)  # in a square matrix these are the entries of the diagonal
    tl.store(R + k * entries + at, ((one - x) * unit).to(tl.float16), mask=inside)
