"""Digits of 8 × 8 pixels, which come with scikit-learn: no folder and no network."""

import torch

from layerwise.data.images import Images
from layerwise.data.optional import require

LEVELS = 16
"""A pixel counts the dark ones of a 4 × 4 block."""


def digits(limit: int | None = None) -> Images:
    """1,797 handwritten digits, ``[N, 1, 8, 8]`` between 0 and 1, with their labels.

    Reference: Alpaydin and Kaynak 1998, the test part, as in scikit-learn.

    >>> x, y = digits(limit=100)
    >>> x.shape, int(y.max())
    (torch.Size([100, 1, 8, 8]), 9)
    """
    found = require("sklearn.datasets", "scikit-learn", "the digits").load_digits()
    x = torch.from_numpy(found.images).to(torch.float32).unsqueeze(1) / LEVELS
    y = torch.from_numpy(found.target).to(torch.int64)
    return Images(x, y) if limit is None else Images(x, y).first(limit)
