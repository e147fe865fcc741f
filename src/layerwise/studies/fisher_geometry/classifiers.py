"""Small fully connected classifiers that are trained by SGD, as they were at some steps of the training."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from layerwise import data
from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.random import stream

ACTIVATIONS = {"sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}
CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A network, its images and its training; in float64."""

    images: str = "digits"
    """"digits" (8 × 8, with scikit-learn) or "mnist"."""
    hidden: tuple[int, ...] = (20, 20, 20)
    activation: str = "sigmoid"
    gain: float = 2.0
    """Weights are drawn from N(0, gain² / fan_in), biases are zero."""
    lr: float = 0.1
    momentum: float = 0.9
    batch: int = 100

    def __post_init__(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise InputError(describe(f"hidden={self.hidden}", "one layer at least, of one unit", "give widths"))
        for name, known in (("images", ("digits", "mnist")), ("activation", tuple(ACTIVATIONS))):
            if getattr(self, name) not in known:
                raise InputError(not_one_of(name, getattr(self, name), known))

    def data(self) -> tuple[Tensor, Tensor]:
        """Pixels from 0 to 1, flat, and labels."""
        found = data.digits() if self.images == "digits" else data.mnist("train")
        return found.x.flatten(1).double(), found.y

    def network(self, generator: torch.Generator, inputs: int) -> nn.Sequential:
        """Drawn anew."""
        sizes = (inputs, *self.hidden, CLASSES)
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layer = nn.Linear(fan_in, fan_out, dtype=torch.float64)
            nn.init.normal_(layer.weight, std=self.gain * fan_in**-0.5, generator=generator)
            nn.init.zeros_(layer.bias)
            layers += [layer, ACTIVATIONS[self.activation]()]
        return nn.Sequential(*layers[:-1])

    def trained(self, x: Tensor, y: Tensor, steps: Sequence[int], seed: int) -> Iterator[tuple[int, nn.Sequential]]:
        """The network after each of `steps`, in increasing order: copies, which later steps leave as they are."""
        generator = stream(seed, "classifier")
        model = self.network(generator, x.shape[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)
        wanted = sorted(set(steps))
        for step in range(wanted[-1] + 1):
            if step in wanted:
                yield step, copy.deepcopy(model)
            chosen = torch.randint(len(x), (self.batch,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
