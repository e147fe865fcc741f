"""Sliding windows of an image or sequence as a view: what a convolution's kernel sees at each output position."""

import math
from collections.abc import Sequence

from torch import Tensor


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
