"""Triton kernels of `triton.pieces`: passes over stacks whose parameters and gradients are found by tables.

Imported on first use only; without Triton the module can be imported, and has no kernels.
"""

from __future__ import annotations

from typing import no_type_check

from layerwise.optim.cuda.triton.elementwise_kernels import _jit, _jit_varying, lerp, tl, triton, unscaled
from layerwise.optim.cuda.triton.split_kernels import power_of_two

__all__ = ["adamw_kernel", "finish_kernel", "gather_kernel", "magnitude_kernel", "triton"]


@_jit
@no_type_check
def located(tiles, pieces, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FIELDS: tl.constexpr, ALIGNED: tl.constexpr):
    """This program's piece, and of each entry of its tile: where it lies in parameter and stack, and if it exists.

    Programs of the second axis share a tile, ROWS of its rows each.
    """
    tile = tiles + 3 * tl.program_id(0).to(tl.int64)
    piece = pieces + tl.load(tile).to(tl.int64) * FIELDS
    row = (tl.load(tile + 1) + tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = (tl.load(tile + 2) + tl.arange(0, COLUMNS)[None, :]).to(tl.int64)
    there = row * tl.load(piece + 4) + column
    inside = (row < tl.load(piece + 2)) & (column < tl.load(piece + 3)) & (there < tl.load(piece + 5))
    there = tl.load(piece + 1) + there
    here = tl.load(piece + 6) + row * tl.load(piece + 7) + column * tl.load(piece + 8)
    if ALIGNED:  # entries of a row follow one another in both, and exist or not eight at a time
        there = tl.multiple_of(tl.max_contiguous(there, [1, COLUMNS]), [1, 8])
        here = tl.multiple_of(tl.max_contiguous(here, [1, COLUMNS]), [1, 8])
        inside = tl.max_constancy(inside, [1, 8])
    return piece, there, here, inside


@_jit
@no_type_check
def pointer(addresses, piece, like, ALIGNED: tl.constexpr):
    """To the first entry of the piece's parameter, of the type of what `like` points to."""
    address = tl.load(addresses + tl.load(piece))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address.to(like.dtype)


@_jit
@no_type_check
def magnitude_kernel(
    bits, tiles, pieces, addresses, like,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FIELDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of one tile, as an integer of the same order: that of NaN is beyond infinity's."""
    piece, there, _, inside = located(tiles, pieces, ROWS, COLUMNS, FIELDS, ALIGNED)
    x = tl.load(pointer(addresses, piece, like, ALIGNED) + there, mask=inside, other=0.0).to(tl.float32)
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest, here = tl.max(tl.max(size, 1), 0), bits + tl.load(piece)
    if largest > tl.load(here):  # else thousands of programs would wait for one another at one address
        tl.atomic_max(here, largest)


@_jit_varying(by_group=("scale", "largest"))
@no_type_check
def gather_kernel(
    out, tiles, pieces, addresses, like, all_finite, factor, scale, largest, room,
    HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FIELDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One tile of factor times the parameters' tensors; zeros in a step that is left out. As a HALF it is multiplied by
    the power of two that the group's largest magnitude leaves room for."""
    piece, there, here, inside = located(tiles, pieces, ROWS, COLUMNS, FIELDS, ALIGNED)
    taken = inside & (tl.load(all_finite) != 0)
    x = tl.load(pointer(addresses, piece, like, ALIGNED) + there, mask=taken, other=0.0).to(tl.float32)
    if HALF:
        group = tl.load(piece + 9)
        by = power_of_two(tl.load(largest + group).to(tl.int32, bitcast=True)) / room
        factor = factor * by
        tl.store(scale + group, by)  # every program of a group has the same
    tl.store(out + here, (factor * x).to(out.dtype.element_ty), mask=inside)


@_jit
@no_type_check
def finish_kernel(
    tiles, pieces, addresses, like, D, scales, momentum, factor_at, rates, all_finite, mu, squares,
    SCALES: tl.constexpr, HAS_MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_SQUARES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FIELDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Momentum and parameters of one tile: W ← keep·W − lr·update; and the sum of squares of what W has become."""
    piece, there, here, inside = located(tiles, pieces, ROWS, COLUMNS, FIELDS, ALIGNED)
    taken = inside & (tl.load(all_finite) != 0)
    update = tl.load(D + here, mask=taken, other=0.0).to(tl.float32)
    update = unscaled(update, scales, tl.load(piece + 9), SCALES)
    if HAS_FACTOR:
        update = update * tl.load(factor_at)
    if HAS_MOMENTUM:
        buffer = update + mu * tl.load(momentum + here, mask=taken, other=0.0)
        tl.store(momentum + here, buffer, mask=taken)
        update = update + mu * buffer if NESTEROV else buffer
    rate = rates + 2 * tl.load(piece + 10)
    W = pointer(addresses, piece, like, ALIGNED) + there
    new = tl.load(rate) * tl.load(W, mask=taken, other=0.0).to(tl.float32) - tl.load(rate + 1) * update
    new = new.to(like.dtype.element_ty)
    tl.store(W, new, mask=taken)
    if HAS_SQUARES:
        kept = tl.where(inside, new.to(tl.float32), 0.0)
        here = squares + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(here, tl.sum(tl.sum(kept * kept, 1), 0), mask=tl.load(all_finite) != 0)


@_jit
@no_type_check
def adamw_kernel(
    tiles, pieces, gradients, parameters, like, M, V, correction1, correction2, rates, all_finite, scale, weight1,
    beta2, weight2, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FIELDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A whole step of AdamW on part of a tile: the gradient is read where it lies, and never gathered."""
    piece, there, here, inside = located(tiles, pieces, ROWS, COLUMNS, FIELDS, ALIGNED)
    taken = inside & (tl.load(all_finite) != 0)
    g = scale * tl.load(pointer(gradients, piece, like, ALIGNED) + there, mask=taken, other=0.0).to(tl.float32)
    m = lerp(tl.load(M + here, mask=taken, other=0.0), g, weight1)
    v = beta2 * tl.load(V + here, mask=taken, other=0.0) + weight2 * g * g
    tl.store(M + here, m, mask=taken)
    tl.store(V + here, v, mask=taken)
    group = tl.load(piece + 9)
    root = tl.sqrt_rn(v) / tl.sqrt_rn(tl.load(correction2 + group))
    d = tl.div_rn(m / tl.load(correction1 + group), root + eps)
    rate = rates + 2 * tl.load(piece + 10)
    W = pointer(parameters, piece, like, ALIGNED) + there
    new = tl.load(rate) * tl.load(W, mask=taken, other=0.0).to(tl.float32) - tl.load(rate + 1) * d
    tl.store(W, new.to(like.dtype.element_ty), mask=taken)
