"""At which steps of a training something is looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from layerwise.foundations.errors import InputError, describe


@runtime_checkable
class Schedule(Protocol):
    """Anything that says at which steps."""

    def due(self, step: int) -> bool:
        """Whether to take a snapshot at this step."""
        ...


@dataclass(frozen=True)
class Snapshots:
    """Step 0 and the steps ``first · ⌊ratioᵏ⌋``: the grid of George (2023).

    >>> [step for step in range(60) if Snapshots().due(step)]
    [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50]
    """

    first: int = 5
    ratio: float | int = 1.15

    def __post_init__(self) -> None:
        if self.first < 1 or not 1 < self.ratio < math.inf:
            given = f"Snapshots(first={self.first}, ratio={self.ratio})"
            raise InputError(describe(given, "a first step ≥ 1 and a ratio > 1", "take e.g. Snapshots(5, 1.15)"))

    def due(self, step: int) -> bool:
        """Whether the step is one of them."""
        times, rest = divmod(step, self.first)
        if rest or times < 1:
            return step == 0
        near = round(math.log(times) / math.log(self.ratio))
        last = math.ceil(math.log(times + 1) / math.log(self.ratio))
        return any(math.floor(self.ratio**k) == times for k in range(max(near - 1, 0), last + 1))


@dataclass(frozen=True)
class Every:
    """Every k-th step, from 0 on."""

    k: int

    def due(self, step: int) -> bool:
        """Whether k divides the step."""
        return step % self.k == 0


def read_schedule(every: int | Schedule | None) -> Schedule:
    """Every so many steps, a schedule as it is, or the default."""
    if every is None:
        return Snapshots()
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return Every(every)
    if isinstance(every, Schedule):
        return every
    raise InputError(describe(f"every={every!r}", "a number ≥ 1, or a schedule with due(step)", "take e.g. every=100"))
