"""Sums over the data for one layer, in two independent halves, and what they say.

Examples are divided into two halves. A product of a sum over one half and the same sum over the other has the right
mean: the square of a noisy estimate has the noise in it, which in flat directions of the curvature is all there is.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.curvature.approximation import Options
from layerwise.curvature.kronecker import KroneckerApproximation
from layerwise.doctor.measurements import Side
from layerwise.foundations.linalg import guarded_eigh
from layerwise.foundations.linalg.eigh import null_tolerance
from layerwise.kernel.alignment import Spectrum
from layerwise.layers.io.layer_io import LayerIO, RecordedIO
from layerwise.layers.io.one_hot import OneHot
from layerwise.layers.io.standard import Standard
from layerwise.layers.table import LayerSpec

LARGEST_SPECTRUM = 2048
"""Features up to which a spectrum is computed of all of them."""
DAMPING = 1e-4
"""Of the predicted decrease, relative to the mean eigenvalue."""
STEPS = 1000
"""Of gradient descent, after which what is left is called out of reach."""
PAIR_OPERATIONS = 2e9
"""Multiplications that a layer's Kronecker error may take for one batch."""


@dataclass(eq=False)
class Half:
    """Sums over one half of the examples."""

    gradient: Tensor | None = None
    """``Σ_n g_n`` [K, O, I], at the data's labels."""
    moments: KroneckerApproximation | None = None
    examples: int = 0


