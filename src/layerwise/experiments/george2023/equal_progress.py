"""What experiments share that compare trainings at equal progress: names of values, differences, curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from layerwise.experiments.experiment import Record
from layerwise.experiments.figures import Panel
from layerwise.experiments.over_seeds import band, combined
from layerwise.foundations.errors import InputError, describe

if TYPE_CHECKING:
    from layerwise.studies.training_regimes.task import Finished

CELL = "all"
"""All seeds and regimes are one tensor program."""
Quantity = Callable[[Sequence[Mapping]], dict[int, float | int]]


def at(metric: str, threshold: float, run: str) -> str:
    """The name of a value.

    >>> at("noisy", 0.5, "α=100")
    'noisy@0.5/α=100'
    """
    return f"{metric}@{threshold:g}/{run}"


def values(
    finished: Mapping[str, Finished], progress: str, thresholds: Sequence[float], metrics: Sequence[str]
) -> dict[str, float]:
    """Metrics of one seed's runs at thresholds, and the step at which they came there; only what was reached."""
    from layerwise.studies.training_regimes.regimes import reached

    found = {}
    for name, run in finished.items():
        columns = reached(run.log, progress, thresholds, ["step", *metrics])
        for metric, column in columns.items():
            for threshold, value in zip(thresholds, column, strict=True):
                if not math.isnan(value):
                    found[at(metric, threshold, name)] = value
    return found


def series(
    finished: Mapping[str, Finished], progress: str, along: Sequence[float], metrics: Sequence[str]
) -> dict[str, list[float]]:
    """Metrics of one seed's runs over the progress; NaN where a run did not come."""
    from layerwise.studies.training_regimes.regimes import reached

    found = {progress: list(along)}
    for name, run in finished.items():
        found |= {f"{metric}/{name}": column for metric, column in reached(run.log, progress, along, metrics).items()}
    return found


def difference(metric: str, threshold: float, first: str, second: str) -> Quantity:
    """A claim's quantity: one run's metric minus another's, at a threshold that both reached."""
    return combined(CELL, [at(metric, threshold, first), at(metric, threshold, second)], lambda a, b: a - b)


def over(metric: str, threshold: float, first: str, second: str) -> Quantity:
    """A claim's quantity: one run's metric over another's, at a threshold that both reached."""
    return combined(CELL, [at(metric, threshold, first), at(metric, threshold, second)], lambda a, b: a / b)


def panel(
    records: Sequence[Record], progress: str, metric: str, labels: Mapping[str, str], x_label: str, y_label: str
) -> Panel:
    """A metric of all runs over the progress."""
    curves = [band(records, CELL, progress, f"{metric}/{run}", label) for run, label in labels.items()]
    return Panel(title=y_label, x_label=x_label, y_label=y_label, curves=curves)


def check_thresholds(thresholds: Sequence[float]) -> None:
    """Losses that a run reaches one after the other."""
    if not thresholds or list(thresholds) != sorted(set(thresholds), reverse=True):
        raise InputError(describe(f"thresholds={tuple(thresholds)}", "falling losses", "pass e.g. (1.0, 0.7, 0.5)"))
