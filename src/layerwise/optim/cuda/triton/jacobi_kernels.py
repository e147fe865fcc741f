"""Triton kernels of `triton.jacobi`: from ``S = Uᵀ M U`` the rotation, the eigenvalues and the coupling.

``E_ij = S_ij Δ/(Δ² + S_ij² + (τ_i + τ_j)²)``, ``Δ = S_jj − S_ii``, as in `jacobi.rotation`. S is symmetric, and
read twice; E, which is only stored rounded to half precision, is computed twice.
"""

from __future__ import annotations

from typing import no_type_check

from layerwise.optim.cuda.triton.product_kernels import _jit, _jit_varying, tl
from layerwise.optim.cuda.triton.product_kernels import triton as triton


@_jit_varying(by_group=("scale", "unit"))
@no_type_check
def diagonal_kernel(S, scale, diagonal, width, weight, unit, still, damping, unit_number, n, S_k, BLOCK: tl.constexpr):
    """One matrix: its mean eigenvalue, and in units of that the diagonal, τ and the weights of the coupling."""
    k = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        d = tl.load(S + k * S_k + at.to(tl.int64) * (n + 1), mask=at < n, other=0.0)
        total += d
        largest = tl.maximum(largest, tl.where(at < n, d, float("-inf")))
    trace = tl.sum(total, 0)
    mean = tl.maximum(trace / n, 1.1754943508222875e-38)
    floor = 1.0842021724855044e-19  # the root of the smallest normal number
    rounding = 4 * 1.1920928955078125e-07 * (tl.max(largest, 0) / mean) + floor
    added = damping * (trace / mean / n)
    tl.store(scale + k, mean)
    tl.store(unit + k, unit_number)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        d = tl.load(S + k * S_k + at.to(tl.int64) * (n + 1), mask=inside, other=0.0) / mean
        shifted = tl.maximum(d, 0.0) + added
        tl.store(diagonal + k * n + at, d, mask=inside)
        tl.store(width + k * n + at, 0.5 * still * shifted + rounding, mask=inside)
        tl.store(weight + k * n + at, tl.rsqrt(tl.maximum(shifted, floor)), mask=inside)


@_jit
@no_type_check
def angles(s, d_i, d_j, w_i, w_j):
    """E before many rotations at once are held back, and the gaps Δ."""
    gap = d_j[None, :] - d_i[:, None]
    tau = w_i[:, None] + w_j[None, :]
    return s * gap / (gap * gap + s * s + tau * tau), gap


