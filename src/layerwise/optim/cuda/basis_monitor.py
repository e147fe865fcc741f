"""How many sweeps a basis takes: the device reports the coupling before each sweep, and the host judges it.

The smaller a coupling, the less of it a sweep leaves: a tenth of 0.04, a third of 0.2. So the coupling *before* a sweep
says whether it was the last one needed, and those of one turn tell how many sweeps would have done. A basis takes the
most that was needed in its last turns; one that no sweep brings nearer (rounding, nearly equal eigenvalues) takes one.

A basis that cannot be followed, because something overflows, stays as it was and is decomposed anew at its next turn.
Where that does not help either it is tried again, after pauses that double: eigh is dear, and the device waits for it.
"""

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.optim.cuda.monitor import LAG, SLOW_TURNS, Monitor
from layerwise.optim.rule import Health

MORE_SWEEPS = 3
"""At most, and at first, when a basis turns fast. Two do for first couplings up to three times the limit."""
TURNS = 2
"""A basis takes the most sweeps that were needed in so many turns."""
COUPLED = 0.0225
"""Over the power: up to this coupling before the last sweep, directions ``P⁻ᵖ G Q⁻ᵖ`` err by 1e-2 at most.

A rotation by an angle between eigenvalues a and b changes a root by that angle times ``a⁻ᵖ − b⁻ᵖ``, about p times
``log(b/a)``: the smaller the power, the less it counts. Measured against eigh in float64, a basis followed by single
sweeps, both factors coupled alike: at a power of ¼ an error of 1e-2 comes at couplings from 0.1 (random drifts) to
0.13 (factors of trainings), at ½ from 0.05 (Shampoo's factors) to 0.07; a little earlier where a first sweep has left
the coupling, and not a drift. Beyond the limit the turn counts as a refusal, and the next takes more sweeps.
"""
CLOSELY_COUPLED = 0.03
"""The same of EKFAC where scalings are the factors' own eigenvalues; it damps their product, not each of them."""
LOOSELY_COUPLED = 0.5
"""The same where second moments are measured in whatever basis there is: about what a step of orthogonal iteration,
SOAP's own, leaves of a factor that changes fast."""
FAR = 3
"""From so many limits one sweep does not come below the limit: on factors of trainings it divides couplings of 0.2 to
0.3 by three, smaller ones by more, and larger ones by two."""
STUCK = 0.85
"""A sweep that leaves more than this part of a coupling gains nothing; one that follows a drift leaves two thirds of
the largest couplings, and half or less of those below `LOOSELY_COUPLED`."""
NOT_TAKEN = -1.0
FIRST_PAUSE, LONGEST_PAUSE = LAG, 64
"""Turns that fail again before a basis is decomposed once more. At first those whose reports are on their way while it
is, in the end so many that a factor which cannot be decomposed hardly costs anything."""
COUNTS = ("idle", "pauses", "patience")
"""What a watch counts for each group."""


def coupled(power: float) -> float:
    """The limit of the coupling before the last sweep, for directions with a factor's power −p.

    >>> coupled(0.25), coupled(0.5)
    (0.09, 0.045)
    """
    return min(LOOSELY_COUPLED, COUPLED / power)


def needed(couplings: Sequence[float], limit: float) -> int:
    """Sweeps that would have sufficed; where those that were taken did not, how many probably will.

    >>> [needed(c, 0.1) for c in ([0.09, 0.02, 0.01], [0.2, 0.06], [0.2], [0.4], [0.4, 0.2])]
    [1, 2, 2, 3, 3]
    """
    for count, coupling in enumerate(couplings, start=1):
        if coupling < limit:
            return count
    return min(MORE_SWEEPS, len(couplings) + (1 if couplings[-1] < FAR * limit else 2))


def stuck(couplings: Sequence[float], limit: float) -> bool:
    """Whether sweeps do not suffice, and one more gained nothing: then one is as good as many.

    >>> stuck([0.11, 0.06, 0.055], 0.05), stuck([0.11, 0.06], 0.05), stuck([0.11, 0.06, 0.055], 0.1)
    (True, False, False)
    """
    if len(couplings) < 2:
        return False
    return limit <= couplings[-1] < LOOSELY_COUPLED and couplings[-1] > STUCK * couplings[-2]