@dataclass(eq=False)
class LayerSums:
    """What is added up of one layer."""

    spec: LayerSpec
    device: torch.device
    dtype: torch.dtype
    place: int = -1
    halves: tuple[Half, Half] = field(default_factory=lambda: (Half(), Half()))
    squared_norms: float = 0.0
    """``Σ_n ‖g_n‖²`` at the data's labels."""
    examples: int = 0
    fisher_trace: float = 0.0
    """``Σ_n ‖g_n‖²`` at labels drawn from the model."""
    diagonal: Tensor | None = None
    """``Σ_n g_n²`` at labels drawn from the model, for layers without factors."""
    pairs: list[tuple[float, float]] = field(default_factory=list)
    """For single examples n: mean over others of ``⟨r_n, r_m⟩²``, and ``r_nᵀ (G ⊗ A) r_n``."""
    factor_norms: list[float] = field(default_factory=list)
    """``⟨G₁, G₂⟩ ⟨A₁, A₂⟩``, batch by batch."""
    largest_spectrum: int = LARGEST_SPECTRUM
    """Features up to which a spectrum is of all of them; fewer where there is no time."""

    @property
    def kronecker(self) -> bool:
        """Whether the layer has factors."""
        form = self.spec.form
        return bool(self.spec.sites) and form.kronecker and form.weight is not None

    # --- adding up ---------------------------------------------------------------------------------------------

    def add_gradient(self, io: LayerIO, batch: int) -> None:
        """A batch at the data's labels."""
        for half, part in zip(self.halves, _halves(io, batch), strict=True):
            if part is None:
                continue
            grad = torch.stack([chunk.grad()[0] for chunk in part.chunks(gradients=False)]).sum(0).to(self.dtype)
            half.gradient = grad if half.gradient is None else half.gradient + grad
            half.examples += part.examples
        self.squared_norms += float(sum(chunk.squared_norms().sum() for chunk in io.chunks()))
        self.examples += io.examples

    def add_curvature(self, io: LayerIO, batch: int, pairs: bool) -> None:
        """A batch at labels drawn from the model; `pairs` says that the Kronecker error is to be added to."""
        self.fisher_trace += float(sum(chunk.squared_norms().sum() for chunk in io.chunks()))
        if not self.kronecker or not isinstance(io, RecordedIO):
            diagonal = torch.stack([chunk.squared_sum() for chunk in io.chunks()]).sum(0).to(self.dtype)
            self.diagonal = diagonal if self.diagonal is None else self.diagonal + diagonal
            return
        parts = _halves(io, batch)
        fresh = []
        for half, part in zip(self.halves, parts, strict=True):
            if part is None:
                continue
            assert isinstance(part, RecordedIO)
            now = KroneckerApproximation(self.spec, Options(), self.dtype, self.device)
            now.observe(part, True)
            fresh.append((part, now))
            if half.moments is None:
                half.moments = KroneckerApproximation(self.spec, Options(), self.dtype, self.device)
            for name in ("A", "G"):
                half.moments._add(name, now._sum(name).clone())
            half.moments.rows += now.rows
        if pairs and len(fresh) == 2 and not self.spec.form.one_hot:
            self._add_pairs(fresh[0], fresh[1])

    def _add_pairs(
        self, first: tuple[RecordedIO, KroneckerApproximation], second: tuple[RecordedIO, KroneckerApproximation]
    ) -> None:
        """Cross terms of two halves of one batch: unbiased, since no example meets itself."""
        _, o, i = self.spec.form.shape
        allowed = int(max(2, min(48, PAIR_OPERATIONS / (2 * o * i * (o + i) + 1))))
        standards = [_some(io, allowed).standard() for io, _ in (first, second)]
        factors = [moments.factors(float(io.examples)) for io, moments in (first, second)]
        matrices = [(A.values, G) for A, G in factors]
        self.factor_norms.append(
            float(
                (matrices[0][0] * matrices[1][0]).sum((1, 2)).mul((matrices[0][1] * matrices[1][1]).sum((1, 2))).sum()
            )
        )
        inner = _inner(standards[0], standards[1]).square().double()
        quads = [_quadratic(standard, *matrices[1 - place]).double() for place, standard in enumerate(standards)]
        for rows, quad in zip((inner.mean(1), inner.mean(0)), quads, strict=True):
            self.pairs += list(zip(rows.tolist(), quad.tolist(), strict=True))

    # --- what they say -----------------------------------------------------------------------------------------

    def gradient(self, terms: float) -> Tensor | None:
        """Of the mean loss, [K, O, I]."""
        found = [half.gradient for half in self.halves if half.gradient is not None]
        return sum(found[1:], found[0]) / terms if found else None

    def squared_gradient(self) -> float:
        """``|∇L|²`` of the mean over examples, without the noise of the estimate where there are two halves."""
        first, second = self.halves
        if first.gradient is None or second.gradient is None:
            only = first.gradient if first.gradient is not None else second.gradient
            return 0.0 if only is None else float((only / max(self.examples, 1)).square().sum())
        return float((first.gradient / first.examples * (second.gradient / second.examples)).sum())

    def noise_scale(self) -> float:
        """``tr Σ / |∇L|²`` in examples; infinite where the gradient is all noise."""
        if not self.examples:
            return math.nan
        signal = self.squared_gradient()
        total = self.squared_norms / self.examples
        if total == 0.0:
            return math.nan
        return math.inf if signal <= 0 else max(0.0, total - signal) / signal

    @cached_property
    def _eigen(self) -> "tuple[_Factor, _Factor] | None":
        """Of inputs and of output gradients; of both halves together."""
        parts = [half.moments for half in self.halves if half.moments is not None]
        if not self.kronecker or not parts:
            return None
        A = sum((part._sum("A") for part in parts[1:]), parts[0]._sum("A"))
        G = sum((part._sum("G") for part in parts[1:]), parts[0]._sum("G"))
        rows = sum(part.rows for part in parts)
        return _Factor.of(A / max(rows, 1), rows, self.largest_spectrum), _Factor.of(G, rows, self.largest_spectrum)

    def sides(self) -> tuple[Side | None, Side | None]:
        """Anisotropy of inputs and of output gradients (these at labels drawn from the model)."""
        if self._eigen is None:
            return None, None
        inputs, outgrads = self._eigen
        return inputs.side(), outgrads.side(scale=1 / max(outgrads.rows, 1))

    def reach(self, terms: float) -> tuple[float, float | None]:
        """Predicted decrease of a damped step with the layer's curvature, and the part that gradient descent leaves.

        ``½ Σ_ij c_ij² / (λ_ij + δ)`` with c the gradient in the eigenbasis of ``G ⊗ A``, λ its eigenvalues and δ
        1e-4 of their mean. c² is the product of both halves' c. Without factors, the diagonal is taken.
        """
        first, second = self.halves
        if first.gradient is None or second.gradient is None:
            return 0.0, None
        # Of the mean over terms: each half stands for all examples.
        C1 = first.gradient * (self.examples / first.examples) / terms
        C2 = second.gradient * (self.examples / second.examples) / terms
        if self._eigen is not None:
            inputs, outgrads = self._eigen
            C1, C2 = (outgrads.rotate_left(inputs.rotate_right(C)) for C in (C1, C2))
            values = outgrads.values.unsqueeze(-1) / terms * inputs.values.unsqueeze(-2)
        elif self.diagonal is not None:
            values = self.diagonal / terms
        else:
            return 0.0, None
        weights = (C1 * C2).double() / (values.double() + DAMPING * values.mean().double() + 1e-300)
        total = float(weights.sum()) / 2
        if not total > 0 or not math.isfinite(total):
            return 0.0, None
        left = (1 - values.double() / values.max().double()).clamp(0, 1) ** (2 * STEPS)
        return total, min(1.0, max(0.0, float((weights * left).sum()) / 2 / total))

    def kronecker_error(self) -> tuple[float | None, float | None]:
        """``‖F − G ⊗ A‖ / ‖F‖`` of the layer's Fisher matrix, and its standard error over examples."""
        if len(self.pairs) < 4:
            return None, None
        a, b = torch.tensor(self.pairs, dtype=torch.float64).unbind(1)
        c = sum(self.factor_norms) / len(self.factor_norms)
        if not float(a.mean()) > 0:
            return None, None
        squared = float((a.mean() - 2 * b.mean() + c) / a.mean())
        # Delta method: ratio (a − 2b + c)/a of means over examples. Each ⟨r_n, r_m⟩² has two examples in it.
        slope_a, slope_b = float((2 * b.mean() - c) / a.mean() ** 2), float(-2 / a.mean())
        spread = float((slope_a * 2 * (a - a.mean()) + slope_b * (b - b.mean())).std() / len(a) ** 0.5)
        error = max(squared, 0.0) ** 0.5
        return error, spread / (2 * max(error, spread**0.5, 1e-12))

    def gradient_top_share(self) -> float | None:
        """``σ₁² / Σσ²`` of the gradient, the largest of the layer's groups."""
        grad = self.gradient(1.0)
        if grad is None or not self.kronecker:
            return None
        small = grad if grad.shape[1] <= grad.shape[2] else grad.mT
        gram = (small @ small.mT).double()
        traces = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        if not bool((traces > 0).any()) or gram.shape[-1] > LARGEST_SPECTRUM:
            return None
        top = torch.linalg.matrix_norm(gram, ord="fro") if gram.shape[-1] == 1 else _top(gram)
        return float((top / traces.clamp_min(1e-300)).max().clamp(0, 1))


