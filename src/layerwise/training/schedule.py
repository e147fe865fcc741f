"""Schedules: at which steps something is measured. Step 0 is before the first update; the loop adds the last step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from layerwise.foundations.errors import InputError, describe


@runtime_checkable
class Schedule(Protocol):
    """Anything that says when."""

    def due(self, step: int) -> bool:
        """Whether to measure at this step."""
        ...


@dataclass(frozen=True)
class Every:
    """Every k-th step, from 0 on.

    >>> [step for step in range(10) if Every(4).due(step)]
    [0, 4, 8]
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(describe(f"Every({self.k})", "a number ≥ 1", "pass e.g. Every(10)"))

    def due(self, step: int) -> bool:
        """Whether k divides the step."""
        return step % self.k == 0


@dataclass(frozen=True)
class Logarithmic:
    """Evenly on a logarithmic axis, `per_decade` points a decade; 0 too.

    >>> [step for step in range(101) if Logarithmic(3).due(step)]
    [0, 1, 2, 5, 10, 22, 46, 100]
    """

    per_decade: int = 10

    def __post_init__(self) -> None:
        if self.per_decade < 1:
            raise InputError(describe(f"Logarithmic({self.per_decade})", "a number ≥ 1", "pass e.g. Logarithmic(10)"))

    def due(self, step: int) -> bool:
        """Whether the step is ``round(10^(j / per_decade))`` for some j ≥ 0."""
        if step <= 1:
            return True
        j = round(self.per_decade * math.log10(step))
        return any(round(10 ** (i / self.per_decade)) == step for i in (j - 1, j, j + 1))


class At:
    """Exactly at these steps.

    >>> At([0, 7]).due(7)
    True
    """

    def __init__(self, steps: Iterable[int]) -> None:
        self.steps = frozenset(steps)

    def due(self, step: int) -> bool:
        """Whether the step is one of them."""
        return step in self.steps
