"""Columns of ±1 without a pattern that are the same at every call, on every device: to look at a matrix with."""

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor


def probe_columns(n: int, columns: int, like: Tensor) -> Float[Tensor, "n k"]:
    """`signs`, kept for good, since CUDA graphs may read them. Up to twice as many rows as columns: the columns of I.

    >>> probe_columns(3, 1, like=torch.zeros(())).tolist(), probe_columns(2, 1, like=torch.zeros(())).tolist()
    ([[-1.0], [-1.0], [1.0]], [[1.0, 0.0], [0.0, 1.0]])
    """
    return _kept_columns(n, columns, like.dtype, like.device)


@cache
def _kept_columns(n: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        like = torch.empty(0, dtype=dtype, device=device)
        return torch.eye(n, dtype=dtype, device=device) if n <= 2 * columns else signs(n, columns, like)


def signs(n: int, columns: int, like: Tensor) -> Float[Tensor, "n k"]:
    """±1, by a hash of the position, made where `like` lies.

    >>> signs(3, 2, torch.zeros(())).tolist()
    [[-1.0, -1.0], [1.0, 1.0], [1.0, -1.0]]
    """
    x = torch.arange(1, n * columns + 1, device=like.device)
    for _ in range(2):  # multiply and fold, modulo 2³²
        x = (x * 0x45D9F3B) & 0xFFFFFFFF
        x = x ^ (x >> 16)
    return (1 - 2 * ((x >> 7) & 1)).to(like.dtype).reshape(n, columns)
