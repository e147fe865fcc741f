"""Nothing is kept: every product goes over the data by autodiff, ``M v = 1/N Σ_n J_nᵀ H_n J_n v``."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerwise.curvature.approximation import Options
from layerwise.curvature.estimate import by_layer, dense, low_rank
from layerwise.curvature.matrix import SMALL, DenseMatrix, ParamMatrix
from layerwise.curvature.restricted import Restricted
from layerwise.foundations.columns import Params, Shapes, as_rows
from layerwise.foundations.cotangents import HessianRoot
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods import Terms
from layerwise.foundations.types import statistics_dtype
from layerwise.foundations.vectors import ParamVector
from layerwise.layers.capture.linearize import Linearization
from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.layers.capture.recorder import Batch
from layerwise.layers.capture.source import Sweep, Totals
from layerwise.layers.parts import find_layer, layers_of


@dataclass(frozen=True, eq=False, repr=False)
class Implicit(ParamMatrix):
    """Fisher, GGN or gradient moment as products over the data.

    Sampled labels are drawn from the same seeds at every pass, so that the matrix stays one matrix.
    """

    sweep: Sweep
    centered: bool = False
    _linearization: list[Linearization] = field(default_factory=list, repr=False)
    structure = "implicit"

    @property
    def shapes(self) -> Shapes:  # type: ignore[override]
        """Of the parameters."""
        return self.sweep.recorder.table.shapes

    @property
    def memory(self) -> int:  # type: ignore[override]
        """As allowed."""
        return self.sweep.memory

    @property
    def dtype(self) -> torch.dtype:
        """Of the statistics."""
        return statistics_dtype(self._parameter().dtype)

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self._parameter().device

    def _parameter(self) -> Tensor:
        return next(p for p in self.sweep.recorder.model.parameters() if p.requires_grad)

    @in_own_arithmetic
    def _mv(self, params: Params) -> Params:
        recorder = self.sweep.recorder
        params = {k: t.clone() if t.is_inference() else t for k, t in params.items()}
        if not self._linearization:
            self._linearization.append(Linearization(recorder.model, list(self.shapes)))
        linear = self._linearization[0]
        total = {k: torch.zeros_like(t) for k, t in params.items()}
        mean = {k: torch.zeros_like(t[:1]) for k, t in params.items()}
        totals = Totals()
        with recorder.session():
            for batch in self.sweep.source.batches("product"):
                for part in self.sweep.parts(batch):
                    n, weight = self._add_part(linear, part, params, total, mean)
                    totals.examples, totals.terms = totals.examples + n, totals.terms + weight
        count = totals.scale(self.sweep.normalize)
        out = {k: t / count for k, t in total.items()}
        return self._uncentered(out, mean, params, count) if self.centered else out

    def _add_part(
        self, linear: Linearization, part: Batch, params: Params, total: Params, mean: Params
    ) -> tuple[int, Tensor]:
        recorder, likelihood, cotangent = self.sweep.recorder, self.sweep.likelihood, self.sweep.cotangent
        n = recorder.examples(part)
        asked = likelihood.ask(part.y, part.mask)
        recorder.checks.send()

        def standard(out: Tensor) -> Terms:
            return recorder.terms(out, part, likelihood, n, asked)

        recorder.seed_forward(part)
        with torch.enable_grad():
            terms = standard(linear.run(part.x))
        recorder.check_output(terms.f, part)
        recorder.checks.read()  # what has not been read keeps its batch in memory
        recorder.seed_forward(part)
        pushed = linear.push(part.x, terms.f, params, lambda out: standard(out).f)
        if isinstance(cotangent, HessianRoot):
            weighted = likelihood.hessian_product(terms, pushed)
        else:
            v = cotangent.slice(terms, 0, cotangent.count(terms), part.number)
            inner = torch.einsum("vnsc,bnsc->bvn", v, pushed)
            weighted = torch.einsum("bvn,vnsc->bnsc", inner, v)
            if self.centered:
                for k, g in linear.pull(terms.f, v, retain_graph=True).items():
                    mean[k] += g
        for k, g in linear.pull(terms.f, weighted).items():
            total[k] += g
        return n, terms.weight.sum(dtype=torch.float64)

    @staticmethod
    def _uncentered(out: Params, mean: Params, params: Params, count: float) -> Params:
        """Subtract ``ḡ ḡᵀ v``."""
        inner = sum(as_rows((mean[k] / count) * params[k]).sum(1) for k in params)
        assert isinstance(inner, Tensor)
        return {k: out[k] - inner.view(-1, *[1] * (out[k].ndim - 1)) * mean[k] / count for k in out}

    # --- closed forms over the data ----------------------------------------------------------------------

    @in_own_arithmetic
    def _by_layer(self, structure: str) -> ParamMatrix:
        return by_layer(self.sweep, structure, Options(), self.centered)

    def trace(self, samples: int = 0, seed: int = 0) -> Tensor:
        """Exact: squared norms of per-example gradients, in one pass."""
        return self._by_layer("diag").trace()

    def diagonal(self, samples: int = 0, seed: int = 0) -> ParamVector:
        """Exact: squared per-example gradients, in one pass."""
        return self._by_layer("diag").diagonal()

    @in_own_arithmetic
    def _dense(self) -> DenseMatrix:
        return dense(self.sweep, self.centered)

    @in_own_arithmetic
    def to_low_rank(self) -> ParamMatrix:
        """The same matrix with its rows kept."""
        return low_rank(self.sweep, self.centered)

    def frobenius(self, samples: int = 64, seed: int = 0) -> Tensor:
        """Exact for few parameters; otherwise an estimate with its standard error."""
        if self.numel() <= SMALL:
            return self._dense().frobenius()
        return super().frobenius(samples, seed)

    def layer(self, name: str) -> Restricted:
        """The block of one layer, still without forming it."""
        table = self.sweep.recorder.table
        return Restricted(self, find_layer(layers_of(table), table.shapes, name), self.memory)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Implicit":
        """Not possible: the matrix lives where its model does."""
        raise InputError(
            describe("to() of an implicit matrix", "the model's own device and dtype", "move the model and rebuild")
        )
