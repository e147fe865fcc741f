"""The diagonal: ``Σ_n (Σ_s g a)² / N``."""

from layerwise.curvature.approximation import Approximation
from layerwise.foundations.operators import BlockOperator, Diagonal
from layerwise.layers.io.layer_io import LayerIO


class DiagonalApproximation(Approximation):
    """Squares of per-example gradients."""

    name = "diag"

    def __post_init__(self) -> None:
        self.total = self.zeros(*self.spec.form.shape)

    def observe(self, io: LayerIO, first: bool) -> None:
        """Add squares."""
        for chunk in io.chunks():
            self.total += chunk.squared_sum()

    def finish(self, count: float) -> BlockOperator:
        """Mean of squares."""
        return Diagonal(self.total / count)
