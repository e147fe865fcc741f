"""K-FAC and EKFAC of one layer against the empirical Fisher matrix, along a training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from layerwise.foundations.errors import InputError, describe
from layerwise.studies.fisher_geometry.classifiers import Classifier
from layerwise.studies.fisher_geometry.kronecker_basis import KroneckerBasis, empirical_fisher
from layerwise.studies.fisher_geometry.kronecker_basis import mean_correlation as correlation
from layerwise.studies.fisher_geometry.kronecker_basis import relative_error as error
from layerwise.studies.fisher_geometry.kronecker_basis import spectral_distance as distance


@dataclass(frozen=True, kw_only=True)
class AlongTraining:
    """Which layer of which network, and when it is looked at."""

    classifier: Classifier = field(default_factory=Classifier)
    layer: str = "2"
    """By its name in ``nn.Sequential``, which counts activations too: "2" is the second layer with weights."""
    examples: int = 500
    """Of the empirical Fisher matrix, and of the factors: the first of the data."""
    steps: int = 600
    every: int = 20
    """Steps between measurements."""
    refresh: int | None = 100
    """Steps between new factors; None: never."""

    def __post_init__(self) -> None:
        given = f"steps={self.steps}, refresh={self.refresh}, every={self.every}"
        if not 1 <= self.every <= self.steps or self.steps % self.every:
            raise InputError(describe(given, "steps a multiple of every, which is at least 1", "change one of them"))
        if self.refresh is not None and not (
            self.every < self.refresh <= self.steps and self.refresh % self.every == self.steps % self.refresh == 0
        ):
            expected = "steps a multiple of refresh, and refresh a larger multiple of every"
            raise InputError(describe(given, expected, "change one of them"))

    def measured(self, seed: int) -> Iterator[dict[str, float | int]]:
        """At each step: correlations of gradients, errors with the last factors, distances with the first.

        Scalings of EKFAC are always of the present examples; its basis, like all of K-FAC, is as old as the factors.
        """
        x, y = self.classifier.data()
        batch = x[: self.examples], y[: self.examples]
        first = last = None
        for step, model in self.classifier.trained(x, y, self.measured_steps(), seed):
            F, fresh = empirical_fisher(model, self.layer, *batch), KroneckerBasis.of(model, self.layer, *batch)
            if last is None or (self.refresh is not None and step % self.refresh == 0):
                last = fresh
            first = first or fresh
            yield {
                "step": step,
                "correlation/parameters": correlation(F),
                "correlation/basis": correlation(fresh.rotated(F)),
                "error/kfac": error(last.kfac(), F),
                "error/ekfac": error(last.ekfac(F), F),
                "distance/kfac": distance(first.spectrum, F),
                "distance/ekfac": distance(first.scalings(F), F),
            }

    def measured_steps(self) -> range:
        """All of them, the first and the last included."""
        return range(0, self.steps + 1, self.every)
