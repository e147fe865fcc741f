"""How inverses, roots and eigenbases of factors are found, and what the host hears of it.

| `solver` | inverse (power 1) | other powers, EKFAC's and SOAP's bases |
|---|---|---|
| "eigh" | through the eigenbasis | `torch.linalg.eigh` |
| "cholesky" | by Cholesky | an error |
| "newton" | the last inverse, refined by products | the last basis, refined by products |
| "auto" | "newton" in float32 on a GPU, else "cholesky" | "newton" in float32 on a GPU, else "eigh" (SOAP: QR) |

"newton" begins with an exact solution. A refined inverse is tested on the device. One that does not converge is left as
it was, and solved exactly at its next turn: by then the host has heard of it, without waiting.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.rule import Health

SOLVERS = ("auto", "eigh", "cholesky", "newton")
MOST_ROUNDS = 3
"""Of an inverse: one step of Newton's; a longer series; or directions that grew taken in first. See `refined`."""
SOLVED, REFUSED, FAILED, WANTING = 0, -1, -2, 8
"""What a device says of an inverse: solved exactly; not converging; not to be solved at all; or, a number from 1, how
many rounds would have done, or will, with `WANTING` added where those that were taken left something to be desired.
Of a basis it tells the couplings themselves: see `sweeps`."""
SLOW_TURNS = 8
"""For how many turns a basis takes one sweep after more were of no use."""
TURNS = 3
"""An inverse takes the most rounds that were needed in so many turns."""
LAG = 2
"""Steps after which the host may read what a device reported, without waiting: it is never so far ahead."""


def method(solver: str, power: float, dtype: torch.dtype, device: torch.device) -> str:
    """ "eigh", "cholesky" or "newton" for one factor.

    >>> cpu, gpu = torch.device("cpu"), torch.device("cuda")
    >>> method("auto", 1.0, torch.float32, cpu), method("auto", 0.25, torch.float32, gpu)
    ('cholesky', 'newton')
    """
    if solver == "cholesky" and power != 1:
        raise InputError(
            describe(
                f'solver="cholesky" for a power of {power:g} or an eigenbasis',
                'solver="auto", "eigh" or "newton"; Cholesky gives inverses alone',
                "choose one of them",
            )
        )
    if solver != "auto":
        return solver
    if device.type == "cuda" and dtype == torch.float32:
        return "newton"
    return "cholesky" if power == 1 else "eigh"


class Plan(NamedTuple):
    """How some groups are refreshed: what the host decides before the device begins."""

    exact: frozenset[str]
    """Matrices that are solved exactly."""
    more: frozenset[str]
    """Matrices whose refinement takes more rounds: statistics have only begun, or the last one did not suffice."""
    only: str | None = None
    """The one matrix that is refreshed; None: all of them."""
    most: frozenset[str] = frozenset()
    """Those of `more` that take as many rounds as there are: where two did not suffice either."""

    def rounds(self, name: str) -> int:
        """How many rounds a matrix takes.

        >>> plan = Plan(frozenset(), frozenset({"U_P", "U_Q"}), most=frozenset({"U_Q"}))
        >>> [plan.rounds(name) for name in ("U_P", "U_Q", "Q_root")]
        [2, 3, 1]
        """
        return 1 + (name in self.more) + (name in self.most)

    def parts(self, names: Sequence[str]) -> "list[Plan]":
        """A plan for each matrix, which can be carried out (and recorded) apart from the others."""
        return [Plan(self.exact & {name}, self.more & {name}, name, self.most & {name}) for name in names]


@dataclass
class Report:
    """What a device has said at some step, on its way to the host."""

    step: int
    groups: slice
    verdict: Tensor
    arrived: "torch.cuda.Event | None"

    @classmethod
    def of(cls, step: int, groups: slice, verdict: Tensor) -> "Report":
        """Send it; nobody waits."""
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
class Watch(ABC):
    """Which groups of one matrix must be solved exactly, and how many rounds the others take, by what a device says."""

    exact: list[bool]
    verdict: Tensor
    """``[K, ...]``, on the device; a refresh writes it."""
    _posted: deque[Report] = field(default_factory=deque, init=False)
    _ages: dict[int, int] = field(default_factory=dict, init=False)
    """Of the statistics that each turn last saw, by its first group."""
    most: ClassVar[int]
    """Rounds that a refinement takes where nothing is known of it."""

    def post(self, step: int, groups: slice) -> None:
        """Tell the host, in two steps' time."""
        self._posted.append(Report.of(step, groups, self.verdict[groups]))

    def hear(self, step: int, health: Health) -> None:
        """Take in the reports that are old enough."""
        while self._posted and self._posted[0].step <= step - LAG:
            report = self._posted.popleft()
            for place, said in zip(range(report.groups.start, report.groups.stop), report.read(), strict=True):
                self.heed(place, said, health)

    def take_exact(self, step: int, groups: slice, health: Health) -> bool:
        """Whether these groups are to be solved exactly; they then have been."""
        self.hear(step, health)
        wanted = any(self.exact[groups])
        self.exact[groups] = [False] * (groups.stop - groups.start)
        return wanted

    def is_news(self, groups: slice, age: int) -> bool:
        """Whether statistics have changed since the last turn of these groups, which this one is."""
        before, self._ages[groups.start] = self._ages.get(groups.start), age
        return age != before

    @abstractmethod
    def heed(self, place: int, said: Any, health: Health) -> None:
        """Learn from what was said of one group."""

    @abstractmethod
    def rounds(self, groups: slice) -> int:
        """That the next refinement of these groups takes."""


@dataclass
class InverseWatch(Watch):
    """Over inverses: those that did not converge are solved exactly; others take the most rounds lately needed."""

    lately: list[deque[int]] = field(default_factory=list)
    """Rounds that each group needed, in its last turns."""
    most: ClassVar[int] = MOST_ROUNDS

    @classmethod
    def over(cls, groups: int, device: torch.device, slow: int = 0) -> "InverseWatch":
        """Of a factor that has never been solved; `slow`: for how many turns it takes all rounds in any case."""
        lately = [deque([MOST_ROUNDS] * slow + [1] * (TURNS - slow), TURNS) for _ in range(groups)]
        return cls([True] * groups, torch.zeros(groups, dtype=torch.int8, device=device), lately)

    def heed(self, place: int, said: int, health: Health) -> None:
        """A verdict."""
        self.exact[place] = self.exact[place] or said == REFUSED
        health.refusals += said == REFUSED or said > WANTING
        health.fallbacks += said == FAILED
        if said == REFUSED or said > 0:
            self.lately[place].append(MOST_ROUNDS if said == REFUSED else said % WANTING)

    def rounds(self, groups: slice) -> int:
        """The most that one of the groups needed."""
        return max(max(lately) for lately in self.lately[groups])