def affordable_spectrum(specs: Iterable[LayerSpec], seconds: float, device: torch.device) -> int:
    """The features up to which all spectra of these layers can be computed in so many seconds."""
    sizes = factor_sizes(specs)
    largest = LARGEST_SPECTRUM
    while largest > 64 and eigh_seconds((min(size, largest) for size in sizes), device) > seconds:
        largest = int(largest / 1.25)
    return largest


def factor_sizes(specs: Iterable[LayerSpec]) -> list[int]:
    """Sizes of the second moments that have to be decomposed: not those of one-hot inputs, which are diagonal."""
    return [size for spec in specs for size in spec.form.shape[1:] if not spec.form.one_hot]


def eigh_seconds(sizes: Iterable[int], device: torch.device) -> float:
    """What eigendecompositions of these sizes will take: one is timed, the others go with the cube of their size."""
    return _seconds_per_cube(device) * sum(size**3 for size in sizes)


_TIMED: dict[torch.device, float] = {}
"""Seconds of an eigendecomposition over the cube of its size."""


def _seconds_per_cube(device: torch.device) -> float:
    if device not in _TIMED:
        size = 384  # large enough for the arithmetic to count, and not only the calls
        matrix = torch.eye(size, device=device) + torch.rand(size, 1, device=device)
        matrix = matrix @ matrix.mT
        if device.type == "cuda":
            torch.linalg.eigh(matrix)  # the first call loads a library
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        torch.linalg.eigh(matrix)[0].tolist()
        _TIMED[device] = max(time.perf_counter() - start, 1e-6) / size**3
    return _TIMED[device]


