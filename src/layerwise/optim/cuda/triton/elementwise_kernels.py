"""Triton kernels of `elementwise`: passes over whole stacks that read and write each entry once.

Imported on first use only; without Triton the module can be imported, and has no kernels.
"""

from __future__ import annotations

from typing import Any, no_type_check

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:
    triton = tl = None


def _jit(kernel: Any) -> Any:
    return kernel if triton is None else triton.jit(kernel)  # pyright: ignore[reportAttributeAccessIssue]


def _jit_varying(*names: str, by_group: tuple[str, ...] = ()) -> Any:
    """The same for kernels with numbers that vary from launch to launch: not compiled anew where one is 1, or a
    multiple of 16. `by_group` are tensors with a number for each group: those of some groups begin at any number, not
    only at multiples of 16 bytes."""
    how: Any = {"do_not_specialize": list(names), "do_not_specialize_on_alignment": list(by_group)}

    def made(kernel: Any) -> Any:
        kernel = kernel if triton is None else triton.jit(kernel, **how)  # pyright: ignore[reportAttributeAccessIssue]
        kernel.by_group = by_group  # for tests, whatever Triton keeps
        return kernel

    return made


# `no_type_check` keeps checkers that rewrite functions at import away from kernels, which Triton reads as text.
# `all_finite` is a byte on the device. Where it is 0, masks keep every load and store away: nothing is multiplied by 0.


@_jit
@no_type_check
def tile(width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows ``[ROWS, 1]`` and columns ``[1, COLUMNS]`` of this program's tile of a matrix of the given width."""
    across = tl.cdiv(width, COLUMNS)
    index = tl.program_id(0)
    rows = (index // across) * ROWS + tl.arange(0, ROWS)
    columns = (index % across) * COLUMNS + tl.arange(0, COLUMNS)
    return rows[:, None], columns[None, :]


@_jit
@no_type_check
def block(entries, BLOCK: tl.constexpr):
    """Which of so many entries this program treats, and whether each exists."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return at, at < entries


@_jit
@no_type_check
def lerp(a, b, weight):
    """``a + weight (b − a)``, rounded as torch rounds it: b itself for a weight of 1."""
    return tl.where(weight < 0.5, a + weight * (b - a), b - (b - a) * (1.0 - weight))


@_jit
@no_type_check
def unscaled(x, scales, k, SCALES: tl.constexpr):
    """x over the product of its group's scales, powers of two whose reciprocals are exact."""
    if SCALES > 0:
        by = tl.div_rn(1.0, tl.load(scales[0] + k))
        for q in tl.static_range(1, SCALES):
            by = by * tl.div_rn(1.0, tl.load(scales[q] + k))
        x = x * by
    return x


@_jit
@no_type_check
def cut(x, most):
    """What is larger than most is cut off; NaN and infinity stay."""
    return tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -most), most), x)


@_jit
@no_type_check
def stored(x, KIND: tl.constexpr):
    """x as it is stored; what is finite stays so in a half."""
    if tl.float16 == KIND:
        x = cut(x, 65504.0)
    if tl.bfloat16 == KIND:
        x = cut(x, 3.3895313892515355e38)
    return x.to(KIND)


@_jit
@no_type_check
def keep_largest(largest, k, y):
    """The largest magnitude so far, of all programs: as bits, integers of the same order, in which NaN comes last."""
    found = tl.max(tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)
    if found > tl.load(largest + k):  # else thousands of programs would wait for one another at one address
        tl.atomic_max(largest + k, found)


