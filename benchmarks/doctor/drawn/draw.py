"""Numbers and choices from torch's own random state, which the number of a set has seeded."""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def whole(low: int, high: int) -> int:
    """A whole number, both ends included."""
    return int(torch.randint(low, high + 1, ()))


def log_uniform(low: float, high: float) -> float:
    return math.exp(math.log(low) + (math.log(high) - math.log(low)) * torch.rand(()).item())


def choice(options: Sequence[T]) -> T:
    return options[whole(0, len(options) - 1)]


def coin(probability: float = 0.5) -> bool:
    return torch.rand(()).item() < probability