@dataclass(frozen=True, eq=False)
class _Factor:
    """Eigenvalues and eigenvectors of a second moment; of one-hot inputs, counts and no vectors."""

    values: Float[Tensor, "K n"]
    vectors: Float[Tensor, "K n n"] | None
    size: int
    rows: int
    trace: float
    kept: Tensor | None = None
    """The features that the spectrum is of; None: all."""

    @classmethod
    def of(cls, moment: Tensor, rows: int, largest: int) -> "_Factor":
        if moment.ndim == 2:  # one-hot: a diagonal
            return cls(moment, None, moment.shape[-1], rows, float(moment.sum()))
        size, trace = moment.shape[-1], float(moment.diagonal(dim1=-2, dim2=-1).sum())
        if size > largest:  # a principal part: its eigenvalues lie between those of the whole
            kept = torch.linspace(0, size - 1, largest, device=moment.device).long()
            moment = moment[:, kept][:, :, kept]
        else:
            kept = None
        values, vectors = guarded_eigh(moment, name="second moment")
        return cls(values, vectors, size, rows, trace, kept)

    def rotate_right(self, C: Tensor) -> Tensor:
        C = C if self.kept is None else C[..., self.kept]
        return C if self.vectors is None else C @ self.vectors

    def rotate_left(self, C: Tensor) -> Tensor:
        C = C if self.kept is None else C[..., self.kept, :]
        return C if self.vectors is None else self.vectors.mT @ C

    def side(self, scale: float = 1.0) -> Side:
        values = self.values.double()
        groups = values.shape[0]
        shown = []
        for one in values[:64]:  # of a layer with very many groups, some
            floor = null_tolerance(torch.float32) * float(one.max())
            kept = torch.where(one > floor, one, 0.0).flip(0)
            spectrum = Spectrum(kept, floor, int((one <= floor).sum()))
            if float(kept.max()) > 0:
                condition = float(kept.max() / kept[kept > 0].min())
                shown.append((condition, float(spectrum.effective_rank()), float(spectrum.trace_ratio(1))))
        if not shown:
            shown = [(math.nan, 0.0, math.nan)]
        mean = [sum(column) / len(shown) for column in zip(*shown, strict=True)]
        rms = math.sqrt(max(self.trace, 0.0) * scale / (groups * self.size))
        return Side(self.size, self.rows, rms, mean[0], mean[1], mean[2], values.shape[-1])


def _halves(io: LayerIO, batch: int) -> tuple[LayerIO | None, LayerIO | None]:
    n = io.examples
    if n == 1:
        return (io, None) if batch % 2 == 0 else (None, io)
    return io.narrow(0, n // 2), io.narrow(n // 2, n)


def _some(io: RecordedIO, count: int) -> RecordedIO:
    return io.narrow(0, min(count, io.examples))


def _inner(first: Standard, second: Standard) -> Float[Tensor, "N M"]:
    """``⟨r_n, r_m⟩`` of per-example gradients."""
    if (
        not isinstance(first.a, OneHot)
        and not isinstance(second.a, OneHot)
        and first.a.shape[1] == 1
        and second.a.shape[1] == 1
    ):
        a = torch.einsum("nki,mki->knm", first.a[:, 0], second.a[:, 0])
        g = torch.einsum("nko,mko->knm", first.g[0, :, 0], second.g[0, :, 0])
        return (a * g).sum(0)
    rows = [standard.per_example_grads()[0].flatten(1) for standard in (first, second)]
    return rows[0] @ rows[1].mT


def _quadratic(standard: Standard, A: Float[Tensor, "K I I"], G: Float[Tensor, "K O O"]) -> Float[Tensor, "N"]:
    """``r_nᵀ (G ⊗ A) r_n``, through rows of positions or through gradients: the cheaper."""
    assert isinstance(standard.a, Tensor)
    a, g = standard.a, standard.g[0]  # N S K I, N S K O
    s, i, o = a.shape[1], a.shape[-1], g.shape[-1]
    if s * (i * i + o * o) + s * s * (i + o) <= o * i * (o + i):
        along = torch.einsum("nski,kij,ntkj->nkst", a, A, a)
        return (along * torch.einsum("nsko,kop,ntkp->nkst", g, G, g)).sum((1, 2, 3))
    rows = standard.per_example_grads()[0]  # N K O I
    return (G @ rows @ A * rows).sum((1, 2, 3))


def _top(gram: Float[Tensor, "K n n"]) -> Float[Tensor, "K"]:
    """The largest eigenvalue by power iteration from the heaviest column: good to a part in a thousand here."""
    place = gram.diagonal(dim1=-2, dim2=-1).argmax(-1)
    v = torch.stack([matrix[:, at] for matrix, at in zip(gram, place.tolist(), strict=True)])
    for _ in range(50):
        v = torch.nn.functional.normalize(v, dim=-1)
        v = (gram @ v.unsqueeze(-1)).squeeze(-1)
    return v.norm(dim=-1)
