"""Unrolled steps and first step sizes of section 5.5; without torch, so that claims can be listed at once."""

from typing import NamedTuple


class Setting(NamedTuple):
    """A number of inner steps, and the step size that meta-training starts from."""

    steps: int
    eta: float

    def __str__(self) -> str:
        return f"t={self.steps}, η₀={self.eta:g}"


SETTINGS = tuple(Setting(t, 0.1) for t in (10, 20, 40, 80)) + tuple(Setting(40, eta) for eta in (0.001, 0.01, 1.0))
"""Those of Tables D.1 and D.2."""
