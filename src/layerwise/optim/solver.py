"""How inverses, roots and eigenbases of factors are found, and what the host hears of it.

| `solver` | inverse (power 1) | other powers, EKFAC's and SOAP's bases |
|---|---|---|
| "eigh" | through the eigenbasis | `torch.linalg.eigh` |
| "cholesky" | by Cholesky | an error |
| "newton" | the last inverse, refined by products | the last basis, refined by products |
| "auto" | "newton" in float32 on a GPU, else "cholesky" | "newton" in float32 on a GPU, else "eigh" (SOAP: QR) |

"newton" begins with an exact solution. A refined inverse is tested on the device. One that is not good enough yet is
refined once more two steps later, when the host has heard of it; one that does not converge is left as it was, and then
solved exactly. So no step waits for the device.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerwise.foundations.errors import InputError, describe

SOLVERS = ("auto", "eigh", "cholesky", "newton")
FINE, REFINE, EXACT = 0, 1, 2
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


@dataclass
class Report:
    """What a device has accepted at some step, on its way to the host."""

    step: int
    groups: slice
    verdict: Tensor
    arrived: "torch.cuda.Event | None"

    @classmethod
    def of(cls, step: int, groups: slice, verdict: Tensor) -> "Report":
        """Send it; nobody waits."""
        if verdict.device.type != "cuda":
            return cls(step, groups, verdict, None)
        here = torch.empty(verdict.shape, dtype=verdict.dtype, pin_memory=True)
        here.copy_(verdict, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(step, groups, here, arrived)

    def read(self) -> list[int]:
        """By now it is here."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.verdict.tolist()


@dataclass
class Watch:
    """What each group of one factor needs before its turn: nothing, a further refinement, or an exact solution.

    New groups begin with `EXACT`.
    """

    needs: list[int]
    _posted: deque[Report] = field(default_factory=deque)

    @classmethod
    def of(cls, groups: int) -> "Watch":
        """Of a factor that has never been solved."""
        return cls([EXACT] * groups)

    def post(self, step: int, groups: slice, verdict: Tensor) -> None:
        """Tell the host, in two steps' time."""
        self._posted.append(Report.of(step, groups, verdict))

    def hear(self, step: int) -> None:
        """Take in the reports that are old enough."""
        while self._posted and self._posted[0].step <= step - LAG:
            report = self._posted.popleft()
            for place, need in zip(range(report.groups.start, report.groups.stop), report.read(), strict=True):
                self.needs[place] = max(self.needs[place], need)

    def take_exact(self, step: int, groups: slice) -> bool:
        """Whether these groups are to be solved exactly; they then have been."""
        self.hear(step)
        wanted = max(self.needs[groups]) == EXACT
        self.needs[groups] = [FINE] * (groups.stop - groups.start)
        return wanted
