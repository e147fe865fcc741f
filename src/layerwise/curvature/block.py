"""Exact blocks: one for the whole layer, or one for each of its groups."""

from layerwise.curvature.approximation import Approximation
from layerwise.foundations.operators import Block, BlockOperator
from layerwise.layers.io.layer_io import LayerIO
from layerwise.layers.table import LayerSpec


class BlockApproximation(Approximation):
    """``Σ_n vec(Σ_s g aᵀ) vec(Σ_s g aᵀ)ᵀ / N``."""

    name = "block"

    def __post_init__(self) -> None:
        self.total = self.zeros(self.spec.form.numel(), self.spec.form.numel())

    def observe(self, io: LayerIO, first: bool) -> None:
        """Add outer products of per-example gradients."""
        for chunk in io.chunks():
            self.total += chunk.outer_sum()

    def finish(self, count: float) -> BlockOperator:
        """Mean of outer products."""
        return Block((self.total / count).unsqueeze(0), self.spec.form.shape)

    @classmethod
    def bytes_needed(cls, spec: LayerSpec, itemsize: int) -> int:
        """D² numbers, twice while they are added."""
        return 2 * spec.form.numel() ** 2 * itemsize


class GroupBlockApproximation(Approximation):
    """The exact block of each group (each feature of a norm layer), groups apart."""

    name = "group"

    def __post_init__(self) -> None:
        k, o, i = self.spec.form.shape
        self.total = self.zeros(k, o * i, o * i)

    def observe(self, io: LayerIO, first: bool) -> None:
        """Add outer products, group by group."""
        for chunk in io.chunks():
            self.total += chunk.group_outer_sum()

    def finish(self, count: float) -> BlockOperator:
        """Mean of outer products."""
        return Block(self.total / count, self.spec.form.shape)

    @classmethod
    def bytes_needed(cls, spec: LayerSpec, itemsize: int) -> int:
        """K blocks of (O·I)² numbers."""
        k, o, i = spec.form.shape
        return 2 * k * (o * i) ** 2 * itemsize
