"""The log partition function of all words but the k likeliest, and dictionaries to compare a trained one with."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream

Transform = Callable[[Tensor], Tensor]
ELEMENTS = 2**24
"""Logits that are held at once: 64 MiB in float32, and twice that for their copy in float64."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dictionary:
    """The output embedding: logits are ``transform(h @ atoms.T + bias)``."""

    atoms: Float[Tensor, "n d"]
    bias: Float[Tensor, "n"] | None = None
    transform: Transform | None = None

    @property
    def words(self) -> int:
        """n."""
        return len(self.atoms)

    @property
    def columns(self) -> Float[Tensor, "n columns"]:
        """Atoms with the bias, where there is one, as an extra column; it multiplies the 1 that `widen` appends."""
        return self.atoms if self.bias is None else torch.cat([self.atoms, self.bias[:, None]], dim=1)

    def widen(self, states: Float[Tensor, "N d"]) -> Float[Tensor, "N columns"]:
        """States with a 1 for the bias, where there is one."""
        return states if self.bias is None else torch.cat([states, states.new_ones(len(states), 1)], dim=1)

    def logits(self, states: Float[Tensor, "N d"]) -> Float[Tensor, "N n"]:
        """Of every word."""
        found = states @ self.atoms.mT.to(states.dtype)
        if self.bias is not None:
            found += self.bias.to(states.dtype)
        return found if self.transform is None else self.transform(found)

    def gaussian(self, seed: int = 0) -> "Dictionary":
        """Random atoms of the same norms, biases in another order: what a dictionary has that has learned nothing."""
        generator = stream(seed, "anchors", "gaussian")
        drawn = torch.randn(self.atoms.shape, generator=generator).to(self.atoms)
        drawn *= self.atoms.norm(dim=1, keepdim=True) / drawn.norm(dim=1, keepdim=True)
        order = torch.randperm(self.words, generator=generator).to(self.atoms.device)
        return Dictionary(atoms=drawn, bias=None if self.bias is None else self.bias[order], transform=self.transform)

    def shuffled(self, seed: int = 0) -> "Dictionary":
        """Each coordinate in an order of its own over the words: the mean atom and all marginals stay, no word does."""
        generator = stream(seed, "anchors", "shuffled")

        def mixed(column: Tensor) -> Tensor:
            return column[torch.randperm(self.words, generator=generator).to(column.device)]

        atoms = torch.empty_like(self.atoms)
        for coordinate in range(self.atoms.shape[1]):  # one at a time: all orders at once are twice the dictionary
            atoms[:, coordinate] = mixed(self.atoms[:, coordinate])
        return Dictionary(atoms=atoms, bias=None if self.bias is None else mixed(self.bias), transform=self.transform)


def log_bulk_partition(logits: Float[Tensor, "N n"], k: Sequence[int]) -> Float[Tensor, "N ks"]:
    """log Σ exp(z_j) in float64 over all words but those with the k largest logits, for each k.

    >>> import torch
    >>> z = torch.tensor([[3.0, 0.0, 0.0]])
    >>> log_bulk_partition(z, [1, 2]).exp()
    tensor([[2., 1.]], dtype=torch.float64)

    The largest are left out before anything is summed: exponentials are never subtracted, which would lose all digits
    where the first word has probability one. NaN among the logits gives NaN.
    """
    refuse_k(k, logits.shape[1])
    largest = max(k)
    if largest == 0:
        return logits.double().logsumexp(1, keepdim=True).expand(-1, len(k))
    if largest * 8 > logits.shape[1]:
        values = logits.sort(dim=1, descending=True).values.double()
        top, rest = values[:, :largest], values[:, largest:]
    else:
        top, places = logits.topk(largest, dim=1)
        top, rest = top.double(), logits.scatter(1, places, -torch.inf).double()
    upwards = torch.cat([rest.logsumexp(1, keepdim=True), top.flip(1)], dim=1).logcumsumexp(1)
    found = upwards[:, [largest - each for each in k]]
    return found.masked_fill(top[:, :1].isnan(), torch.nan)  # NaN sorts as the largest


def refuse_k(k: Sequence[int], words: int) -> None:
    """An error for a k that leaves no bulk."""
    wrong = [each for each in k if not isinstance(each, Integral) or not 0 <= each < words]
    if wrong or not k or len(set(k)) != len(k):
        given = f"k={tuple(k)} of {words} words"
        raise InputError(describe(given, "different numbers from 0 to fewer than the words", "pass e.g. k=(0, 100)"))


def rows_at_once(words: int, chunk: int | None) -> int:
    """How many positions have their logits computed together."""
    if chunk is not None and chunk < 1:
        raise InputError(describe(f"chunk={chunk}", "a number of positions ≥ 1", "leave it out"))
    return chunk or max(1, min(2048, ELEMENTS // words))


def log_partitions(
    states: Float[Tensor, "N d"], dictionary: Dictionary, k: Sequence[int], chunk: int | None = None
) -> Iterator[Float[Tensor, "M ks"]]:
    """`log_bulk_partition` of the dictionary's logits, chunk by chunk, on its device."""
    for part in states.split(rows_at_once(dictionary.words, chunk)):
        logits = dictionary.logits(part.to(dictionary.atoms.device))
        found = log_bulk_partition(logits, k)
        if not bool(found.isfinite().all()):
            given = "logits that are not finite"
            raise InputError(describe(given, "numbers", "look for NaN in the model's weights or in a half precision"))
        yield found.cpu()