@dataclass
class BasisMonitor(Monitor):
    """Over bases: begun exactly, then followed by as many sweeps as they lately needed."""

    limit: float = CLOSELY_COUPLED
    """Of the coupling before the last sweep."""
    lately: list[deque[int]] = field(default_factory=list)
    """Sweeps that each group needed, in its last turns."""
    idle: list[int] = field(default_factory=list)
    """For how many turns more a group takes one sweep, whatever it leaves: more were of no use."""
    pauses: list[int] = field(default_factory=list)
    """For how many turns more a group is not decomposed anew, whether it can be followed or not."""
    patience: list[int] = field(default_factory=list)
    """How long the next such pause will be."""
    most: ClassVar[int] = MORE_SWEEPS

    @classmethod
    def over(cls, groups: int, device: torch.device, limit: float, begun: Sequence[bool] = ()) -> "BasisMonitor":
        """Of factors that have never been decomposed, but for those that were `begun` in an earlier run.

        Unless it is known how many sweeps these needed (`recall`), at first they take all.
        """
        begun = list(begun) or [False] * groups
        said = torch.full((groups, MORE_SWEEPS), NOT_TAKEN, device=device, dtype=torch.float32)
        lately = [deque([MORE_SWEEPS if known else 1], maxlen=TURNS) for known in begun]
        exact = [not known for known in begun]
        return cls(exact, said, limit, lately, [0] * groups, [0] * groups, [FIRST_PAUSE] * groups)

    def numbers(self) -> list[list[int]]:
        """All that is known of each group, with reports that are still on their way: see `recall`."""
        heard = replace(self, **{name: copy.deepcopy(getattr(self, name)) for name in ("exact", "lately", *COUNTS)})
        heard._sent.extend(self._sent)
        if heard._sent:
            heard.poll(heard._sent[-1].step + LAG, Health())
        return [
            [
                int(heard.exact[place]),
                *(getattr(heard, name)[place] for name in COUNTS),
                *([0] * TURNS + [*of])[-TURNS:],
            ]
            for place, of in enumerate(heard.lately)
        ]

    def recall(self, numbers: Sequence[Sequence[int]]) -> None:
        """Go on with what an earlier run knew, of groups that were begun in it."""
        for place, (exact, *rest) in enumerate(numbers):
            if not self.exact[place] and len(rest) == len(COUNTS) + TURNS:
                self.exact[place] = bool(exact)
                self.lately[place] = deque([n for n in rest[len(COUNTS) :] if n] or [1], maxlen=TURNS)
                for name, number in zip(COUNTS, rest, strict=False):
                    getattr(self, name)[place] = number

    def write(self, groups: slice, couplings: Float[Tensor, "sweeps K"]) -> None:
        """On the device: the couplings before each sweep, infinite where a basis could not be followed."""
        taken = len(couplings)
        self.verdict[groups, :taken] = couplings.mT.to(self.verdict.dtype)
        self.verdict[groups, taken:] = NOT_TAKEN

    def write_begun(self, groups: slice, good: Bool[Tensor, "K"]) -> None:
        """On the device: that no sweep was taken, and which groups have no basis of this turn."""
        self.write(groups, torch.where(good, NOT_TAKEN, torch.inf)[None])

    def update(self, place: int, said: Sequence[float], health: Health) -> None:
        """Couplings."""
        couplings = [coupling for coupling in said if coupling >= 0]
        if not couplings:  # of an exact decomposition
            return
        if couplings[-1] == torch.inf:
            health.fallbacks += 1
            self._begin_anew(place, health)
            return
        self.pauses[place], self.patience[place] = 0, FIRST_PAUSE
        health.refusals += couplings[-1] >= self.limit
        self.lately[place].append(needed(couplings, self.limit))
        self.idle[place] = SLOW_TURNS if stuck(couplings, self.limit) else max(0, self.idle[place] - 1)

    def _begin_anew(self, place: int, health: Health) -> None:
        """At the next turn, unless that was tried lately."""
        if self.pauses[place]:
            self.pauses[place] -= 1
            return
        health.restarts += not self.exact[place]
        self.exact[place] = True
        self.pauses[place] = self.patience[place]
        self.patience[place] = min(LONGEST_PAUSE, 2 * self.patience[place])

    def rounds(self, groups: slice) -> int:
        """The most that one of the groups needs."""
        return max(
            1 if idle else max(lately) for lately, idle in zip(self.lately[groups], self.idle[groups], strict=True)
        )
