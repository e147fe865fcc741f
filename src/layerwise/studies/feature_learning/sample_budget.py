"""What counts as a representation found, with how many samples at most, and at which rates members look for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerwise.foundations.errors import InputError, describe
from layerwise.studies.feature_learning.members import MEMBERS

if TYPE_CHECKING:  # the table is read by commands that compute nothing
    from jaxtyping import Float
    from torch import Tensor

FIRST: dict[str, float] = dict.fromkeys(MEMBERS, -2.0)
FIRST |= {"sgd": -1.5, "sign": -3.0, "ngd": -2.5, "locoprop": 0.0}
"""Decimal logarithms of each member's least rate; the largest is two decades above. To need few samples asks for larger
rates than to end near, so they are not those of the table of members."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What is to be found, and what counts as found."""

    condition: float | int = 1.0
    """κ = λ_max / λ_min of the inputs' covariance, whose mean eigenvalue is one."""
    dx: int = 24
    dy: int = 6
    k: int = 3
    batch: int = 128
    noise: float | int = 0.1
    """Standard deviation of ε."""
    distance: float | int = 0.3
    """δ: the representation is found at subspace distance ≤ δ …"""
    stay: int = 10
    """… after so many steps in a row; the first of them counts."""
    steps: int = 400
    """The budget: a run that has not found it then counts as one that never does."""

    def __post_init__(self) -> None:
        if not (1 <= self.k < self.dx and self.k <= self.dy):
            given = f"k={self.k}, dx={self.dx}, dy={self.dy}"
            raise InputError(describe(given, "1 ≤ k ≤ dy and k < dx (else nothing is to be found)", "choose a k"))
        if not (self.condition >= 1 and math.isfinite(self.condition)):
            raise InputError(describe(f"condition={self.condition}", "λ_max/λ_min ≥ 1", "pass e.g. condition=100"))
        if not 0 < self.distance < 1 or min(self.stay, self.steps, self.batch) < 1:
            given = f"distance={self.distance}, stay={self.stay}, batch={self.batch}, steps={self.steps}"
            raise InputError(describe(given, "0 < distance < 1 and numbers ≥ 1", "see the defaults of Recovery"))

    @property
    def eigenvalues(self) -> Float[Tensor, "dx"]:
        """Of Σ: log-spaced, largest over smallest the condition number, mean one."""
        import torch

        values = float(self.condition) ** torch.linspace(0, 1, self.dx, dtype=torch.float64)
        return values / values.mean()

    @property
    def beyond(self) -> int:
        """A bound from below for what a run needs that never counts as found: the last start of a row in the budget.

        >>> Recovery(steps=100, stay=10, batch=128).beyond == 91 * 128
        True
        """
        return max(0, self.steps + 1 - self.stay) * self.batch
