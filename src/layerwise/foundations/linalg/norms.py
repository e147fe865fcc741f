"""Norms of float32 numbers whose squares float32 cannot hold: those above 1.8e19 are infinite, below 1e-23 zero."""

import torch
from jaxtyping import Float
from torch import Tensor

PART = 2**22
"""Entries that may be in float64 at a time, where the device has no reduction from one type to the other."""


def squared_norm(X: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """``Σ x²`` in float64.

    >>> float(squared_norm(torch.tensor([3.0, 4.0])))
    25.0
    """
    parts = X.detach().reshape(-1).split(PART)
    return torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).square().sum()


def norm(X: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """``√Σ x²`` in the dtype of X.

    >>> float(norm(torch.tensor([3e30, 4e30])) / 5e30)
    1.0
    """
    return squared_norm(X).sqrt().to(X.dtype)
