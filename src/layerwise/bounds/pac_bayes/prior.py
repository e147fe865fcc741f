"""The prior's variance on a grid, and what the theorem then asks of the relative entropy: B_RE of (C.270).

The prior is ``N(θ₀, λI)`` with λ = cap · exp(−j/b), j = 1, 2, …; a posterior may choose j after it has seen the data,
since the theorem is stated for all of them at once, the j-th with confidence 6δ/(π²j²). There is no j = 0: at λ = cap
the term 2 log j would be −∞. Four rows of Table C.8 stand there, and their bounds are too small.
"""

import math
from dataclasses import dataclass

import torch

from layerwise.foundations.errors import InputError, describe


@dataclass(frozen=True)
class PriorGrid:
    """λ_j = cap · exp(−j/b) for j ≥ 1.

    >>> grid = PriorGrid(cap=0.1, precision=100)
    >>> grid.index(-1.3313), grid.index(-1.1513), round(grid.half_log(36), 4)
    (36, 1, -1.3313)
    """

    cap: float | int = 0.1
    """c of the thesis: no λ of the grid reaches it."""
    precision: float | int = 100
    """b of the thesis: neighbours differ by a factor of e^(1/b)."""

    def __post_init__(self) -> None:
        for name, value in (("cap", self.cap), ("precision", self.precision)):
            if not (value > 0 and math.isfinite(value)):
                default = {"cap": 0.1, "precision": 100}[name]
                raise InputError(describe(f"{name}={value}", "a positive number", f"take e.g. {default}"))

    @property
    def most(self) -> float:
        """The largest ½ log λ, that of j = 1."""
        return self.half_log(1)

    def half_log(self, j: int) -> float:
        """½ log λ_j."""
        return 0.5 * (math.log(self.cap) - _checked(j) / self.precision)

    def variance(self, j: int) -> float:
        """λ_j."""
        return math.exp(2 * self.half_log(j))

    def index(self, half_log: float | int) -> int:
        """The j nearest to ½ log λ; 1 at or above the end of the grid."""
        return max(1, round(self.precision * (math.log(self.cap) - 2 * half_log)))

    def best(self, spread: float | int, entropies: float | int, parameters: int) -> int:
        """The j whose B_RE is least, for a posterior whose variances add up to `spread` − ‖w − θ₀‖².

        Never worse than the j that gradient descent on λ ends at, and as valid. KL is least at λ = spread/P, and the
        other term rises with j: nothing behind that can be better.

        Args:
            spread: ``Σs + ‖w − θ₀‖²``.
            entropies: ``Σ log s``, which does not change the choice.
            parameters: P.
        """
        behind = self.precision * (math.log(self.cap) - math.log(max(spread, 1e-300) / parameters)) + 1
        j = torch.arange(1, max(1, math.ceil(behind)) + 1, dtype=torch.float64)
        half_log = 0.5 * (math.log(self.cap) - j / self.precision)
        kl = 0.5 * (spread * torch.exp(-2 * half_log) - parameters + 2 * parameters * half_log - entropies)
        return 1 + int((kl + 2 * j.log()).argmin())


def _checked(j: int | float) -> int | float:
    if not (j >= 1 and float(j).is_integer()):
        raise InputError(describe(f"j={j}", "a whole j ≥ 1: the union over priors begins there", "use PriorGrid.index"))
    return j


def divergence(spread: float | int, entropies: float | int, parameters: int, half_log: float | int) -> float:
    """KL(N(w, S) ‖ N(θ₀, λI)) = ½((Σs + ‖w − θ₀‖²)/λ − P + P log λ − Σ log s)."""
    return 0.5 * (spread * math.exp(-2 * half_log) - parameters + 2 * parameters * half_log - entropies)


def relative_entropy_rate(kl: float | int, j: int, examples: int, delta: float | int = 0.025) -> float:
    """B_RE = (KL + 2 log j + log(π²N/6δ))/(N − 1), (C.270): what kl(ê(Q) ‖ e(Q)) exceeds with probability δ at most.

    >>> import layerwise as lw
    >>> grid = lw.bounds.PriorGrid()
    >>> rate = lw.bounds.relative_entropy_rate(4612.6, grid.index(-1.3313), 60_000)
    >>> round(lw.bounds.kl_inverse(0.03373, rate), 4)  # Table C.8: T-600, BASE
    0.154

    Args:
        kl: KL(Q ‖ P) of posterior and prior (the thesis prints their order the other way round).
        j: which prior of the grid.
        examples: N, those of the training data.
        delta: δ, in (0, 1).
    """
    check_confidence(delta=delta)
    if not kl >= 0:
        raise InputError(describe(f"KL={kl}", "a number ≥ 0", "pass KL(Q ‖ P), not its negative"))
    if examples < 2:
        raise InputError(describe(f"{examples} examples", "two or more", "give the training data"))
    return (kl + 2 * math.log(_checked(j)) + math.log(math.pi**2 * examples / (6 * delta))) / (examples - 1)


def check_confidence(**given: float | int) -> None:
    """Each in (0, 1)."""
    for name, value in given.items():
        if not 0 < value < 1:
            expected = "a probability between 0 and 1, neither included"
            raise InputError(describe(f"{name}={value}", expected, "take e.g. 0.025"))
