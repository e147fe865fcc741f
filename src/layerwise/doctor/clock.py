"""The time that an examination may take, divided between its parts."""

import time
from dataclasses import dataclass, field

from layerwise.foundations.errors import InputError, describe


@dataclass
class Clock:
    """Seconds that are left of a budget, and what they were spent on.

    >>> clock = Clock(10.0)
    >>> clock.has(0.5), clock.has(0.0)
    (True, False)
    """

    seconds: float
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the examination."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise InputError(describe(f"seconds={self.seconds}", "a positive number", "pass e.g. seconds=60"))
        self._start = self._last = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._start

    def left(self) -> float:
        """Seconds until the budget is spent; negative beyond."""
        return self.seconds - self.elapsed()

    def has(self, share: float) -> bool:
        """Whether less than this share of the budget is spent."""
        return self.elapsed() < share * self.seconds

    def book(self, part: str) -> None:
        """Write the time since the last entry down to a part."""
        now = time.perf_counter()
        self.spent[part] = self.spent.get(part, 0.0) + now - self._last
        self._last = now