@_jit
@no_type_check
def row_sums_kernel(
    S, scale, diagonal, width, weight, squares, couplings, n, S_k, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """For some rows the sums of E² and of the squared couplings, the diagonal left out."""
    k = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < n
    inverse = 1.0 / tl.load(scale + k)
    d_i = tl.load(diagonal + k * n + rows, mask=there, other=0.0)
    w_i = tl.load(width + k * n + rows, mask=there, other=1.0)
    c_i = tl.load(weight + k * n + rows, mask=there, other=0.0)
    squared = tl.zeros((ROWS,), dtype=tl.float32)
    coupled = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, n, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        here = columns < n
        d_j = tl.load(diagonal + k * n + columns, mask=here, other=0.0)
        w_j = tl.load(width + k * n + columns, mask=here, other=1.0)
        c_j = tl.load(weight + k * n + columns, mask=here, other=0.0)
        at = S + k * S_k + rows[:, None].to(tl.int64) * n + columns[None, :]
        s = tl.load(at, mask=there[:, None] & here[None, :], other=0.0) * inverse
        E, _ = angles(s, d_i, d_j, w_i, w_j)
        squared += tl.sum(E * E, 1)
        c = tl.where(rows[:, None] == columns[None, :], 0.0, c_i[:, None] * s * c_j[None, :])
        coupled += tl.sum(c * c, 1)
    tl.store(squares + k * n + rows, squared, mask=there)
    tl.store(couplings + k * n + rows, coupled, mask=there)


@_jit
@no_type_check
def rotation_kernel(
    E_half, S, scale, diagonal, width, squares, first, second, probes, images, unit_number, n, S_k,
    PROBES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of E in half precision, their terms of the eigenvalues' first and second order in E, and ``E v``."""
    k = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < n
    inverse = 1.0 / tl.load(scale + k)
    d_i = tl.load(diagonal + k * n + rows, mask=there, other=0.0)
    w_i = tl.load(width + k * n + rows, mask=there, other=1.0)
    r_i = tl.load(squares + k * n + rows, mask=there, other=0.0)
    once = tl.zeros((ROWS,), dtype=tl.float32)
    twice = tl.zeros((ROWS,), dtype=tl.float32)
    image = tl.zeros((ROWS, PROBES), dtype=tl.float32)
    places = tl.arange(0, PROBES)
    for start in range(0, n, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        here = columns < n
        inside = there[:, None] & here[None, :]
        d_j = tl.load(diagonal + k * n + columns, mask=here, other=0.0)
        w_j = tl.load(width + k * n + columns, mask=here, other=1.0)
        r_j = tl.load(squares + k * n + columns, mask=here, other=0.0)
        at = rows[:, None].to(tl.int64) * n + columns[None, :]
        s = tl.load(S + k * S_k + at, mask=inside, other=0.0) * inverse
        E, gap = angles(s, d_i, d_j, w_i, w_j)
        E = E * tl.rsqrt(1.0 + (r_i[:, None] + r_j[None, :]))
        once -= 2.0 * tl.sum(E * s, 1)  # by rows: a column of E is a row with the other sign
        twice += tl.sum(E * E * gap, 1)
        half = (E * unit_number).to(tl.float16)
        tl.store(E_half + k * S_k + at, half, mask=inside)
        v = tl.load(probes + columns[:, None] * PROBES + places[None, :], mask=here[:, None], other=0.0)
        image = tl.dot(half, v, image)
    tl.store(first + k * n + rows, once, mask=there)
    tl.store(second + k * n + rows, twice, mask=there)
    image_at = images + (k * n + rows[:, None]) * PROBES + places[None, :]
    tl.store(image_at, (image / unit_number).to(tl.float16), mask=there[:, None])


@_jit_varying(by_group=("scale", "alpha", "beta", "left"))
@no_type_check
def finish_kernel(
    images, next_images, scale, diagonal, first, second, couplings, alpha, beta, values, left, unit_number, margin, n,
    PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One matrix: E is divided by its norm, if larger than one; factors of the next product, eigenvalues, coupling."""
    k = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PROBES)
    before = tl.zeros((PROBES,), dtype=tl.float32)
    after = tl.zeros((PROBES,), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        at = (k * n + rows[:, None]) * PROBES + places[None, :]
        x = tl.load(images + at, mask=(rows < n)[:, None], other=0.0).to(tl.float32)
        y = tl.load(next_images + at, mask=(rows < n)[:, None], other=0.0) / unit_number
        before += tl.sum(x * x, 0)
        after += tl.sum(y * y, 0)
        total += tl.load(couplings + k * n + rows, mask=rows < n, other=0.0)
    norm = tl.sqrt(tl.max(after / tl.maximum(before, 1.1754943508222875e-38), 0))
    f = 1.0 / tl.maximum(margin * norm, 1.0)
    tl.store(alpha + k, 0.5 * f * f * unit_number)
    tl.store(beta + k, f)
    coupling = tl.sqrt(tl.sum(total, 0) / n)
    tl.store(left + k, tl.where(coupling == coupling, coupling, float("inf")))
    mean = tl.load(scale + k)
    for start in range(0, n, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        at = k * n + rows
        d = tl.load(diagonal + at, mask=rows < n, other=0.0)
        d += f * tl.load(first + at, mask=rows < n, other=0.0)
        d += f * f * tl.load(second + at, mask=rows < n, other=0.0)
        tl.store(values + at, mean * tl.where(d < 0.0, 0.0, d), mask=rows < n)


@_jit
@no_type_check
def squared_rows_kernel(out, T, unit_number, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Squares of some rows over their sums, times the unit; T is read twice, the second time mostly from the cache."""
    k = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_at = (k * n + rows[:, None]) * n
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, n, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = (rows[:, None] < n) & (columns[None, :] < n)
        t = tl.load(T + row_at + columns[None, :], mask=inside, other=0.0).to(tl.float32) / unit_number
        total += t * t
    factor = unit_number / tl.sum(total, 1)
    for start in range(0, n, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = (rows[:, None] < n) & (columns[None, :] < n)
        t = tl.load(T + row_at + columns[None, :], mask=inside, other=0.0).to(tl.float32) / unit_number
        tl.store(out + row_at + columns[None, :], (t * t * factor[:, None]).to(tl.float16), mask=inside)


@_jit
@no_type_check
def column_dots_kernel(
    dots, squares, C, V, n, m, C_k, V_k, EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Of some columns, the part of some rows.

    Unrolled, so that all loads begin before the first one has ended; and rows are added up once, at the end, since that
    lets threads wait for each other.
    """
    part, k = tl.program_id(1), tl.program_id(2).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    square = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in tl.static_range(0, EACH, ROWS):
        rows = part * EACH + start + tl.arange(0, ROWS)
        inside = (rows[:, None] < n) & (columns[None, :] < m)
        at = rows[:, None] * m + columns[None, :]
        v = tl.load(V + k * V_k + at, mask=inside, other=0.0).to(tl.float32)
        product += v * tl.load(C + k * C_k + at, mask=inside, other=0.0).to(tl.float32)
        square += v * v
    place = (k * tl.num_programs(1) + part) * m + columns
    tl.store(dots + place, tl.sum(product, 0), mask=columns < m)
    tl.store(squares + place, tl.sum(square, 0), mask=columns < m)
