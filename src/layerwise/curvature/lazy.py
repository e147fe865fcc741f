"""Sums and restrictions that are not formed: every product goes to the parts."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerwise.curvature.matrix import SMALL, ParamMatrix, same_space
from layerwise.foundations.columns import Params, Shapes
from layerwise.foundations.linalg import Estimate
from layerwise.foundations.vectors import ParamVector
from layerwise.layers.form import Part
from layerwise.layers.parts import own_name, own_shapes


def add(a: ParamMatrix, b: ParamMatrix) -> ParamMatrix:
    """The sum in one structure where there is one, else lazily."""
    same_space((a, b))
    return a.plus(b) or WeightedSum((*_terms(a), *_terms(b)))


def _terms(m: ParamMatrix) -> tuple[tuple[float, ParamMatrix], ...]:
    return m.terms if isinstance(m, WeightedSum) else ((1.0, m),)


@dataclass(frozen=True, eq=False, repr=False)
class WeightedSum(ParamMatrix):
    """``Σ c_i M_i``."""

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

    def _dense(self) -> Any:
        from layerwise.curvature.dense import DenseMatrix

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


@dataclass(frozen=True, eq=False, repr=False)
class Restricted(ParamMatrix):
    """The diagonal block of some parameters: the rest of the vector is zero."""

    whole: ParamMatrix
    parts: tuple[Part, ...]
    memory: int | None = None

    @property
    def structure(self) -> str:  # type: ignore[override]
        """Of the whole."""
        return self.whole.structure

    @property
    def shapes(self) -> Shapes:  # type: ignore[override]
        """Of these parameters."""
        return own_shapes(self.parts)

    @property
    def dtype(self) -> torch.dtype:
        """Of the whole."""
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        """Of the whole."""
        return self.whole.device

    @property
    def is_psd(self) -> bool:
        """Of the whole."""
        return self.whole.is_psd

    def _mv(self, params: Params) -> Params:
        columns = next(iter(params.values())).shape[0]
        padded = {
            k: torch.zeros(columns, *shape, dtype=self.dtype, device=self.device)
            for k, shape in self.whole.shapes.items()
        }
        for part in self.parts:
            part.of(padded).copy_(params[own_name(part)])
        out = self.whole._mv(padded)
        return {own_name(part): part.of(out) for part in self.parts}

    def _dense(self) -> Any:
        if self.whole.numel() > SMALL:
            return super()._dense()
        from layerwise.curvature.dense import DenseMatrix

        whole = DenseMatrix(self.whole.to_dense(), self.whole.shapes, self.is_psd, layers={"": self.parts})
        return whole.layer("")

    def trace(self, samples: int = 64, seed: int = 0) -> Tensor:
        """Sum of the diagonal where that is exact, else an estimate."""
        diagonal = self.diagonal(samples, seed)
        return diagonal.flat().sum() if diagonal.standard_error is None else super().trace(samples, seed)

    def diagonal(self, samples: int = 64, seed: int = 0) -> ParamVector:
        """These entries of the whole's."""
        whole = self.whole.diagonal(samples, seed)
        error = None if whole.standard_error is None else self._own(whole.standard_error)
        return ParamVector(self._own(whole).dict(), error)

    def _own(self, whole: ParamVector) -> ParamVector:
        return ParamVector({own_name(part): part.of(whole.dict()) for part in self.parts})

    def layer(self, name: str) -> ParamMatrix:
        """A layer inside."""
        return self.whole.layer(name)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Restricted":
        """Another device or dtype."""
        return replace(self, whole=self.whole.to(device, dtype))