@_jit
@no_type_check
def ema_kernel(
    mean, new, weight, divisor_at, divisor, rows_total, width, new_rows, new_width, mean_k, new_k, new_row,
    HAS_DIVISOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of mean + weight·(new/divisor − mean), with new continued by zeros."""
    k = tl.program_id(1).to(tl.int64)
    w = tl.load(weight + k)
    if w != 0.0:  # a weight of zero leaves the mean alone, whatever `new` is, and costs nothing
        rows, columns = tile(width, ROWS, COLUMNS)
        inside = (rows < rows_total) & (columns < width)
        known = (rows < new_rows) & (columns < new_width)
        x = tl.load(new + k * new_k + rows * new_row + columns, mask=known, other=0.0).to(tl.float32)
        by = tl.load(divisor_at + k) if HAS_DIVISOR else divisor
        x = tl.where(known, x / by, 0.0)
        here = mean + k * mean_k + rows * width + columns
        former = tl.load(here, mask=inside, other=0.0).to(tl.float32)
        moved = tl.where(w == 1.0, x, former + w * (x - former))
        tl.store(here, stored(moved, mean.dtype.element_ty), mask=inside)


@_jit_varying("flat")
@no_type_check
def adam_kernel(
    M, V, G, scales, step, all_finite, correction1, correction2, floor_at, weight1, beta2, weight2, eps, factor,
    entries, flat, M_k, V_k, G_k, step_k,
    SCALES: tl.constexpr, ROTATED: tl.constexpr, FLAT: tl.constexpr, HAS_FLOOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both moments and Adam's step on one block, with FLAT of all groups, each so large; ROTATED: ε as it is."""
    k = tl.program_id(1).to(tl.int64)
    at, inside = block(entries, BLOCK)
    taken = inside & (tl.load(all_finite) != 0)
    g = unscaled(tl.load(G + k * G_k + at, mask=taken, other=0.0).to(tl.float32), scales, k, SCALES)
    m = lerp(tl.load(M + k * M_k + at, mask=taken, other=0.0).to(tl.float32), g, weight1)
    v = beta2 * tl.load(V + k * V_k + at, mask=taken, other=0.0).to(tl.float32) + weight2 * g * g
    tl.store(M + k * M_k + at, m.to(M.dtype.element_ty), mask=taken)
    tl.store(V + k * V_k + at, v.to(V.dtype.element_ty), mask=taken)
    if FLAT:
        c1 = tl.load(correction1 + at // flat, mask=inside, other=1.0)
        c2 = tl.load(correction2 + at // flat, mask=inside, other=1.0)
    else:
        c1, c2 = tl.load(correction1 + k), tl.load(correction2 + k)
    root = tl.sqrt_rn(v)
    c = tl.sqrt_rn(c2)
    d = tl.div_rn(m, root + eps) * (c / c1) if ROTATED else tl.div_rn(m / c1, root / c + eps)
    if HAS_FLOOR:
        floor = tl.load(floor_at + at // flat, mask=inside, other=0.0) if FLAT else tl.load(floor_at + k)
        d = tl.where(floor < v, d * (1.0 - floor / v), 0.0)
    tl.store(step + k * step_k + at, stored(tl.where(taken, d * factor, 0.0), step.dtype.element_ty), mask=inside)


@_jit_varying("rows_total")
@no_type_check
def average_kernel(
    M, G, scales, largest, flags, all_finite, weight, rows_total, width, M_k, G_k,
    SCALES: tl.constexpr, HAS_M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of M + weight·(G − M), its largest magnitude; and `flags [K, tiles across, rows]` of which rows of the
    tile of G are not zero."""
    k = tl.program_id(1).to(tl.int64)
    rows, columns = tile(width, ROWS, COLUMNS)
    inside = (rows < rows_total) & (columns < width) & (tl.load(all_finite) != 0)
    at = rows * width + columns
    g = unscaled(tl.load(G + k * G_k + at, mask=inside, other=0.0).to(tl.float32), scales, k, SCALES)
    if HAS_M:
        m = lerp(tl.load(M + k * M_k + at, mask=inside, other=0.0).to(tl.float32), g, weight).to(M.dtype.element_ty)
        tl.store(M + k * M_k + at, m, mask=inside)
        keep_largest(largest, k, m.to(tl.float32))
    across = tl.cdiv(width, COLUMNS)
    flag = flags + (k * across + tl.program_id(0) % across) * rows_total + rows
    nonzero = tl.max((tl.abs(g) > 0.0).to(tl.int32), 1)
    tl.store(flag, nonzero[:, None].to(tl.int8), mask=rows < rows_total)


@_jit_varying("seen_rows", "apart")
@no_type_check
def adam_norm_kernel(
    M, V, G, scales, partial, largest, all_finite, correction1, correction2, weight1, beta2, weight2, eps,
    seen_rows, width, apart, M_k, V_k, G_k,
    SCALES: tl.constexpr, AVERAGED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Both moments on one tile of every `apart`-th row, and the sum of squares of Adam's step there.

    M has these rows, or where it was AVERAGED before (`average_kernel`) all of them.
    """
    k = tl.program_id(1).to(tl.int64)
    rows, columns = tile(width, ROWS, COLUMNS)
    inside = (rows < seen_rows) & (columns < width) & (tl.load(all_finite) != 0)
    here, there = rows * width + columns, rows * apart * width + columns
    g = unscaled(tl.load(G + k * G_k + there, mask=inside, other=0.0).to(tl.float32), scales, k, SCALES)
    if AVERAGED:
        m = tl.load(M + k * M_k + there, mask=inside, other=0.0).to(tl.float32)
    else:
        m = lerp(tl.load(M + k * M_k + here, mask=inside, other=0.0).to(tl.float32), g, weight1)
        tl.store(M + k * M_k + here, m.to(M.dtype.element_ty), mask=inside)
        keep_largest(largest, k, m.to(M.dtype.element_ty).to(tl.float32))
    v = beta2 * tl.load(V + k * V_k + here, mask=inside, other=0.0) + weight2 * g * g
    tl.store(V + k * V_k + here, v, mask=inside)
    c1, c2 = 1.0 / tl.load(correction1 + k), tl.rsqrt(tl.load(correction2 + k))
    d = (m * c1) / (tl.sqrt(v) * c2 + eps)  # of which only a norm is wanted: no rounding to the last bit
    d = tl.where(inside, d, 0.0)  # without ε nothing over nothing
    tl.store(partial + k * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(d * d, 1), 0))


@_jit_varying("tiles", "across", "rows_total", "width", "seen_rows", "apart")
@no_type_check
def norm_of_all_kernel(
    partial, flags, norms, usual, tiles, across, rows_total, width, seen_rows, apart,
    SOME: tl.constexpr, TILES: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What `adam_norm_kernel` has found of one group: the norm.

    Of SOME rows the norm is that of all, as in `seen_rows.of_all_rows`. Added up in an order that does not change.
    """
    k = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((TILES,), dtype=tl.float32)
    for start in range(0, tiles, TILES):
        at = start + tl.arange(0, TILES)
        squares += tl.load(partial + k * tiles + at, mask=at < tiles, other=0.0)
    norm = tl.sqrt_rn(tl.sum(squares, 0))
    if SOME:
        counts = tl.zeros((ROWS,), dtype=tl.int32)
        of_seen = tl.zeros((ROWS,), dtype=tl.int32)
        for first in range(0, rows_total, ROWS):
            rows = first + tl.arange(0, ROWS)
            nonzero = tl.zeros((ACROSS, ROWS), dtype=tl.int32)
            for start in range(0, across, ACROSS):
                at = start + tl.arange(0, ACROSS)[:, None]
                flag = flags + (k * across + at) * rows_total + rows[None, :]
                there = (at < across) & (rows[None, :] < rows_total)
                nonzero = tl.maximum(nonzero, tl.load(flag, mask=there, other=0).to(tl.int32))
            nonzero_rows = tl.max(nonzero, 0)
            counts += nonzero_rows
            of_seen += tl.where((rows % apart == 0) & (rows // apart < seen_rows), nonzero_rows, 0)
        count = tl.sum(counts, 0).to(tl.float32)
        seen = tl.sum(of_seen, 0).to(tl.float32)
        share = tl.where(count > 0.0, count / tl.maximum(seen, 1.0), rows_total * 1.0 / seen_rows)
        unseen = usual * tl.sqrt_rn(count * width)
        norm = tl.where((seen == 0.0) & (count > 0.0), unseen, norm * tl.sqrt_rn(share))
    tl.store(norms + k, norm)


@_jit
@no_type_check
def momentum_update_kernel(
    M, G, update, partial, all_finite, weight, mu, entries, M_k, G_k,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Muon's momentum on one block, what is orthogonalized, and the sum of its squares."""
    k = tl.program_id(1).to(tl.int64)
    at, inside = block(entries, BLOCK)
    taken = inside & (tl.load(all_finite) != 0)
    g = tl.load(G + k * G_k + at, mask=taken, other=0.0).to(tl.float32)
    m = lerp(tl.load(M + k * M_k + at, mask=taken, other=0.0).to(tl.float32), g, weight)
    tl.store(M + k * M_k + at, m, mask=taken)
    if NESTEROV:
        m = lerp(g, m, mu)
    tl.store(update + k * entries + at, m, mask=inside)
    tl.store(partial + k * tl.num_programs(0) + tl.program_id(0), tl.sum(m * m, 0))


@_jit_varying("groups")
@no_type_check
def corrections_kernel(steps, correction1, correction2, all_finite, log1, log2, groups, BLOCK: tl.constexpr):
    """One more step in a step that is taken, and 1 − βᵗ."""
    at, inside = block(groups, BLOCK)
    t = tl.load(steps + at, mask=inside, other=0.0)
    taken = inside & (tl.load(all_finite) != 0)
    t = tl.where(taken, t + 1.0, t)
    tl.store(steps + at, t, mask=taken)
    t = tl.maximum(t, 1.0).to(tl.float64)  # in float32 a first 1 − β of 1e-3 would have four digits
    tl.store(correction1 + at, (1.0 - tl.exp(t * log1)).to(tl.float32), mask=inside)
    tl.store(correction2 + at, (1.0 - tl.exp(t * log2)).to(tl.float32), mask=inside)


@_jit_varying("groups", by_group=("lr",))
@no_type_check
def divisor_kernel(
    out, wanted, norms, weights, scales, lr, share, least, tiny, groups, SCALES: tl.constexpr, BLOCK: tl.constexpr
):
    """One over ``wanted/‖D‖``, so that a step is no more than a share of a weight's norm; what is NaN stays so."""
    at, inside = block(groups, BLOCK)
    size = unscaled(tl.load(norms + at, mask=inside, other=1.0), scales, tl.minimum(at, groups - 1), SCALES)
    want = tl.load(wanted + at, mask=inside, other=1.0)
    weight = tl.load(weights + at, mask=inside, other=1.0)
    step = tl.load(lr) * want
    room = share * tl.where(weight < least, least, weight) / tl.where(step < tiny, tiny, step)
    ratio = want * tl.where(room > 1.0, 1.0, room) / tl.where(size < tiny, tiny, size)
    by = 1.0 / tl.where(ratio > 3.4028234663852886e38, 3.4028234663852886e38, ratio)
    tl.store(out + at, tl.where(by < tiny, tiny, by), mask=inside)
