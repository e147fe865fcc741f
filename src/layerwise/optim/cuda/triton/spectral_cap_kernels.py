"""Triton kernels of `triton.spectral_cap`: a power iteration in three passes over a stack, and what it cuts.

Imported on first use only; without Triton the module can be imported, and has no kernels.
"""

from __future__ import annotations

from typing import no_type_check

from layerwise.optim.cuda.triton.elementwise_kernels import _jit, _jit_varying, stored, tl, triton

__all__ = ["cut_kernel", "left_kernel", "probe_kernel", "right_kernel", "triton"]

# `no_type_check` keeps checkers that rewrite functions at import away from kernels, which Triton reads as text.
# Entries of a D in half precision are multiplied as they are, with ±1 at first, and summed in single precision: that
# rounds nothing, and they reach the tensor cores without passing through registers. A D in single precision goes there
# in TF32, which has its range, and as D/‖D‖, whose singular values are at most 1. Sums over programs are added in an
# order that does not change.


@_jit
@no_type_check
def added_up(squares, k, blocks, PROBES: tl.constexpr):
    """Of each probe, the sum over all blocks of ``squares [K, blocks, PROBES]``."""
    probes = tl.arange(0, PROBES)[None, :]
    total = tl.zeros((64, PROBES), dtype=tl.float32)
    for start in range(0, blocks, 64):
        some = start + tl.arange(0, 64)[:, None]
        total += tl.load(squares + (k * blocks + some) * PROBES + probes, mask=some < blocks, other=0.0)
    return tl.sum(total, axis=0)


@_jit
@no_type_check
def part_of(D, k, D_k, rows, columns, O, I):
    """A tile of one matrix, zero outside."""
    return tl.load(D + k * D_k + rows * I + columns, mask=(rows < O) & (columns < I), other=0.0)


@_jit_varying("O")
@no_type_check
def probe_kernel(
    D, Z, Y, squares, sizes, O, I, D_k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """``Y = D Z`` for some rows of one matrix, Z of D's type; the squares of Y, and those of D, summed over them."""
    k = tl.program_id(1).to(tl.int64)
    probes = tl.arange(0, PROBES)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, PROBES), dtype=tl.float32)
    size = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, I, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        d = part_of(D, k, D_k, rows[:, None], columns[None, :], O, I)
        z = tl.load(Z + columns[:, None] * PROBES + probes[None, :], mask=columns[:, None] < I, other=0.0)
        total = tl.dot(d, z, total, input_precision="tf32")
        size += d.to(tl.float32) * d.to(tl.float32)
    tl.store(Y + (k * O + rows[:, None]) * PROBES + probes[None, :], total, mask=rows[:, None] < O)
    block = k * tl.num_programs(0) + tl.program_id(0)
    tl.store(squares + block * PROBES + probes, tl.sum(total * total, axis=0))
    tl.store(sizes + block, tl.sum(tl.sum(size, axis=1), axis=0))


@_jit_varying("O", "blocks", by_group=("norms",))
@no_type_check
def right_kernel(
    D, sizes, norms, Y, squares, X, lengths, O, I, D_k, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """``X = Dᵀ Y/(‖D‖ ‖Y‖)`` for some columns of one matrix, probe by probe, ``X [K, PROBES, I]``; and its squares.

    The first program writes ‖D‖.
    """
    k = tl.program_id(1).to(tl.int64)
    norm = tl.sqrt(tl.sum(added_up(sizes, k, blocks, 1), axis=0))
    tl.store(norms + k, norm, mask=tl.program_id(0) == 0)
    by = 1.0 / norm
    probes = tl.arange(0, PROBES)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS, PROBES), dtype=tl.float32)
    for start in range(0, O, ROWS):
        rows = start + tl.arange(0, ROWS)
        d = part_of(D, k, D_k, rows[:, None], columns[None, :], O, I)
        if D.dtype.element_ty == tl.float32:
            d = (d * (by * 16.0)).to(tl.float16)  # 16: few entries are too small for half precision
        y = tl.load(Y + (k * O + rows[:, None]) * PROBES + probes[None, :], mask=rows[:, None] < O, other=0.0)
        total = tl.dot(tl.trans(d), (y * (by * 16.0)).to(d.dtype), total)
    if D.dtype.element_ty == tl.float32:
        total *= 1.0 / 16.0
    else:
        total *= by
    size = tl.sqrt(added_up(squares, k, blocks, PROBES)) * (by * 16.0)
    x = total / tl.maximum(size, 1e-30)[None, :]
    tl.store(X + (k * PROBES + probes[None, :]) * I + columns[:, None], x, mask=columns[:, None] < I)
    place = (k * tl.num_programs(0) + tl.program_id(0)) * PROBES + probes
    tl.store(lengths + place, tl.sum(x * x, axis=0))


@_jit_varying("O", "blocks", by_group=("norms",))
@no_type_check
def left_kernel(
    D, norms, X, lengths, u, squares, O, I, D_k, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """``u = D v`` for some rows of one matrix, v the longest of the probes over its length; and its squares."""
    k = tl.program_id(1).to(tl.int64)
    by = 1.0 / tl.load(norms + k)
    length = added_up(lengths, k, blocks, PROBES)
    v = X + (k * PROBES + tl.argmax(length, axis=0)) * I
    by = by / tl.maximum(tl.sqrt(tl.max(length, axis=0)), 1e-30)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, I, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        d = part_of(D, k, D_k, rows[:, None], columns[None, :], O, I).to(tl.float32) * by
        total += d * tl.load(v + columns, mask=columns < I, other=0.0)[None, :]
    product = tl.sum(total, axis=1)
    tl.store(u + k * O + rows, product, mask=rows < O)
    tl.store(squares + k * tl.num_programs(0) + tl.program_id(0), tl.sum(product * product, axis=0))


@_jit_varying("O", "blocks", "columns_blocks", "share", by_group=("norms",))
@no_type_check
def cut_kernel(
    D, norms, X, lengths, u, squares, share, O, I, D_k, blocks, columns_blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """``D ← D − (1 − s/‖u‖) u vᵀ`` of some rows, where ``‖u‖ > s``: few programs, as most matrices stay as they are."""
    k = tl.program_id(1).to(tl.int64)
    square = tl.sum(added_up(squares, k, blocks, 1), axis=0)
    size = tl.sqrt(square)
    if size > share:  # not where it is NaN
        length = added_up(lengths, k, columns_blocks, PROBES)
        v = X + (k * PROBES + tl.argmax(length, axis=0)) * I
        by = tl.load(norms + k) * (1.0 - share / size) / tl.sqrt(tl.max(length, axis=0))
        rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
        left = tl.load(u + k * O + rows, mask=rows < O, other=0.0) * by
        for start in range(0, I, COLUMNS):
            columns = (start + tl.arange(0, COLUMNS))[None, :]
            d = part_of(D, k, D_k, rows, columns, O, I).to(tl.float32)
            right = tl.load(v + columns, mask=columns < I, other=0.0)
            here, inside = D + k * D_k + rows * I + columns, (rows < O) & (columns < I)
            tl.store(here, stored(d - left * right, D.dtype.element_ty), mask=inside)
