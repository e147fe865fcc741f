"""Damping: a number, a schedule, or adapted to how well the quadratic model predicts the loss."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from layerwise.foundations.errors import InputError, LayerwiseError, describe, not_one_of
from layerwise.optim.step.stack import Stack

ADAPT_EVERY = 5
"""Steps between adaptations; each multiplies the damping by at most ``ω^±ADAPT_EVERY``."""
OMEGA = 19 / 20


class Damping:
    """What is added to factors; see `Layerwise`."""

    def __init__(self, given: float | str | Callable[[int], float], scale: str) -> None:
        if scale not in ("relative", "absolute"):
            raise InputError(not_one_of("damping_scale", scale, ("relative", "absolute")))
        self.relative = scale == "relative"
        self.adaptive = given == "adaptive"
        self.schedule = given if callable(given) else None
        if isinstance(given, str) and not self.adaptive:
            raise InputError(
                describe(
                    f"damping={given!r}", 'a number, a function of the step, or "adaptive"', "pass e.g. damping=1e-3"
                )
            )
        start = 1e-1 if self.adaptive else given(1) if callable(given) else given
        if isinstance(start, str) or not (start >= 0 and math.isfinite(start)):
            raise InputError(describe(f"damping={start}", "a finite number ≥ 0", "pass e.g. damping=1e-3"))
        self.initial = self.value = float(start)
        self._before: float | None = None
        self._predicted: float | None = None
        self._reports = 0
        self._step = self._told = 0

    def at(self, group: Mapping[str, Any], step: int) -> float:
        """The damping of a parameter group at a step; under a schedule a group keeps its proportion to the others."""
        own = float(group["damping"])
        if self.schedule is None:
            return own
        now = float(self.schedule(step))
        return now if own == self.initial else now * own / self.initial if self.initial else own

    def state(self) -> dict[str, Any]:
        """What must survive a restart."""
        counts = {"reports": self._reports, "step": self._step, "told": self._told}
        return {"value": self.value, "before": self._before, "predicted": self._predicted, **counts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self.value = float(state["value"])
        self._before, self._predicted, self._reports = state["before"], state["predicted"], int(state["reports"])
        self._step, self._told = int(state.get("step", 0)), int(state.get("told", 0))

    # --- Levenberg–Marquardt -----------------------------------------------------------------------------

    def before(self, loss: float | None) -> None:
        """The loss that the step starts from, where known."""
        if loss is not None:
            self._before = loss

    def wants_result(self, step: int) -> bool:
        """Whether the loss after this step is needed."""
        return self.adaptive and (step % ADAPT_EVERY == 0 or self._reports == 0)

    def predict(
        self,
        stacks: list[Stack],
        directions: list[Tensor],
        grads: list[Tensor],
        lrs: list[float],
        total: Callable[[float], float] = float,
    ) -> None:
        """What the quadratic model expects of the step: ``−η⟨∇L, D⟩ + ½ η² ⟨D, F D⟩``; `total` adds up over ranks."""
        if not self.adaptive:
            return
        change = 0.0
        for stack, D, grad, eta in zip(stacks, directions, grads, lrs, strict=True):
            curvature = stack.rule.quadratic(stack.state, D)
            change -= stack.share * eta * float((grad * D).sum())
            change += stack.share * 0.5 * eta**2 * (0.0 if curvature is None else float(curvature))
        self._predicted = total(change)

    def after(
        self, loss: float, before: float | None = None, mean: Callable[[list[float]], list[float]] = list
    ) -> float:
        """Compare the loss after the step with what was predicted; returns what the damping is multiplied by.

        A step that is told of every time counts for one (ω), one that is told of now and then for those between. Ranks
        have losses of their own batches: the decision is by their `mean`, or parameters would drift apart.
        """
        start = self._before if before is None else before
        loss, *known = mean([loss] if start is None else [loss, start])
        start = known[0] if known else None
        steps = min(max(self._step - self._told, 1), ADAPT_EVERY)
        self._reports, self._told, self._before = self._reports + 1, self._step, loss
        if not self.adaptive or start is None or self._predicted is None or self._predicted >= 0:
            return 1.0
        reduction, old = (loss - start) / self._predicted, self.value
        if not math.isfinite(reduction) or reduction < 0.25:
            self.value *= OMEGA**-steps
        elif reduction > 0.75:
            self.value *= OMEGA**steps
        self.value = min(max(self.value, 1e-8), 1e8)
        self._predicted = None  # a step is judged once
        return self.value / old

    def check(self, step: int) -> None:
        """Adaptive damping that is told nothing would silently stay as it is."""
        self._step = step
        if self.adaptive and step > 1 and self._reports == 0:
            raise LayerwiseError(
                describe(
                    'damping="adaptive" and a second step without a loss',
                    "opt.step(closure), or opt.step_result(loss_after, before=loss_before) after each step",
                    "tell it the loss, or give a number as damping",
                )
            )
