"""`Problem`: a model, its data, its likelihood and a budget; it never sees an optimizer."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.foundations import likelihoods
from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.random import stream


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When training ends: at whichever comes first.

    >>> Budget(steps=100, seconds=60).spent(steps=100, epochs=3, seconds=2.0)
    True
    """

    steps: int | None = None
    epochs: int | None = None
    seconds: float | int | None = None
    """A budget in seconds gives another number of steps each time: records are then not the same bit for bit."""

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.steps, self.epochs, self.seconds) if limit is not None]
        if not limits or any(not limit >= 0 for limit in limits):
            raise InputError(
                describe(
                    f"Budget(steps={self.steps}, epochs={self.epochs}, seconds={self.seconds})",
                    "at least one limit, none negative",
                    "pass e.g. Budget(steps=1000)",
                )
            )

    def spent(self, *, steps: int, epochs: int, seconds: float) -> bool:
        """Whether training has to end."""
        pairs = ((self.steps, steps), (self.epochs, epochs), (self.seconds, seconds))
        return any(limit is not None and used >= limit for limit, used in pairs)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is trained, on what, and for how long.

    The loss is that of the likelihood, ``1/N Σ_n Σ_s ℓ(f_ns, y_ns)`` over a batch of N examples, as everywhere in
    this library.
    """

    name: str
    model: Callable[[int], nn.Module]
    """From a seed to a fresh model; called with torch's own random state set from the seed."""
    batches: Callable[[str, int], Iterable[tuple[Any, Any]]]
    """From a split ("train", "test", …) and a seed to one pass over it, batch by batch ``(x, y)``; see
    `tensor_batches`."""
    likelihood: str | Likelihood = "categorical"
    metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor | float]] = field(default_factory=dict)
    """From outputs and targets of a batch to a mean over its examples, such as `accuracy`."""
    budget: Budget = field(default_factory=lambda: Budget(epochs=1))

    def __post_init__(self) -> None:
        if "loss" in self.metrics:
            raise InputError(describe("a metric named 'loss'", "another name", "the loss is measured anyway"))
        likelihoods.resolve(self.likelihood)

    def loss(self, f: Tensor, y: Any) -> Tensor:
        """The mean loss of a batch."""
        likelihood = likelihoods.resolve(self.likelihood)
        terms = likelihood.standardize(f, y, None, lambda t: t)
        return likelihood.loss(terms).sum() / f.shape[0]


def tensor_batches(data: Mapping[str, tuple[Tensor, Tensor]], batch_size: int) -> "TensorBatches":
    """`Problem.batches` for data in memory: "train" is shuffled by the seed, the other splits keep their order.

    >>> batches = tensor_batches({"train": (torch.arange(5.0), torch.arange(5))}, batch_size=2)
    >>> [len(x) for x, y in batches("train", 0)]
    [2, 2, 1]
    """
    if batch_size < 1:
        raise InputError(describe(f"batch_size={batch_size}", "a number ≥ 1", "pass e.g. batch_size=64"))
    for split, (x, y) in data.items():
        if len(x) != len(y) or len(x) == 0:
            raise InputError(
                describe(
                    f"split {split!r} of {len(x)} inputs and {len(y)} targets",
                    "as many of both, not none",
                    "check the data",
                )
            )

    return TensorBatches(dict(data), batch_size)


@dataclass(frozen=True)
class TensorBatches:
    """What `tensor_batches` makes; an object, so that another process can be given it."""

    data: Mapping[str, tuple[Tensor, Tensor]]
    batch_size: int

    def __call__(self, split: str, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over a split."""
        if split not in self.data:
            raise InputError(not_one_of("split", split, self.data))
        return self._pass(*self.data[split], shuffled=split == "train", seed=seed)

    def _pass(self, x: Tensor, y: Tensor, shuffled: bool, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(x), generator=stream(seed, "order")) if shuffled else torch.arange(len(x))
        for k in range(math.ceil(len(x) / self.batch_size)):
            chosen = order[k * self.batch_size : (k + 1) * self.batch_size].to(x.device)
            yield x[chosen], y[chosen.to(y.device)]
