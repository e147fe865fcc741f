"""Second moments of rows: sums of ``x xᵀ``, with what a bias adds to them.

Rows of half precision are multiplied as they are on a GPU, where tensor cores add their products up in float32.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.foundations.linalg import gram
from layerwise.foundations.linalg.symmetric_product import accumulate_gram, mirror_
from layerwise.foundations.types import statistics_dtype
from layerwise.layers.io.standard import HALF


def multiplied_in(t: Tensor, statistics: torch.dtype) -> torch.dtype:
    """The type that a moment's entries are multiplied in: tensor cores take half types as they are."""
    return t.dtype if t.device.type == "cuda" and t.dtype in HALF else statistics


def row_gram(x: Float[Tensor, "*lead P"]) -> Float[Tensor, "1 P P"]:
    """``Σ x xᵀ`` over all leading axes, in whatever order they are."""
    return gram(x.reshape(-1, x.shape[-1])).unsqueeze(0)


def grouped_gram(rows: Float[Tensor, "M K P"]) -> Float[Tensor, "K P P"]:
    """``Σ_m x xᵀ``, a group at a time."""
    return row_gram(rows[:, 0]) if rows.shape[1] == 1 else gram(rows.movedim(1, 0))


def linear_moment(x: Float[Tensor, "*lead I"], bias: bool) -> tuple[Float[Tensor, "1 J J"], int]:
    """``Σ x xᵀ`` and the number of rows; with a bias, x has a one as its last entry.

    >>> linear_moment(torch.tensor([[2.0], [3.0]]), True)
    (tensor([[[13.,  5.],
             [ 5.,  2.]]]), 2)
    """
    X = x.reshape(-1, x.shape[-1])
    if not bias:
        return gram(X).unsqueeze(0), len(X)
    n, w = X.shape[1], X.shape[1] + 1
    whole = torch.empty(1, w, w, dtype=statistics_dtype(X.dtype), device=X.device)
    inner = whole.as_strided((n, n), (w, 1))  # one view each: slices of slices cost the host more than the device
    row = whole.as_strided((n,), (1,), n * w)
    if X.device.type == "cpu":
        mirror_(accumulate_gram(inner, X, beta=0.0))  # where it belongs at once: a copy is a tenth of the product
    else:
        inner.copy_(gram(X))
    torch.sum(X, 0, dtype=whole.dtype, out=row)
    whole.as_strided((n,), (w,), n).copy_(row)
    whole.as_strided((1,), (1,), n * w + n).fill_(len(X))
    return whole, len(X)


def bordered(total: Float[Tensor, "K I I"], sums: Float[Tensor, "K I"], count: int) -> Float[Tensor, "K J J"]:
    """The moment with the bias column: ``[[Σ aaᵀ, Σ a], [Σ aᵀ, n]]``."""
    k, i = sums.shape
    whole = total.new_empty(k, i + 1, i + 1)
    whole[:, :i, :i] = total
    whole[:, :i, i] = sums
    whole[:, i, :i] = sums
    whole[:, i, i] = count
    return whole


def where_kept(t: Tensor, keep: Bool[Tensor, "N S"], offset: int = 0) -> Tensor:
    """Rows ``[*offset, N, S, K, P]`` with zeros where positions do not count.

    Picking those that do would ask the device how many they are.
    """
    shape = (*[1] * offset, *keep.shape, *[1] * (t.ndim - offset - 2))
    return torch.where(keep.view(shape), t, 0)
