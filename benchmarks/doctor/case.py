"""`Case`: what `lw.doctor` is given, and the random numbers that it was made with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """What the doctor is given."""

    model: nn.Module
    data: Any
    optimizer: torch.optim.Optimizer | None = None
    likelihood: str | None = None


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's own random state, as this seed has it, inside; as it was, afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + seed)
        yield


def parameter(model: nn.Module, name: str) -> Tensor:
    """The values of a parameter, to plant a fault in: changes in place are those of the model."""
    return model.get_parameter(name).detach()


def initialise(layer: nn.Linear | nn.Conv1d | nn.Conv2d, gain: float) -> None:
    """Weights of variance ``gain / inputs``, biases zero: 2 keeps the size of signals through ReLU, 1 through tanh."""
    nn.init.normal_(layer.weight, std=(gain / layer.weight[0].numel()) ** 0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
