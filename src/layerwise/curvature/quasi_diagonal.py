"""The diagonal and each bias's row: ``E[g_w²]``, ``E[g_b²]``, ``E[g_b g_w]``."""

from layerwise.curvature.approximation import Approximation
from layerwise.foundations.operators import BlockOperator, Diagonal
from layerwise.foundations.quasi_diagonal import QuasiDiagonal
from layerwise.layers.io.layer_io import LayerIO


class QuasiDiagonalApproximation(Approximation):
    """A layer without a bias, or with a bias alone, has nothing to add to its diagonal."""

    name = "quasidiag"

    def __post_init__(self) -> None:
        self.squares = self.zeros(*self.spec.form.shape)
        self.cross = self.zeros(*self.spec.form.shape)

    @property
    def has_cross(self) -> bool:
        """Whether there are weights and a bias."""
        return len(self.spec.form.parts) == 2

    def observe(self, io: LayerIO, first: bool) -> None:
        """Add squares and products with the bias's gradient."""
        for chunk in io.chunks():
            self.squares += chunk.squared_sum()
            if self.has_cross:
                self.cross += chunk.bias_cross_sum()

    def finish(self, count: float) -> BlockOperator:
        """Means."""
        squares, cross = self.squares / count, self.cross / count
        if not self.has_cross:
            return Diagonal(squares)
        return QuasiDiagonal(squares[..., :-1], squares[..., -1], cross[..., :-1], self.options.completion)
