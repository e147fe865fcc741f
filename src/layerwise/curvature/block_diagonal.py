"""One operator a layer: diag, quasidiag, block, kfac, ekfac and mixtures of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.curvature.matrix import DenseMatrix, ParamMatrix, merge_weights
from layerwise.foundations.columns import Params, as_rows, check_dtype
from layerwise.foundations.errors import InputError, LayerwiseError
from layerwise.foundations.kronecker import InputFactor, Kronecker
from layerwise.foundations.operators import BlockOperator, check_damping
from layerwise.foundations.vectors import ParamVector
from layerwise.layers.form import Part
from layerwise.layers.parts import alone, layers_of
from layerwise.layers.table import LayerSpec, LayerTable


@dataclass(frozen=True, eq=False, repr=False)
class BlockDiagonal(ParamMatrix):
    """Layers do not interact; each has an operator of its own."""

    table: LayerTable
    operators: Mapping[str, BlockOperator]
    structure: str
    examples: int | float | None = None
    """What sums were divided by; None where two estimates cannot be merged."""
    positions: Mapping[str, int] | None = None
    """Rows that each layer's input factor was averaged over."""
    memory: int | None = None
    diagonal_error: ParamVector | None = None
    """Standard error of a diagonal that was estimated."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:  # type: ignore[override]
        """Of the parameters."""
        return self.table.shapes

    @property
    def dtype(self) -> torch.dtype:
        """Of the first operator."""
        return next(iter(self._first().tensors().values())).dtype

    @property
    def device(self) -> torch.device:
        """Of the first operator."""
        return next(iter(self._first().tensors().values())).device

    @property
    def is_psd(self) -> bool:
        """Whether every block is."""
        return all(op.is_psd for op in self.operators.values())

    def _first(self) -> BlockOperator:
        return next(iter(self.operators.values()))

    def _each(self, params: Params, fn: str, *args: object) -> Params:
        blocks = self.table.to_blocks(params)
        out = {}
        for name, X in blocks.items():
            with _named(name):
                out[name] = getattr(self.operators[name], fn)(X, *args)
        return self.table.to_params(out)

    def _of_all(self, fn: str, *args: object) -> dict[str, Tensor]:
        """What every layer's operator answers."""
        found = {}
        for name, op in self.operators.items():
            with _named(name):
                found[name] = getattr(op, fn)(*args)
        return found

    def _mv(self, params: Params) -> Params:
        return self._each(params, "mv")

    def _solve(self, params: Params, damping: float, split: str | None, tol: float, max_iterations: int) -> Params:
        return self._each(params, "solve", damping, split)

    def _power(self, params: Params, exponent: float, damping: float, split: str | None) -> Params:
        return self._each(params, "power", exponent, damping, split)

    def _sample(self, n: int, damping: float, generator: torch.Generator) -> Params:
        return self.table.to_params(self._of_all("sample", n, damping, generator))

    def trace(self, samples: int = 0, seed: int = 0) -> Tensor:
        """Sum over layers."""
        return torch.stack([*self._of_all("trace").values()]).sum()

    def frobenius(self, samples: int = 0, seed: int = 0) -> Tensor:
        """Root of the sum of squares over layers."""
        squares = [squared.double() for squared in self._of_all("frobenius_squared").values()]
        return torch.stack(squares).sum().sqrt().to(self.dtype)

    def diagonal(self, samples: int = 0, seed: int = 0) -> ParamVector:
        """Every layer's diagonal."""
        values = self.table.to_params(self._of_all("diagonal"))
        return ParamVector(values, self.diagonal_error)

    def logdet(
        self, damping: int | float = 0.0, *, damping_split: str | None = None, samples: int = 0, seed: int = 0
    ) -> Tensor:
        """Sum over layers of ``log det(M_l + λI)``; exact damping unless `damping_split` says otherwise."""
        damping = check_damping(damping)
        return torch.stack([*self._of_all("logdet", damping, damping_split).values()]).sum()

    def eigenvalues(self, k: int | None = None) -> Tensor:
        """All eigenvalues, or the k largest, ascending."""
        if k is not None:
            self._check_k(k)
        return torch.cat([*self._of_all("eigenvalues").values()]).sort().values[-(k or self.numel()) :]

    def eigh(self, k: int | None = None) -> tuple[Tensor, Tensor]:
        """Eigenvalues ascending and eigenvectors as columns; each vector lives in one layer."""
        if k is None:
            self._require_dense()
        else:
            self._check_k(k)
        values, owners, places = [], [], []
        for index, own in enumerate(self._of_all("eigenvalues").values()):
            values.append(own)
            owners.append(torch.full_like(own, index, dtype=torch.long))
            places.append(torch.arange(len(own), device=own.device))
        order = torch.cat(values).sort().indices[-(k or self.numel()) :]
        owner, place = torch.cat(owners)[order], torch.cat(places)[order]
        blocks = {}
        for index, (name, op) in enumerate(self.operators.items()):
            blocks[name] = torch.zeros(len(order), *op.shape, dtype=self.dtype, device=self.device)
            mine = owner == index
            if bool(mine.any()):
                blocks[name][mine] = op.eigenvectors(place[mine]).to(self.dtype)
        rows = self.table.to_params(blocks)
        vectors = torch.cat([as_rows(rows[p]) for p in self.shapes], dim=1).mT
        return torch.cat(values)[order], vectors

    def layer(self, name: str) -> "BlockDiagonal":
        """The block of one layer; rows of a packed parameter become a parameter of their own."""
        spec = _standalone(self.table.spec(name))
        shapes = {part.name: part.shape for part in spec.form.parts}
        table = replace(self.table, layers=(spec,), shapes=shapes, untracked={})
        positions = None if self.positions is None else {name: self.positions.get(name, 0)}
        error = None
        if self.diagonal_error is not None:
            found = self.diagonal_error.dict()
            parts = zip(shapes, self.table.spec(name).form.parts, strict=True)
            error = ParamVector({key: part.of(found) for key, part in parts})
        operators = {name: self.operators[name]}
        return replace(self, table=table, operators=operators, positions=positions, diagonal_error=error)

    def _scaled(self, factor: float) -> ParamMatrix:
        try:
            error = None if self.diagonal_error is None else abs(factor) * self.diagonal_error
            scaled = {k: op.scaled(factor) for k, op in self.operators.items()}
            return replace(self, operators=scaled, diagonal_error=error)
        except InputError:  # a Kronecker product cannot be negative
            return super()._scaled(factor)

    def plus(self, other: ParamMatrix) -> "BlockDiagonal | None":
        """The sum, where every layer's operator has one."""
        if not isinstance(other, BlockDiagonal) or other.table.names() != self.table.names():
            return None
        sums = {name: op.plus(other.operators[name]) for name, op in self.operators.items()}
        if any(op is None for op in sums.values()) or self.diagonal_error or other.diagonal_error:
            return None  # standard errors add up in a lazy sum
        return replace(self, operators=sums, examples=None, positions=None)

    def merge(self, other: "BlockDiagonal") -> ParamMatrix:
        """The estimate from both data sets together.

        Diagonals, blocks and Kronecker factors merge exactly (factors separately, by their counts of rows);
        where a structure cannot hold the union (two different eigenbases), the result is a lazy weighted sum.
        """
        a, b = merge_weights(self, other)
        merged: dict[str, BlockOperator] = {}
        for name, op in self.operators.items():
            joint = self._merged(name, op, other, a, b)
            if joint is None:
                return a * self + b * other
            merged[name] = joint
        total = (self.examples or 0) + (other.examples or 0)
        mine, yours = self.positions or {}, other.positions or {}
        positions = {k: mine.get(k, 0) + yours.get(k, 0) for k in merged}
        return replace(self, operators=merged, examples=total, positions=positions)

    def _merged(self, name: str, op: BlockOperator, other: "BlockDiagonal", a: float, b: float) -> BlockOperator | None:
        theirs = other.operators[name]
        if not isinstance(op, Kronecker) or not isinstance(theirs, Kronecker):
            return op.scaled(a).plus(theirs.scaled(b))
        s, t = (m.positions.get(name, 0) if m.positions else 0 for m in (self, other))
        share = s / (s + t) if s + t else 0.5
        A = InputFactor(share * op.A.values + (1 - share) * theirs.A.values, op.A.taps)
        return Kronecker(A, a * op.G + b * theirs.G, op.solve_split)

    def _stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, layers = {}, []
        for spec in self.table.layers:
            operator = self.operators[spec.name]
            for key, tensor in operator.tensors().items():
                tensors[f"{spec.name}/{key}"] = tensor
            layers.append(
                {
                    "name": spec.name,
                    "kind": spec.kind,
                    "reason": spec.reason,
                    "form": spec.form.to_json(),
                    "operator": operator.kind,
                    "tensors": list(operator.tensors()),
                    "options": operator.options(),
                }
            )
        return tensors, {"structure": self.structure, "layers": layers, "positions": dict(self.positions or {})}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "BlockDiagonal":
        """Another device or dtype."""
        check_dtype(dtype)
        return replace(self, operators={k: op.to(device, dtype) for k, op in self.operators.items()})

    def _dense(self) -> DenseMatrix:
        eye = torch.eye(self.numel(), dtype=self.dtype, device=self.device)
        layers = layers_of(self.table)
        return DenseMatrix(self._columns(eye), self.shapes, self.is_psd, self.examples, layers, self.memory)

    def to_dense(self) -> Float[Tensor, "d d"]:
        """The matrix itself, in flat order."""
        self._require_dense()
        return self._dense().matrix


@contextmanager
def _named(layer: str) -> Iterator[None]:
    """Errors of an operator, with the layer's name."""
    try:
        yield
    except LayerwiseError as error:
        raise type(error)(f"Layer {layer!r}: {error}") from error


def _standalone(spec: LayerSpec) -> LayerSpec:
    """A layer whose parts are whole parameters."""

    def whole(part: Part | None) -> Part | None:
        return None if part is None else alone((part,))[0]

    form = replace(spec.form, weight=whole(spec.form.weight), bias=whole(spec.form.bias))
    return replace(spec, form=form, sites=())
