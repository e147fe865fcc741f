"""Steps: that of the given optimizer, and those that others would take."""

import math
from collections.abc import Iterator

from layerwise.doctor.findings import Finding, number
from layerwise.doctor.measurements import Measurements

TOO_HIGH = 0.5
"""Best rate over the one that is set, below which the quadratic model predicts an increase."""
TOO_LOW = 1e3
BETTER = 2.0
"""Predicted decrease of the best optimizer over that of SGD and Adam, from which it is said."""


def own_rate(measured: Measurements) -> Iterator[Finding]:
    """The rate of the given optimizer, and what it leaves out."""
    own = measured.own_step
    if own is None:
        return
    if own.missing:
        layers = [layer for layer in measured.layers if set(layer.parameters) & set(own.missing)]
        share = sum(layer.numel for layer in layers) / max(measured.parameters, 1)
        reach = sum(layer.reach for layer in layers)
        yield Finding(
            "not-in-optimizer",
            "severe",
            reach,
            f"{own.name} does not have {_list(own.missing)}: {number(100 * share, 2)} % of the parameters are never "
            "updated.",
            "They require gradients, and no parameter group has them. Their own steps predict a decrease of "
            f"{number(reach, 2)}.",
            "Give the optimizer `model.parameters()`, and make it after the model is complete.",
            tuple(layer.name for layer in layers),
        )
    if 0 <= own.best_multiple < TOO_HIGH and own.measured < 0:
        yield Finding(
            "rate-too-high",
            "severe",
            own.best - max(own.measured, own.predicted),
            f"The rate of {own.name}, {number(own.rate, 2)}, is {number(1 / max(own.best_multiple, 1e-12), 2)} times "
            "the best one for its next step.",
            f"That step makes the loss larger by {number(-own.measured, 2)} (quadratic model: "
            f"{number(-own.predicted, 2)}); at {number(own.rate * own.best_multiple, 1)} it would fall by "
            f"{number(own.best, 2)}.",
            f"Lower the rate to {number(own.rate * own.best_multiple, 1)} or less, or warm it up.",
            follows_from=("exploding-gradients", "exploding-activations"),
        )
    elif own.best_multiple > TOO_LOW and math.isfinite(own.best_multiple):
        yield Finding(
            "rate-too-low",
            "moderate",
            own.best - own.predicted,
            f"The rate of {own.name}, {number(own.rate, 2)}, is a {number(own.best_multiple, 1)}th of the best one for "
            "its next step.",
            f"That step lowers the loss by {number(own.predicted, 1)}; at {number(own.rate * own.best_multiple, 1)} it "
            f"would fall by {number(own.best, 2)}.",
            "Raise the rate; tenfold at a time is safe here.",
        )


def optimizer(measured: Measurements) -> Iterator[Finding]:
    """Whether another optimizer would make more of a step."""
    by_name = {step.name: step for step in measured.steps}
    plain = max((by_name[name].predicted for name in ("SGD", "Adam") if name in by_name), default=0.0)
    seen = max((by_name[name].measured or 0.0 for name in ("SGD", "Adam") if name in by_name), default=0.0)
    best = max(measured.steps, key=lambda step: step.predicted, default=None)
    if best is not None and (best.measured is None or best.measured <= seen):
        return  # a step that is larger than the quadratic model is good for recommends nothing
    if best is None or plain <= 0 or best.name in ("SGD", "Adam") or best.predicted < BETTER * plain:
        return
    yield Finding(
        "optimizer",
        "note",
        best.predicted - plain,
        f"A step of {best.name} is predicted to lower the loss {number(best.predicted / plain, 2)} times as much as "
        "one of SGD or Adam.",
        f"{number(best.predicted, 2)} against {number(plain, 2)}, each at its best rate; measured at that rate: "
        f"{_measured(best.measured)}.",
        f"Try `lw.optim.{best.name}`.",
    )


def _measured(value: float | None) -> str:
    return "not measured" if value is None else f"{number(value, 2)}"


def _list(names: object) -> str:
    shown = [f"`{name}`" for name in names]  # type: ignore[attr-defined]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


STEP_RULES = (own_rate, optimizer)
