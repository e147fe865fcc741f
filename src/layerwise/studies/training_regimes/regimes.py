"""Trainings that differ in α or in the learning rate alone, compared where they have come equally far."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.foundations.progress import Progress, Silent
from layerwise.regimes.equal_progress import at_equal_progress
from layerwise.regimes.linearity import kernel_alignment, representation_alignment
from layerwise.studies.training_regimes.alone import Alone
from layerwise.studies.training_regimes.task import Finished, Log, Run, Task
from layerwise.studies.training_regimes.together import Together

NETWORKS = ("mlp", "vgg11", "resnet18", "resnet34", "three-convolutions")


def never(run: Run, log: Log) -> bool:
    """A run that goes on until its last epoch."""
    return False


@dataclass(frozen=True, kw_only=True)
class Regimes:
    """A network and its training by SGD."""

    network: str = "mlp"
    """"mlp" (ReLU, drawn as `nn.Linear` does; all runs as one tensor program), or one of `convolutional.network`."""
    hidden: tuple[int, ...] = (256, 256)
    """Of "mlp"."""
    width: int = 64
    """Of the others."""
    momentum: float | int = 0.9
    batch: int = 125
    keep_initial: bool = True
    epochs: int = 1500
    """At most."""
    probe: int = 100
    """Training examples on which a network is compared with its start."""
    growth: float | int = 1.02
    """Factor between two steps that are logged."""

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise NameLookupError(unknown("network", self.network, NETWORKS))
        if not self.hidden or not self.growth > 1:
            given = f"hidden={self.hidden}, growth={self.growth}"
            raise InputError(describe(given, "a hidden layer, and a factor above 1", "pass e.g. (256, 256) and 1.02"))

    def run(
        self,
        task: Task,
        runs: Sequence[Run],
        done: Callable[[Run, Log], bool] = never,
        progress: Progress | None = None,
    ) -> list[Finished]:
        """All runs; each ends when `done` says so of its log."""
        how = Together(**self._shared(), hidden=self.hidden) if self.network == "mlp" else self._alone()
        return how.run(task, runs, self.epochs, done, progress or Silent())

    def _alone(self) -> Alone:
        return Alone(**self._shared(), network=self.network, width=self.width)

    def _shared(self) -> dict:
        names = ("momentum", "batch", "keep_initial", "probe", "growth")
        return {name: getattr(self, name) for name in names}


def reached(log: Log, progress: str, thresholds: Sequence[float], metrics: Sequence[str]) -> dict[str, list[float]]:
    """Metrics at thresholds of the progress, between logged steps by a line; NaN where the run did not come."""
    begin = log[progress][0]
    found = at_equal_progress(log, log, progress, [t for t in thresholds if t <= begin], metrics)
    places = {threshold: k for k, threshold in enumerate(found.thresholds)}

    def value(metric: str, threshold: float) -> float:
        if threshold > begin:
            return float(log[metric][0])
        return found.a[metric][places[threshold]] if threshold in places else math.nan

    return {metric: [value(metric, t) for t in thresholds] for metric in metrics}


def falling(highest: float, lowest: float, count: int = 25) -> list[float]:
    """Values of a loss from the highest to the lowest, by equal factors, for curves over progress.

    >>> [round(x, 3) for x in falling(2.0, 0.5, 3)]
    [2.0, 1.0, 0.5]
    """
    return [highest * (lowest / highest) ** (k / (count - 1)) for k in range(count)]


def linearity(finished: Finished) -> dict[str, float]:
    """How near a network is to its start: signs of its units, tangent kernel, last representation."""
    start, x = finished.start, finished.probe
    return {
        "signs": finished.log["signs"][-1],
        "kernel": kernel_alignment(finished.model, x, start),
        "representation": representation_alignment(finished.model, x, start),
    }
