"""`OneHot`: inputs of an embedding, kept as indices and never as vectors of the vocabulary's length."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class OneHot:
    """``a[n, s] = e_{index[n, s]}``; an index of −1 stands for the zero vector (a padding token)."""

    index: Int[Tensor, "*lead"]
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """As the dense tensor [..., K=1, I] would have it."""
        return (*self.index.shape, 1, self.size)

    def counts(self, keep: Tensor | None, dtype: torch.dtype) -> Float[Tensor, "I"]:
        """Diagonal of ``Σ a aᵀ``: how often each token occurs.

        Integers add up exactly; `torch.bincount` would synchronize, to find the largest of them.
        """
        index = self.index if keep is None else torch.where(keep, self.index, -1)
        index = index.reshape(-1).long() + 1
        return index.new_zeros(self.size + 1).scatter_add_(0, index, torch.ones_like(index))[1:].to(dtype)

    def add_rows(self, rows: Float[Tensor, "M O"]) -> Float[Tensor, "O I"]:
        """``Σ_m rows_m ⊗ a_m``, for rows in the order of the flattened indices."""
        total = rows.new_zeros(self.size + 1, rows.shape[-1])
        total.index_add_(0, self.index.reshape(-1) + 1, rows)
        return total[1:].mT

    def times(self, q: Float[Tensor, "1 I"]) -> Float[Tensor, "*lead 1"]:
        """``aᵀ q``: an entry of q for each index."""
        return torch.nn.functional.pad(q[0], (1, 0))[self.index + 1].unsqueeze(-1)

    def example_tokens(self) -> tuple[Int[Tensor, "P"], Int[Tensor, "M"]]:
        """Pairs (example, token), all distinct: the token of each, and for each position which pair it is in.

        Rows of one example that fall on one token add up before they are squared. On a GPU there are as many pairs as
        positions, so that their number need not be read back; those that are left over have the token −1.
        """
        index = self.index.reshape(self.index.shape[0], -1)
        if index.device.type != "cpu":
            return _pairs_by_sorting(index)
        example = torch.arange(index.shape[0]).unsqueeze(1)
        pairs, inverse = torch.unique(example * (self.size + 1) + index + 1, return_inverse=True)
        return pairs % (self.size + 1) - 1, inverse.reshape(-1)

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "*lead 1 I"]:
        """The vectors themselves; small vocabularies only."""
        eye = torch.eye(self.size, dtype=dtype, device=self.index.device)
        return torch.nn.functional.pad(eye, (0, 0, 1, 0))[self.index + 1].unsqueeze(-2)


def _pairs_by_sorting(index: Int[Tensor, "N S"]) -> tuple[Int[Tensor, "M"], Int[Tensor, "M"]]:
    """`OneHot.example_tokens`, a pair named by where its token begins in the sorted row of its example.

    `torch.unique` would synchronize, to find out how many pairs there are.
    """
    n, s = index.shape
    index = index.contiguous()  # torch warns otherwise
    place = torch.searchsorted(index.sort(dim=1).values, index)
    pair = (place + s * torch.arange(n, device=index.device).unsqueeze(1)).reshape(-1)
    return torch.full_like(pair, -1).scatter_(0, pair, index.reshape(-1)), pair
