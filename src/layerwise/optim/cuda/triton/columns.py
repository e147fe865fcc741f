"""Running means of second moments of listed matrices, a bias column included: three launches for a whole stack.

The first sums the columns of all matrices (and rounds those of single precision to half), the second decides what is
taken and moves the border of every mean, the third is `triton.products.gram_update_`. Ask
`triton.products.available` first. Nothing here asks the device for a value.
"""

import math
import struct
from collections.abc import Sequence
from functools import cache

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.cuda.linalg import packed
from layerwise.optim.cuda.linalg.packed import is_packed
from layerwise.optim.cuda.triton.arguments import byte, one, power_of_two
from layerwise.optim.cuda.triton.device import ceil, kernels, on
from layerwise.optim.cuda.triton.products import LISTED, filled_up, gram_update_

COLUMNS, ROWS = 128, 32
PROGRAMS = 2112
"""Enough to keep 132 processors busy, sixteen each."""
LOOKED_AT, BORDER_COLUMNS = 64, 1024
NO_MEMORY = -1e4
"""A logarithm of 0, near enough: the exponential of it is 0."""


def average_grams_(
    mean: Float32[Tensor, "K *N"],
    count: Float32[Tensor, "K"],
    X: Sequence[Float[Tensor, "m n"]],
    alpha: int | float,
    decay: int | float,
    *,
    all_finite: Bool[Tensor, ""] | None = None,
    border: bool = False,
    half: torch.dtype = torch.bfloat16,
    by: Float[Tensor, ""] | None = None,
    parts: int | None = None,
) -> Int64[Tensor, ""]:
    """Move each mean's leading block towards ``alpha·XᵀX`` by the weight ``(1−ρ)/(1−ρᵗ)``; count t first.

    Means are ``[K, N, N]``, or `packed`. With `border`, row and column n follow ``alpha·Xᵀ1`` and their corner 1, the
    moment of a bias. A matrix with an entry that is not finite, or whose squares are not, changes nothing; nor does any
    in a step that is left out. `X` has one matrix for each mean, alike in shape, strides and type; those of float32 are
    rounded to `half`. `alpha` is multiplied by `by`, on the device, where that is given. Returns how many matrices were
    left out in a step that is taken.
    """
    first, K = X[0], len(X)
    by = one(mean.device) if by is None else by.float()
    m, n = first.shape
    _check(mean, count, X, border)
    blocks = ceil(n, COLUMNS)
    parts = min(ceil(PROGRAMS, blocks * K), ceil(m, 4 * ROWS)) if parts is None else parts
    rows_each = ceil(ceil(m, parts), ROWS) * ROWS
    cast, device = first.dtype == torch.float32, mean.device
    numbers = torch.empty(K * (parts * (blocks + (n if border else 0)) + 1), dtype=torch.float32, device=device)
    weight, squares = numbers[:K], numbers[K:]
    sums = numbers[K + K * parts * blocks :] if border else squares
    skipped = torch.empty((), dtype=torch.int64, device=device)
    rounded = torch.empty(K, m, n, dtype=half, device=device) if cast else None
    with on(device):
        launch = kernels("column_kernels")
        for start in range(0, K, LISTED):
            few = X[start : start + LISTED]
            listed = filled_up(few)
            launch.column_kernel[(blocks, parts, len(few))](
                listed, rounded, sums, squares, m, n, rows_each, first.stride(0), start,
                LISTED=len(listed), SUMS=border, CAST=cast, COLUMNS=COLUMNS, ROWS=ROWS, num_warps=4,
            )  # fmt: skip
        launch.border_kernel[(K,)](
            mean, count, weight, skipped, sums, squares, byte(all_finite, device), by, float(alpha), *_memory(decay),
            n, parts, blocks, K, mean.stride(0), mean.stride(1), BORDER=border, PACKED=is_packed(mean),
            COLUMNS=BORDER_COLUMNS, GROUPS=max(64, power_of_two(K)), PARTS=LOOKED_AT, num_warps=8,
        )  # fmt: skip
    made = X if rounded is None else rounded
    gram_update_(mean if is_packed(mean) else mean[:, :n, :n], made, weight, alpha, by)
    return skipped


@cache
def _memory(decay: int | float) -> tuple[float, ...]:
    """``1 − ρ`` and ``log ρ``, each as two numbers of single precision: a kernel is handed no double."""
    found: list[float] = []
    for x in (1 - decay, math.log(decay) if decay > 0 else NO_MEMORY):
        high = struct.unpack("f", struct.pack("f", x))[0]
        found += [high, x - high]
    return tuple(found)


def _check(mean: Tensor, count: Tensor, X: Sequence[Tensor], border: bool) -> None:
    first, K = X[0], len(X)
    kind = (first.shape, first.stride(), first.dtype)
    alike = all((x.shape, x.stride(), x.dtype) == kind for x in X)
    size, adjacent = (packed.size(mean), True) if is_packed(mean) else (mean.shape[1], mean.stride(2) == 1)
    fits = len(mean) == len(count) == K and first.shape[1] + border <= size
    if not (alike and fits and first.stride(1) == 1 and adjacent and count.stride(0) == 1):
        raise InputError(
            describe(
                f"{K} × X of shape {tuple(first.shape)}, strides {first.stride()}, for means {tuple(mean.shape)} of "
                f"strides {mean.stride()}",
                "matrices alike, one for each mean, with a last stride of 1, no wider than the means",
                "call `.contiguous()`, or average them apart",
            )
        )
