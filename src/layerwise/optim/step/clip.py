"""`Clip`: how large a step may be, by its predicted change of the loss or by its norm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.step.stack import Stack


@dataclass(frozen=True)
class Clip:
    """By the step's predicted change of the loss, ``η²⟨D, ∇L⟩`` ("kl"), or by its norm."""

    kind: str | None = None
    bound: float = 0.0

    @classmethod
    def read(cls, given: Any) -> "Clip":
        """None, a number, or a pair."""
        if given is None:
            return cls()
        kind, bound = given if isinstance(given, tuple) and len(given) == 2 else ("kl", given)
        if kind not in ("kl", "norm") or not isinstance(bound, int | float) or not bound > 0:
            raise InputError(
                describe(
                    f"clip={given!r}",
                    'None, a number > 0 (bound on η²⟨D, ∇L⟩), ("kl", number) or ("norm", number)',
                    "pass e.g. clip=1e-3",
                )
            )
        return cls(kind, float(bound))

    def describe(self) -> str | None:
        """For `print(opt)`."""
        return None if self.kind is None else f"{self.kind} {self.bound:g}"

    def factor(
        self,
        stacks: Sequence[Stack],
        directions: Sequence[Tensor],
        grads: Sequence[Tensor],
        lrs: Sequence[float],
        total: Callable[[float], float] = float,
    ) -> float:
        """What all directions are multiplied by, at most 1; `total` adds up what several ranks have."""
        change, bound = 0.0, self.bound
        if self.kind is None:
            return 1.0
        if self.kind == "norm":
            pairs = zip(stacks, directions, strict=True)
            change, bound = sum(stack.share * float((D * D).sum()) for stack, D in pairs), bound**2
        else:
            for stack, D, grad, lr in zip(stacks, directions, grads, lrs, strict=True):
                if stack.requires.matrices_only:
                    change += stack.share * lr**2 * float((D * grad).sum())
        change = total(change)
        return min(1.0, (bound / change) ** 0.5) if change > 0 else 1.0
