"""``M = RᵀR`` with one row of R a cotangent and example: exact for the data given, best when rows are few."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.curvature.matrix import DenseMatrix, ParamMatrix, merge_weights
from layerwise.foundations.columns import Params, Shapes, check_dtype, from_flat, to_flat
from layerwise.foundations.errors import NumericalError, describe
from layerwise.foundations.linalg import guarded_eigh
from layerwise.foundations.linalg.checks import require_finite
from layerwise.foundations.operators import check_damping
from layerwise.foundations.vectors import ParamVector
from layerwise.layers.parts import Layers, alone, find_layer, own_shapes, places, to_json

PART = 2**22
"""Entries of the rows that are in float64 at a time: 32 MiB."""


@dataclass(frozen=True, eq=False, repr=False)
class LowRank(ParamMatrix):
    """Rows ``R [r, d]``, scaled so that ``M = RᵀR``."""

    R: Float[Tensor, "r d"]
    shapes: Shapes
    examples: int | float | None = None
    """What sums were divided by; None where two estimates cannot be merged."""
    layers: Layers | None = None
    memory: int | None = None
    structure = "lowrank"

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self.R.dtype

    @property
    def device(self) -> torch.device:
        """Of the rows."""
        return self.R.device

    def _gram(self) -> Float[Tensor, "n n"]:
        """The smaller of ``R Rᵀ`` and ``RᵀR``, in float64."""
        r, d = self.R.shape
        return _wide_gram(self.R if r <= d else self.R.mT)

    def _floor(self) -> float:
        """Up to this part of the largest, eigenvalues are rounding errors.

        Rows that are rounded to ε have singular values that are off by about ε of the largest: independent errors in
        N rows add up as √N, as the rows themselves do, so that there is no N in it. Eigenvalues are their squares.
        """
        return (8 * torch.finfo(self.dtype).eps) ** 2

    @cached_property
    def _spectral(self) -> tuple[Tensor, Tensor]:
        """Non-zero eigenvalues s in float64, ascending, and eigenvectors V [d, rank].

        V is in float64 where that is less than the rows themselves: elsewhere it has their dtype.
        """
        r, d = self.R.shape
        if self.dtype == torch.float64:
            return self._by_singular_values()
        values, U = guarded_eigh(self._gram(), name="Gram matrix of the rows" if r <= d else "low-rank matrix")
        kept = values > values.max() * self._floor()
        values, U = values[kept], U[:, kept]
        if r > d:
            return values, U
        U = U / values.sqrt()
        parts, squares = [], torch.zeros_like(values)
        for columns in self.R.split(max(1, PART // r), dim=1):
            part = columns.double().mT @ U
            squares += part.square().sum(0)  # ones, but for the rounding of the smallest eigenvalues
            parts.append(part.to(self.dtype))
        return values * squares, torch.cat(parts) / squares.sqrt().to(self.dtype)

    def _by_singular_values(self) -> tuple[Tensor, Tensor]:
        """Of rows in float64: a Gram matrix would need twice their digits, and there are none."""
        r, d = self.R.shape
        require_finite(self.R, "low-rank matrix")
        small = self.R if r <= d else torch.linalg.qr(self.R, mode="r").R
        _, sigma, Vh = torch.linalg.svd(small, full_matrices=False)
        values, V = sigma.square().flip(0), Vh.mT.flip(1)
        kept = values > values.max() * self._floor()
        return values[kept], V[:, kept]

    def _fn(self, params: Params, on_range: Tensor, elsewhere: float) -> Params:
        """``V f(s) Vᵀ + f(0) (I − V Vᵀ)``."""
        V = self._spectral[1]
        x = to_flat(params, self.shapes).to(V.dtype)
        inside = x @ V
        on_range = on_range.to(V.dtype)
        if V.shape[1] == V.shape[0]:  # nothing elsewhere: ``x − V Vᵀ x`` would be rounding errors, times f(0)
            out = (inside * on_range) @ V.mT
        else:
            outside = x - inside @ V.mT
            outside = outside - (outside @ V) @ V.mT  # once more: rounding errors in the range, times f(0), are large
            out = (inside * on_range) @ V.mT + elsewhere * outside
        return from_flat(out.to(self.dtype), self.shapes)

    def _mv(self, params: Params) -> Params:
        return from_flat((to_flat(params, self.shapes) @ self.R.mT) @ self.R, self.shapes)

    def _quad(self, params: Params) -> Float[Tensor, "B"]:
        return (to_flat(params, self.shapes) @ self.R.mT).square().sum(1)

    def _solve(self, params: Params, damping: float, split: str | None, tol: float, max_iterations: int) -> Params:
        return self._power(params, -1.0, damping, split)

    def _power(self, params: Params, exponent: float, damping: float, split: str | None) -> Params:
        self._refuse_split(split)
        s = self._spectral[0]
        self._check_rank(damping, exponent)
        elsewhere = damping**exponent if damping > 0 else 1.0 if exponent == 0 else 0.0
        return self._fn(params, (s + damping) ** exponent, elsewhere)

    def _check_rank(self, damping: float, exponent: float = -1.0) -> None:
        rank, d = len(self._spectral[0]), self.numel()
        if damping == 0 and exponent < 0 and rank < d:
            raise NumericalError(
                describe(
                    f"damping=0 and a matrix of rank {rank} on {d} parameters",
                    "a positive definite matrix",
                    "pass damping > 0",
                )
            )

    def _sample(self, n: int, damping: float, generator: torch.Generator) -> Params:
        z = torch.randn(n, self.numel(), generator=generator, device=generator.device, dtype=self.dtype)
        return self._power(from_flat(z.to(self.device), self.shapes), -0.5, damping, None)

    def trace(self, samples: int = 0, seed: int = 0) -> Tensor:
        """``‖R‖²``."""
        return self.R.square().sum()

    def frobenius(self, samples: int = 0, seed: int = 0) -> Tensor:
        """``‖R Rᵀ‖``, by the smaller of the two products."""
        return self._gram().norm().to(self.dtype)

    def diagonal(self, samples: int = 0, seed: int = 0) -> ParamVector:
        """Sum of squared rows."""
        return self._vector(self.R.square().sum(0))

    def logdet(
        self, damping: int | float = 0.0, *, damping_split: str | None = None, samples: int = 0, seed: int = 0
    ) -> Tensor:
        """``Σ log(s + λ) + (d − r) log λ``."""
        self._refuse_split(damping_split)
        damping = check_damping(damping)
        self._check_rank(damping)
        s = self._spectral[0]
        rest = self.numel() - len(s)
        base = (s + damping).log().sum()
        return (base + rest * math.log(damping) if rest else base).to(self.dtype)

    def eigenvalues(self, k: int | None = None) -> Tensor:
        """All eigenvalues (zeros included), or the k largest, ascending."""
        if k is not None:
            self._check_k(k)
        s = self._spectral[0].to(self.dtype)
        full = torch.cat([s.new_zeros(self.numel() - len(s)), s])
        return full[-(k or self.numel()) :]

    def eigh(self, k: int | None = None) -> tuple[Tensor, Tensor]:
        """The k largest from the Gram matrix of the rows."""
        if k is not None:
            self._check_k(k)
        values, V = self._spectral
        if k is not None and k <= len(values):
            return values[-k:].to(self.dtype), V[:, -k:].to(self.dtype)
        self._require_dense()
        values, V = self._spectral
        null = torch.linalg.qr(V.double(), mode="complete").Q[:, len(values) :]  # any basis of what is orthogonal to V
        first = 0 if k is None else -k
        return self.eigenvalues(k), torch.cat([null.to(self.dtype), V.to(self.dtype)], dim=1)[:, first:]

    def _dense(self) -> DenseMatrix:
        matrix = _wide_gram(self.R.mT).to(self.dtype)
        return DenseMatrix(matrix, self.shapes, True, self.examples, self.layers, self.memory)

    def layer(self, name: str) -> "LowRank":
        """The columns of one layer."""
        parts = find_layer(self.layers, self.shapes, name)
        columns = self.R[:, places(parts, self.shapes).to(self.device)]
        return replace(self, R=columns, shapes=own_shapes(parts), layers={name: alone(parts)})

    def _scaled(self, factor: float) -> ParamMatrix:
        if factor < 0:
            return super()._scaled(factor)
        return replace(self, R=self.R * factor**0.5)

    def plus(self, other: ParamMatrix) -> "LowRank | None":
        """Rows of both."""
        if not isinstance(other, LowRank):
            return None
        return replace(self, R=torch.cat([self.R, other.R]), examples=None)

    def merge(self, other: "LowRank") -> "LowRank":
        """The estimate from both data sets together."""
        a, b = merge_weights(self, other)
        rows = torch.cat([self.R * a**0.5, other.R * b**0.5])
        return replace(self, R=rows, examples=(self.examples or 0) + (other.examples or 0))

    def _stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"R": self.R}, {"layers": to_json(self.layers)}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "LowRank":
        """Another device or dtype."""
        check_dtype(dtype)
        return replace(self, R=self.R.to(device=device, dtype=dtype))


def _wide_gram(X: Float[Tensor, "n m"]) -> Float[Tensor, "n n"]:
    """``X Xᵀ`` in float64.

    A Gram matrix squares singular values: in float32, which has 7 digits, eigenvalues below 1e-7 of the largest are
    rounding errors, and the more the longer the sums. Float64 has more than twice the digits: products of entries are
    exact, and all that float32 rows can carry survives. (A singular value decomposition of the rows would need a copy
    of them and another for its vectors, and on a GPU products are what is fast.) Only some columns of X are in
    float64 at a time: all of N examples × D parameters would take twice the memory of the rows again.
    """
    n = X.shape[0]
    total = torch.zeros(n, n, dtype=torch.float64, device=X.device)
    for part in X.split(max(1, PART // max(1, n)), dim=1):
        wide = part.double()
        total.addmm_(wide, wide.mT)
    return total
