"""Patches of an image or sequence: what a convolution's kernel sees at each output position, and their second moment.

`sliding_windows` shows patches as a view. `patch_moment` gives ``Σ_p patch_p patch_pᵀ`` without forming them.

Unfolding a k × k convolution copies the input k² times and multiplies (C k²)² numbers a pixel. Here only the
axes after the first are unfolded (k copies). Along the first, two rows of the kernel, o and o', see inputs
at a distance o' − o, so that one product over the whole image serves every pair of rows at that distance; the
pairs differ only in which border rows take part, and those are corrected one by one:

    M[o, o'] = Σ_{q = o}^{o + H − 1} h(q),   h(q) = b_qᵀ b_{q + o' − o},   b_q row q, unfolded along the rest
    M[o + 1, o' + 1] = M[o, o'] + h(o + H) − h(o)

For a 3 × 3 kernel that is 24 products of C × C a pixel instead of 81.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.linalg import cross_product
from layerwise.foundations.types import statistics_dtype


def sliding_windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """``[*head, *space] -> [*head, *out, *kernel]``, without a copy.

    >>> import torch
    >>> sliding_windows(torch.arange(5.0), (3,), (1,), (1,)).tolist()
    [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]
    """
    dims = len(kernel)
    head, space = x.shape[: x.ndim - dims], x.shape[x.ndim - dims :]
    out = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(space, kernel, stride, dilation, strict=True)]
    strides = x.stride()[x.ndim - dims :]
    return x.as_strided(
        (*head, *out, *kernel),
        (
            *x.stride()[: x.ndim - dims],
            *(s * t for s, t in zip(stride, strides, strict=True)),
            *(d * t for d, t in zip(dilation, strides, strict=True)),
        ),
        x.storage_offset(),
    )


def rows_of_patches(windows: Tensor, dims: int, groups: int) -> Tensor:
    """``[*head, C, *out, *kernel] -> [*head, S, K, C/K · kernel]``: one row an output position and group."""
    head = windows.ndim - 2 * dims - 1
    out = windows.shape[head + 1 : head + 1 + dims]
    channels_after_space = windows.movedim(head, head + dims)
    return channels_after_space.reshape(*windows.shape[:head], math.prod(out), groups, -1)


def patch_moment(
    x: Float[Tensor, "N C *space"],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    zero_rows: tuple[int, int],
) -> tuple[Float[Tensor, "K I I"], Float[Tensor, "K I"], int]:
    """``Σ patch patchᵀ``, ``Σ patch`` and the number of patches of a padded input.

    `zero_rows` says how many first and last rows are known to be zero, so that they cost nothing. Results are of
    float32 or better, whatever the input is.
    """
    rows = _unfold_all_but_first(x, kernel, stride, dilation, groups)
    out = (x.shape[2] - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    k, _, per_row, features = rows.shape
    single = statistics_dtype(x.dtype)
    blocks = rows.new_empty(k, kernel[0], features, kernel[0], features, dtype=single)
    for distance in range(kernel[0]):
        _fill_diagonal(blocks, rows, distance, out, stride[0], dilation[0], zero_rows)
    of_rows = rows.sum(2, dtype=single).unfold(1, (out - 1) * stride[0] + 1, dilation[0])
    sums = of_rows[:, : kernel[0], :, :: stride[0]].sum(-1)
    return (
        _order_like_weight(blocks, x.shape[1] // groups),
        _order_sums(sums, x.shape[1] // groups),
        out * per_row,
    )


def _unfold_all_but_first(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Float[Tensor, "K H P F"]:
    """Row by row: [K, rows, N · positions along the other axes, C/K · other taps]."""
    n, c = x.shape[:2]
    dims = len(kernel) - 1
    grouped = x.unflatten(1, (groups, c // groups))  # N K C/K H *rest
    windows = sliding_windows(grouped, kernel[1:], stride[1:], dilation[1:]) if dims else grouped
    # N K c H *out *taps -> K H N *out c *taps
    order = (1, 3, 0, *range(4, 4 + dims), 2, *range(4 + dims, 4 + 2 * dims))
    moved = windows.permute(*order)
    return moved.reshape(groups, x.shape[2], n * math.prod(moved.shape[3 : 3 + dims]), -1)


def _fill_diagonal(
    blocks: Tensor,
    rows: Tensor,
    distance: int,
    out: int,
    stride: int,
    dilation: int,
    zero_rows: tuple[int, int],
) -> None:
    """All blocks [o, o + distance] and their mirror images."""
    shift = distance * dilation
    for o in range(blocks.shape[1] - distance):
        total = blocks[:, o, :, o + distance]
        if o == 0 or stride > 1:
            total.copy_(_product(rows, o * dilation, shift, out, stride))
        else:
            former = blocks[:, o - 1, :, o - 1 + distance]
            leaving = range((o - 1) * dilation, o * dilation)
            changes = [(q, sign) for first in leaving for q, sign in ((first + out, 1), (first, -1))]
            for q, sign in [(q, sign) for q, sign in changes if not _is_zero(q, shift, rows.shape[1], zero_rows)]:
                former = torch.add(former, _product(rows, q, shift, 1, 1), alpha=sign, out=total)
            if former is not total:
                total.copy_(former)
        if distance:
            blocks[:, o + distance, :, o] = total.mT


def _is_zero(q: int, shift: int, height: int, zero_rows: tuple[int, int]) -> bool:
    first, last = zero_rows[0], height - zero_rows[1]
    return not (first <= q < last and first <= q + shift < last)


def _product(rows: Tensor, start: int, shift: int, count: int, stride: int) -> Float[Tensor, "K F F"]:
    """``Σ_{i < count} b_{start + i·stride}ᵀ b_{start + shift + i·stride}``."""
    span = (count - 1) * stride + 1
    left = rows[:, start : start + span : stride].flatten(1, 2)
    right = left if shift == 0 else rows[:, start + shift : start + shift + span : stride].flatten(1, 2)
    return cross_product(left, right)


def _order_like_weight(blocks: Tensor, channels: int) -> Tensor:
    """From (first tap, (channel, other taps)) to (channel, first tap, other taps), as weights are stored."""
    k, taps, features = blocks.shape[:3]
    split = blocks.view(k, taps, channels, features // channels, taps, channels, features // channels)
    return split.permute(0, 2, 1, 3, 5, 4, 6).reshape(k, taps * features, taps * features)


def _order_sums(sums: Float[Tensor, "K taps F"], channels: int) -> Tensor:
    k, taps, features = sums.shape
    return sums.view(k, taps, channels, features // channels).transpose(1, 2).reshape(k, taps * features)
