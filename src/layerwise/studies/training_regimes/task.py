"""What is trained and measured when regimes are compared: data of some seeds, runs of them, and their logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxtyping import Float, Int64
from torch import Tensor, nn

Log = dict[str, list[float]]
"""Columns, one entry a logged step."""


@dataclass(frozen=True)
class Run:
    """One training: seed, α and learning rate."""

    seed: int
    alpha: float | int
    lr: float | int


@dataclass(frozen=True, kw_only=True)
class Task:
    """The data of some seeds, and what is measured on them."""

    seeds: tuple[int, ...]
    x: Float[Tensor, "S N *inputs"]
    y: Int64[Tensor, "S N"]
    """Labels that are trained on."""
    others: Mapping[str, Float[Tensor, "S M *inputs"]] = field(default_factory=dict)
    """Further inputs whose outputs are measured."""
    measure: Callable[[Mapping[str, Tensor], Tensor], dict[str, Tensor]]
    """From outputs ``[R, N, classes]``, by name ("train", and those of `others`), and the place of each run's seed, to
    numbers ``[R]`` by name."""
    classes: int


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    run: Run
    log: Log
    """Columns "step", "signs" (similarity with the start) and those of the task, one entry a logged step."""
    model: nn.Module
    start: nn.Module
    probe: Float[Tensor, "N *inputs"]
    """Training examples, to compare both on."""


def geometric(total: int, growth: float | int) -> set[int]:
    """0, 1, 2, … and from then on steps that grow by a factor, and the last one.

    >>> sorted(geometric(40, 1.06))[-4:]
    [35, 37, 39, 40]
    """
    found, at = {0, total}, 1.0
    while at < total:
        found.add(round(at))
        at = max(at * growth, at + 1e-3)
    return found
