"""What the host hears of refinements on the device, without waiting for it: which matrices must be solved exactly, and
in how many rounds the others are refined."""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from layerwise.optim.rule import Health

MOST_ROUNDS = 3
"""Of an inverse: one step of Newton's; a longer series; or directions that grew taken in first. See `inverse`."""
SOLVED, REFUSED, FAILED, WANTING = 0, -1, -2, 8
"""What a device says of an inverse: solved exactly; not converging; not to be solved at all; or, a number from 1, how
many rounds would have done, or will, with `WANTING` added where those that were taken left something to be desired.
Of a basis it tells the couplings themselves: see `basis_monitor`."""
SLOW_TURNS = 8
"""For how many turns a basis takes one sweep after more were of no use."""
TURNS = 3
"""An inverse takes the most rounds that were needed in so many turns."""
YOUNG_STEPS = 16
"""Until then a new batch weighs more than its steady share, and a basis turns fast: refinements take all rounds."""
LAG = 2
"""Steps after which the host may read what a device reported, without waiting: it is never so far ahead."""


@dataclass
class Report:
    """What a device has said at some step, on its way to the host."""

    step: int
    groups: slice
    verdict: Tensor
    arrived: "torch.cuda.Event | None"

    @classmethod
    def of(cls, step: int, groups: slice, verdict: Tensor) -> "Report":
        """Send it, without waiting for it."""
        if verdict.device.type != "cuda":
            return cls(step, groups, verdict.clone(), None)
        here = torch.empty(verdict.shape, dtype=verdict.dtype, pin_memory=True)
        here.copy_(verdict, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(step, groups, here, arrived)

    def read(self) -> list[Any]:
        """By now it is here."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.verdict.tolist()


@dataclass
class Monitor(ABC):
    """Which groups of one matrix must be solved exactly, and how many rounds the others take, by what a device says."""

    exact: list[bool]
    verdict: Tensor
    """``[K, ...]``, on the device; a refresh writes it."""
    _sent: deque[Report] = field(default_factory=deque, init=False)
    _ages: dict[int, int] = field(default_factory=dict, init=False)
    """Of the statistics that each turn last saw, by its first group."""
    most: ClassVar[int]
    """Rounds that a refinement takes where nothing is known of it."""

    def send(self, step: int, groups: slice) -> None:
        """Tell the host, in two steps' time."""
        self._sent.append(Report.of(step, groups, self.verdict[groups]))

    def poll(self, step: int, health: Health) -> None:
        """Take in the reports that are old enough."""
        while self._sent and self._sent[0].step <= step - LAG:
            report = self._sent.popleft()
            for place, said in zip(range(report.groups.start, report.groups.stop), report.read(), strict=True):
                self.update(place, said, health)

    def take_exact(self, step: int, groups: slice, health: Health) -> bool:
        """Whether these groups are to be solved exactly; they then have been."""
        self.poll(step, health)
        wanted = any(self.exact[groups])
        self.exact[groups] = [False] * (groups.stop - groups.start)
        return wanted

    def is_news(self, groups: slice, age: int) -> bool:
        """Whether statistics have changed since the last turn of these groups, which this one is."""
        before, self._ages[groups.start] = self._ages.get(groups.start), age
        return age != before

    @abstractmethod
    def update(self, place: int, said: Any, health: Health) -> None:
        """Learn from what was said of one group."""

    @abstractmethod
    def rounds(self, groups: slice) -> int:
        """That the next refinement of these groups takes."""


@dataclass
class InverseMonitor(Monitor):
    """Over inverses: those that did not converge are solved exactly; others take the most rounds lately needed."""

    lately: list[deque[int]] = field(default_factory=list)
    """Rounds that each group needed, in its last turns."""
    most: ClassVar[int] = MOST_ROUNDS

    @classmethod
    def over(cls, groups: int, device: torch.device, slow: int = 0) -> "InverseMonitor":
        """Of a factor that has never been solved; `slow`: for how many turns it takes all rounds in any case."""
        lately = [deque([MOST_ROUNDS] * slow + [1] * (TURNS - slow), TURNS) for _ in range(groups)]
        return cls([True] * groups, torch.zeros(groups, dtype=torch.int8, device=device), lately)

    def update(self, place: int, said: int, health: Health) -> None:
        """A verdict."""
        self.exact[place] = self.exact[place] or said == REFUSED
        health.refusals += said == REFUSED or said > WANTING
        health.fallbacks += said == FAILED
        if said == REFUSED or said > 0:
            self.lately[place].append(MOST_ROUNDS if said == REFUSED else said % WANTING)

    def rounds(self, groups: slice) -> int:
        """The most that one of the groups needed."""
        return max(max(lately) for lately in self.lately[groups])
