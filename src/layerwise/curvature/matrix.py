"""`ParamMatrix`: a symmetric matrix on parameter space that answers every operation.

A structure must say how it multiplies; everything else then has a matrix-free answer here (conjugate gradients,
Lanczos, random probes with their standard error), and structures override it where a closed form exists. Two
structures stand here because all others need them: small matrices answer as a `DenseMatrix`, and a sum of matrices
that have no common structure is a `WeightedSum`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.curvature.description import write
from layerwise.foundations.arithmetic import OwnArithmetic
from layerwise.foundations.columns import Params, Shapes, as_rows, check_dtype, from_flat, numel, read, to_flat
from layerwise.foundations.device import budget, require
from layerwise.foundations.errors import InputError, NumericalError, UnsupportedError, describe
from layerwise.foundations.linalg import (
    Estimate,
    conjugate_gradient,
    frobenius_squared,
    guarded_eigh,
    hutchinson_diagonal,
    hutchinson_trace,
    lanczos_function,
    lanczos_top,
    norm,
    slq_logdet,
)
from layerwise.foundations.operators import Block, check_damping, damped_spectrum
from layerwise.foundations.random import seed_of, stream
from layerwise.foundations.vectors import ParamVector
from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.layers.parts import Layers, alone, find_layer, own_shapes, places, to_json

SMALL = 2048
"""Up to this many parameters, an operation without a closed form is done on the dense matrix."""


class ParamMatrix(OwnArithmetic, ABC, guard=in_own_arithmetic):
    """A symmetric matrix on the parameters named in `shapes`."""

    shapes: Shapes
    structure: str
    memory: int | None = None
    """Bytes that a result may take; None: half of what is free."""

    # --- what a structure must say -----------------------------------------------------------------------

    @abstractmethod
    def _mv(self, params: Params) -> Params:
        """``M v`` for columns ``{parameter: [B, *shape]}``."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """What the matrix is kept in."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it is kept."""

    @property
    def is_psd(self) -> bool:
        """Whether the matrix is known to be positive semi-definite."""
        return True

    # --- shapes ------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """(d, d)."""
        return self.numel(), self.numel()

    def numel(self) -> int:
        """d."""
        return numel(self.shapes)

    def parameters(self) -> list[str]:
        """Names of the parameters it acts on, in flat order."""
        return list(self.shapes)

    # --- products ----------------------------------------------------------------------------------------

    def __matmul__(self, v: Any) -> Any:
        params, write = read(v, self.shapes, self.dtype, self.device)
        return write(self._mv(params))

    def quad(self, v: Any) -> Tensor:
        """``vᵀ M v``; one number a column."""
        params, _ = read(v, self.shapes, self.dtype, self.device)
        values = self._quad(params)
        return values if isinstance(v, Tensor) and v.ndim == 2 else values[0]

    def _quad(self, params: Params) -> Float[Tensor, "B"]:
        out = self._mv(params)
        return torch.stack([as_rows(params[k] * out[k]).sum(1) for k in self.shapes]).sum(0)

    def solve(
        self,
        v: Any,
        damping: int | float = 0.0,
        *,
        damping_split: str | None = None,
        tol: float = 1e-10,
        max_iterations: int = 1000,
    ) -> Any:
        """``(M + λI)⁻¹ v``.

        `damping_split` matters to Kronecker structures (see `lw.fisher`). `tol` and `max_iterations` matter
        to structures without a closed form, which use conjugate gradients and raise if they do not converge.
        """
        params, write = read(v, self.shapes, self.dtype, self.device)
        return write(self._solve(params, check_damping(damping), damping_split, tol, max_iterations))

    def _solve(self, params: Params, damping: float, split: str | None, tol: float, max_iterations: int) -> Params:
        self._refuse_split(split)
        if self.numel() <= SMALL:
            return self._dense()._solve(params, damping, split, tol, max_iterations)
        if not self.is_psd and damping == 0:
            raise NumericalError(
                describe("damping=0 and an indefinite matrix", "a positive definite matrix", "pass damping > 0")
            )
        b = to_flat(params, self.shapes).mT
        found = conjugate_gradient(lambda X: self._columns(X) + damping * X, b, tol=tol, max_iterations=max_iterations)
        if not found.converged:
            raise NumericalError(
                describe(
                    f"a solve that reached a relative residual of {float(found.residuals.max()):.1g} "
                    f"in {found.iterations} iterations",
                    f"a residual ≤ {tol:g}",
                    "pass more damping, a larger tol, or more max_iterations",
                )
            )
        return from_flat(found.solution.mT, self.shapes)

    def power(
        self, v: Any, exponent: int | float, damping: int | float = 0.0, *, damping_split: str | None = None
    ) -> Any:
        """``(M + λI)^p v``; exact damping unless `damping_split` says otherwise."""
        params, write = read(v, self.shapes, self.dtype, self.device)
        return write(self._power(params, float(exponent), check_damping(damping), damping_split))

    def _power(self, params: Params, exponent: float, damping: float, split: str | None) -> Params:
        self._refuse_split(split)
        if self.numel() <= SMALL:
            return self._dense()._power(params, exponent, damping, split)
        columns = to_flat(params, self.shapes).mT
        name = f"{self.structure} matrix"

        def fn(s: Tensor) -> Tensor:
            low = s.clamp_min(0) if self.is_psd else s
            return damped_spectrum(low, damping, name, exponent) ** exponent

        return from_flat(lanczos_function(self._columns, columns, fn, 200, tol=1e-8).mT, self.shapes)

    def sample(
        self,
        n: int = 1,
        damping: int | float = 0.0,
        generator: torch.Generator | int | None = None,
    ) -> list[ParamVector]:
        """`n` draws from ``N(0, (M + λI)⁻¹)``."""
        damping = check_damping(damping)
        if n < 1:
            raise InputError(describe(f"n={n}", "a number of samples ≥ 1", "pass e.g. n=1"))
        if not isinstance(generator, torch.Generator):
            generator = stream(seed_of(generator), "sample")
        drawn = self._sample(n, damping, generator)
        return [ParamVector({k: drawn[k][i] for k in self.shapes}) for i in range(n)]

    def _sample(self, n: int, damping: float, generator: torch.Generator) -> Params:
        z = torch.randn(n, self.numel(), generator=generator, device=generator.device, dtype=self.dtype)
        return self._power(from_flat(z.to(self.device), self.shapes), -0.5, damping, None)

    # --- numbers -----------------------------------------------------------------------------------------

    def trace(self, samples: int = 64, seed: int = 0) -> Tensor:
        """Sum of the eigenvalues. Where there is no closed form, an estimate with its standard error."""
        if self.numel() <= SMALL:
            return self._dense().trace()
        return hutchinson_trace(self._columns, *self._probe(samples, seed))

    def frobenius(self, samples: int = 64, seed: int = 0) -> Tensor:
        """Frobenius norm ``√Σ s²``, or an estimate with its standard error."""
        if self.numel() <= SMALL:
            return self._dense().frobenius()
        squared = frobenius_squared(self._columns, *self._probe(samples, seed))
        root = squared.sqrt()
        error = squared.standard_error / (2 * float(root)) if float(root) > 0 else 0.0
        return type(squared)(root.to(self.dtype), standard_error=error, samples=squared.samples)

    def diagonal(self, samples: int = 64, seed: int = 0) -> ParamVector:
        """The diagonal as a vector, or an estimate with its `standard_error` (a vector too)."""
        if self.numel() <= SMALL:
            return self._dense().diagonal()
        values, error = hutchinson_diagonal(self._columns, *self._probe(samples, seed))
        spread = self._vector(error) if bool(error.any()) else None
        return ParamVector(self._vector(values).dict(), spread)

    def logdet(
        self, damping: int | float = 0.0, *, damping_split: str | None = None, samples: int = 32, seed: int = 0
    ) -> Tensor:
        """``log det(M + λI)``, or an estimate with its standard error."""
        self._refuse_split(damping_split)
        damping = check_damping(damping)
        if self.numel() <= SMALL:
            return self._dense().logdet(damping)
        if damping == 0:
            raise NumericalError(describe("damping=0", "a matrix known to be positive definite", "pass damping > 0"))
        d, samples, generator, dtype, device = self._probe(samples, seed)
        return slq_logdet(self._columns, d, damping, samples, 100, generator, dtype, device)

    def eigenvalues(self, k: int | None = None) -> Tensor:
        """All eigenvalues, or the k largest, ascending."""
        return self.eigh(k)[0] if k is not None else guarded_eigh(self.to_dense(), clamp=self.is_psd)[0]

    def eigh(self, k: int | None = None) -> tuple[Tensor, Tensor]:
        """Eigenvalues ascending and eigenvectors as columns ``[d, k]``; the k largest, or all."""
        if k is None:
            return guarded_eigh(self.to_dense(), name=f"{self.structure} matrix", clamp=self.is_psd)
        self._check_k(k)
        if self.numel() <= SMALL:
            values, vectors = self.eigh()
            return values[-k:], vectors[:, -k:]
        values, vectors, residuals = lanczos_top(
            self._columns,
            self.numel(),
            k,
            generator=stream(0, "lanczos"),
            dtype=self.dtype,
            device=self.device,
        )
        if bool((residuals > 1e-3 * values.abs().max()).any()):
            raise NumericalError(
                describe(
                    f"k={k} eigenvalues that did not converge",
                    "a gap in the spectrum",
                    "ask for fewer, or all",
                )
            )
        return values, vectors

    def to_dense(self) -> Float[Tensor, "d d"]:
        """The matrix itself, in flat order; refused where it would not fit in memory."""
        self._require_dense()
        return self._dense().matrix

    # --- parts, sums, places -----------------------------------------------------------------------------

    @abstractmethod
    def layer(self, name: str) -> "ParamMatrix":
        """The block of one layer, as a matrix of its own."""

    def __add__(self, other: "ParamMatrix") -> "ParamMatrix":
        if not isinstance(other, ParamMatrix):
            return NotImplemented
        same_space((self, other))
        return self.plus(other) or WeightedSum((*self._terms(), *other._terms()))

    def _terms(self) -> "tuple[tuple[float, ParamMatrix], ...]":
        """Of a weighted sum that this matrix is to be part of."""
        return ((1.0, self),)

    def __sub__(self, other: "ParamMatrix") -> "ParamMatrix":
        return self + (-1.0) * other

    def __mul__(self, factor: int | float) -> "ParamMatrix":
        return self._scaled(float(factor))

    __rmul__ = __mul__

    def __truediv__(self, factor: int | float) -> "ParamMatrix":
        return self._scaled(1 / float(factor))

    def _scaled(self, factor: float) -> "ParamMatrix":
        return WeightedSum(((factor, self),))

    def plus(self, other: "ParamMatrix") -> "ParamMatrix | None":
        """The sum in the same structure; None where it has none."""
        return None

    @abstractmethod
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "ParamMatrix":
        """Another device or dtype."""

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file; read it back with `lw.load`."""
        tensors, meta = self._stored()
        shapes = {k: list(v) for k, v in self.shapes.items()}
        examples = getattr(self, "examples", None)
        write(path, tensors, {"class": type(self).__name__, "shapes": shapes, "examples": examples, **meta})

    def _stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a file holds of it: tensors, and the rest as JSON."""
        raise UnsupportedError(
            describe(
                f"a {self.structure!r} matrix, which keeps nothing of its own",
                "dense, block, diag, quasidiag, kfac, ekfac or lowrank",
                "save its parts, or estimate it in one of these structures",
            )
        )

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` over flat vectors."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator

        def matmat(X: Any) -> Any:
            columns = torch.as_tensor(np.ascontiguousarray(X)).to(self.dtype).reshape(self.numel(), -1)
            return (self @ columns.to(self.device)).cpu().numpy().reshape(X.shape)

        dtype = {torch.float64: np.float64}.get(self.dtype, np.float32)
        products = {"matvec": matmat, "rmatvec": matmat, "matmat": matmat, "rmatmat": matmat}
        return LinearOperator(shape=self.shape, dtype=dtype, **products)  # type: ignore[call-arg]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.structure}, {self.numel()} parameters, {self.dtype}, {self.device})"

    # --- for structures ----------------------------------------------------------------------------------

    def _columns(self, X: Float[Tensor, "d B"]) -> Float[Tensor, "d B"]:
        return to_flat(self._mv(from_flat(X.mT, self.shapes)), self.shapes).mT

    def _vector(self, flat: Tensor) -> ParamVector:
        return ParamVector({k: t[0] for k, t in from_flat(flat.unsqueeze(0), self.shapes).items()})

    def _probe(self, samples: int, seed: int) -> tuple[int, int, torch.Generator, torch.dtype, torch.device]:
        return self.numel(), samples, stream(seed, "probe"), self.dtype, self.device

    def _dense(self) -> "DenseMatrix":
        eye = torch.eye(self.numel(), dtype=self.dtype, device=self.device)
        return DenseMatrix(self._columns(eye), self.shapes, self.is_psd)

    def _require_dense(self) -> None:
        size = self.numel() ** 2 * self.dtype.itemsize
        require(
            size,
            budget(self.memory, self.device),
            f"a dense matrix of {self.numel()} × {self.numel()} entries",
            'use structure="kfac" or "diag", or products with structure="implicit"; or allow more with memory=',
        )

    def _check_k(self, k: int) -> None:
        if not 1 <= k <= self.numel():
            raise InputError(
                describe(f"k={k}", f"a number from 1 to {self.numel()}", "choose how many eigenvalues to compute")
            )

    def _refuse_split(self, split: str | None) -> None:
        if split not in (None, "exact"):
            raise InputError(
                describe(
                    f'damping_split={split!r} for structure "{self.structure}"',
                    '"exact": only Kronecker structures split their damping',
                    "leave it out",
                )
            )


@dataclass(frozen=True, eq=False, repr=False)
class DenseMatrix(ParamMatrix):
    """A matrix kept entry by entry, in flat order."""

    matrix: Float[Tensor, "d d"]
    shapes: Shapes
    psd: bool = True
    examples: int | float | None = None
    """What sums were divided by; None where two estimates cannot be merged."""
    layers: Layers | None = None
    memory: int | None = None
    structure = "dense"

    @property
    def dtype(self) -> torch.dtype:
        """Of the entries."""
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        """Of the entries."""
        return self.matrix.device

    @property
    def is_psd(self) -> bool:
        """As built."""
        return self.psd

    @cached_property
    def operator(self) -> Block:
        """The same as one block."""
        return Block(self.matrix.unsqueeze(0), (1, 1, self.matrix.shape[0]), self.psd)

    def _block(self, params: Params) -> Tensor:
        return to_flat(params, self.shapes)[:, None, None]

    def _params(self, X: Tensor) -> Params:
        return from_flat(X.flatten(1), self.shapes)

    def _mv(self, params: Params) -> Params:
        return from_flat(to_flat(params, self.shapes) @ self.matrix, self.shapes)

    def _solve(self, params: Params, damping: float, split: str | None, tol: float, max_iterations: int) -> Params:
        self._refuse_split(split)
        return self._params(self.operator.power(self._block(params), -1.0, damping))

    def _power(self, params: Params, exponent: float, damping: float, split: str | None) -> Params:
        self._refuse_split(split)
        return self._params(self.operator.power(self._block(params), exponent, damping))

    def _sample(self, n: int, damping: float, generator: torch.Generator) -> Params:
        return self._params(self.operator.sample(n, damping, generator))

    def trace(self, samples: int = 0, seed: int = 0) -> Tensor:
        """Sum of the diagonal."""
        return self.matrix.trace()

    def frobenius(self, samples: int = 0, seed: int = 0) -> Tensor:
        """``‖M‖_F``."""
        return norm(self.matrix)

    def diagonal(self, samples: int = 0, seed: int = 0) -> ParamVector:
        """The diagonal."""
        return self._vector(self.matrix.diagonal())

    def logdet(
        self, damping: int | float = 0.0, *, damping_split: str | None = None, samples: int = 0, seed: int = 0
    ) -> Tensor:
        """``log det(M + λI)``."""
        self._refuse_split(damping_split)
        return self.operator.logdet(check_damping(damping))

    def eigenvalues(self, k: int | None = None) -> Tensor:
        """All eigenvalues, or the k largest, ascending."""
        if k is not None:
            self._check_k(k)
        return self.operator.spectrum[0][-(k or self.numel()) :]

    def eigh(self, k: int | None = None) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors, ascending."""
        if k is not None:
            self._check_k(k)
        values, vectors = self.operator._eigh
        kept = slice(-(k or self.numel()), None)
        return values[0][kept], vectors[0][:, kept]

    def to_dense(self) -> Float[Tensor, "d d"]:
        """Itself."""
        return self.matrix

    def _dense(self) -> "DenseMatrix":
        return self

    def layer(self, name: str) -> "DenseMatrix":
        """The diagonal block of one layer."""
        parts = find_layer(self.layers, self.shapes, name)
        keep = places(parts, self.shapes).to(self.device)
        block = self.matrix[keep][:, keep]
        return DenseMatrix(block, own_shapes(parts), self.psd, self.examples, {name: alone(parts)}, self.memory)

    def _scaled(self, factor: float) -> "DenseMatrix":
        return DenseMatrix(
            self.matrix * factor,
            self.shapes,
            self.psd and factor >= 0,
            self.examples,
            self.layers,
            self.memory,
        )

    def plus(self, other: ParamMatrix) -> "DenseMatrix | None":
        """Entries add up."""
        if not isinstance(other, DenseMatrix):
            return None
        psd = self.psd and other.psd
        return DenseMatrix(self.matrix + other.matrix, self.shapes, psd, None, self.layers, self.memory)

    def merge(self, other: "DenseMatrix") -> "DenseMatrix":
        """The estimate from both data sets together."""
        a, b = merge_weights(self, other)
        merged = a * self.matrix + b * other.matrix
        total = (self.examples or 0) + (other.examples or 0)
        return DenseMatrix(merged, self.shapes, self.psd and other.psd, total, self.layers, self.memory)

    def _stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"matrix": self.matrix}, {"psd": self.psd, "layers": to_json(self.layers)}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "DenseMatrix":
        """Another device or dtype."""
        check_dtype(dtype)
        moved = self.matrix.to(device=device, dtype=dtype)
        return DenseMatrix(moved, self.shapes, self.psd, self.examples, self.layers, self.memory)


@dataclass(frozen=True, eq=False, repr=False)
class WeightedSum(ParamMatrix):
    """``Σ c_i M_i``, not formed: every product goes to the parts."""

    terms: tuple[tuple[float, ParamMatrix], ...]

    @property
    def structure(self) -> str:  # type: ignore[override]
        """The parts' names."""
        return " + ".join(m.structure if c == 1 else f"{c:g} {m.structure}" for c, m in self.terms)

    @property
    def shapes(self) -> Shapes:  # type: ignore[override]
        """Of the parts."""
        return self.terms[0][1].shapes

    @property
    def memory(self) -> int | None:  # type: ignore[override]
        """Of the first part."""
        return self.terms[0][1].memory

    @property
    def dtype(self) -> torch.dtype:
        """Of the first part."""
        return self.terms[0][1].dtype

    @property
    def device(self) -> torch.device:
        """Of the first part."""
        return self.terms[0][1].device

    @property
    def is_psd(self) -> bool:
        """Whether it follows from the parts."""
        return all(c >= 0 and m.is_psd for c, m in self.terms)

    def _terms(self) -> tuple[tuple[float, ParamMatrix], ...]:
        return self.terms

    def _mv(self, params: Params) -> Params:
        total: Params = {}
        for c, m in self.terms:
            for name, t in m._mv(params).items():
                total[name] = c * t if name not in total else total[name] + c * t
        return total

    def trace(self, samples: int = 64, seed: int = 0) -> Tensor:
        """Sum of the parts'; standard errors add in squares."""
        parts = [(c, m.trace(samples, seed)) for c, m in self.terms]
        total = torch.stack([c * torch.as_tensor(t) for c, t in parts]).sum()
        errors = [c * t.standard_error for c, t in parts if isinstance(t, Estimate)]
        if not errors:
            return total
        return Estimate(total, standard_error=sum(e * e for e in errors) ** 0.5, samples=samples)

    def diagonal(self, samples: int = 64, seed: int = 0) -> ParamVector:
        """Sum of the parts'."""
        parts = [(c, m.diagonal(samples, seed)) for c, m in self.terms]
        total = parts[0][0] * parts[0][1]
        for c, part in parts[1:]:
            total = total + c * part
        errors = [(c * e) * (c * e) for c, p in parts if (e := p.standard_error) is not None]
        if not errors:
            return total
        squared = errors[0]
        for e in errors[1:]:
            squared = squared + e
        return ParamVector(total.dict(), ParamVector({k: t.sqrt() for k, t in squared.items()}))

    def _dense(self) -> DenseMatrix:
        matrix = torch.stack([c * m._dense().matrix for c, m in self.terms]).sum(0)
        return DenseMatrix(matrix, self.shapes, self.is_psd, memory=self.memory)

    def layer(self, name: str) -> "WeightedSum":
        """The parts' blocks."""
        return WeightedSum(tuple((c, m.layer(name)) for c, m in self.terms))

    def _scaled(self, factor: float) -> "WeightedSum":
        return WeightedSum(tuple((factor * c, m) for c, m in self.terms))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "WeightedSum":
        """Another device or dtype."""
        return WeightedSum(tuple((c, m.to(device, dtype)) for c, m in self.terms))


def merge_weights(first: ParamMatrix, second: ParamMatrix) -> tuple[float, float]:
    """Shares of two estimates in their union, by what their sums were divided by."""
    if type(first) is not type(second) or first.structure != second.structure:
        raise InputError(
            describe(
                f"a {getattr(second, 'structure', type(second).__name__)!r} matrix",
                f"another {first.structure!r} matrix",
                "estimate both alike",
            )
        )
    same_space((first, second))
    counts = [float(getattr(matrix, "examples", None) or 0) for matrix in (first, second)]
    if not all(counts):
        raise InputError(
            describe(
                "a matrix that is no plain mean over examples (a sum, a centered moment, a Hessian)",
                "two estimates from lw.fisher, lw.ggn or lw.gradient_moment",
                "estimate it once over all the data, or add the matrices",
            )
        )
    return counts[0] / sum(counts), counts[1] / sum(counts)


def same_space(matrices: Iterable[ParamMatrix]) -> None:
    """All must act on the same parameters."""
    first, *others = matrices
    for other in others:
        if dict(first.shapes) != dict(other.shapes):
            odd = sorted(set(first.shapes) ^ set(other.shapes)) or ["shapes"]
            raise InputError(
                describe(
                    f"matrices that differ in {', '.join(odd[:4])}",
                    "matrices on the same parameters",
                    "select the same layers for both",
                )
            )


def sub_shapes(shapes: Shapes, names: Iterable[str]) -> Mapping[str, tuple[int, ...]]:
    """Shapes of these parameters alone."""
    wanted = set(names)
    return {name: shape for name, shape in shapes.items() if name in wanted}
