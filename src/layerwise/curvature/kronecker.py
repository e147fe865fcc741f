"""K-FAC: ``G ⊗ A`` with A the second moment of inputs and G that of output gradients.

expand: ``A = Σ_{n,s} a aᵀ / (N S)``, ``G = Σ_{v,n,s} g gᵀ / N``: every position counts for itself.
reduce: the same after the mean of a and the sum of g over positions.
"""

from torch import Tensor

from layerwise.curvature.approximation import Approximation
from layerwise.foundations.kronecker import InputFactor, Kronecker
from layerwise.foundations.linalg.symmetric_product import grouped_gram
from layerwise.foundations.operators import BlockOperator
from layerwise.layers.io.layer_io import LayerIO, RecordedIO
from layerwise.layers.table import LayerSpec


class KroneckerApproximation(Approximation):
    """Two factors a layer."""

    name = "kfac"

    def __post_init__(self) -> None:
        k, o, i = self.spec.form.shape
        form = self.spec.form
        self.channels_only = self.options.conv == "sua" and form.taps > 1
        size = form.weight_inputs // form.taps if self.channels_only else i
        self._shapes = {"A": (k, i) if form.one_hot else (k, size, size), "G": (k, o, o)}
        self._sums: dict[str, Tensor] = {}
        self.rows = 0

    def observe(self, io: LayerIO, first: bool) -> None:
        """Add second moments; inputs once a batch, whatever the number of cotangents."""
        assert isinstance(io, RecordedIO)
        if self.options.sharing == "reduce" and not self.spec.form.one_hot and not self.channels_only:
            self._observe_reduced(io, first)
            return
        self._add("G", io.output_moment())
        if first:
            moment, rows = io.channel_moment() if self.channels_only else io.input_moment()
            self._add("A", moment)
            self.rows += rows

    def _observe_reduced(self, io: RecordedIO, first: bool) -> None:
        for a, g in io.reduced_chunks():
            self._add("G", grouped_gram(g.flatten(0, 1)))
            if first:
                self._add("A", grouped_gram(a))
                self.rows += a.shape[0]

    def _add(self, name: str, moment: Tensor) -> None:
        """The first moment is kept as it is: it was made for this sum, and a sum of zeros costs as much again."""
        moment = moment.to(self.dtype)
        self._sums[name] = self._sums[name].add_(moment) if name in self._sums else moment

    def _sum(self, name: str) -> Tensor:
        return self._sums[name] if name in self._sums else self.zeros(*self._shapes[name])

    def factors(self, count: float) -> tuple[InputFactor, Tensor]:
        """A as a mean over rows, G as a mean over examples."""
        return InputFactor(self._sum("A") / max(self.rows, 1), self._taps()), self._sum("G") / count

    def sums(self, count: float) -> list[tuple[Tensor, float]]:
        """Both factors."""
        self._sums = {name: self._sum(name) for name in ("A", "G")}
        return [(self._sums["A"], float(max(self.rows, 1))), (self._sums["G"], count)]

    def _taps(self) -> int:
        return self.spec.form.taps if self.channels_only else 1

    def finish(self, count: float) -> BlockOperator:
        """``G ⊗ A``, of the sums that have been divided in place."""
        A, G = (self._sums[name] for name in ("A", "G"))
        return Kronecker(InputFactor(A, self._taps()), G, self.options.damping_split or "trace")

    def diagonals(self) -> list[Tensor] | None:
        """Of both factors: |M_ij|² ≤ M_ii M_jj. That of one-hot inputs is a diagonal already."""
        return [M.diagonal(dim1=-2, dim2=-1) if M.ndim > 2 else M for M in self._sums.values()]

    def positions(self) -> int:
        """Rows of A."""
        return self.rows

    @classmethod
    def bytes_needed(cls, spec: LayerSpec, itemsize: int) -> int:
        """Two factors, twice while they are added."""
        k, o, i = spec.form.shape
        return 2 * k * (o * o + (i if spec.form.one_hot else i * i)) * itemsize
