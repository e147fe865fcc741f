"""``M = RᵀR`` with one row of R a cotangent and example: exact for the data given, best when rows are few."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.curvature.matrix import ParamMatrix, merge_weights
from layerwise.foundations.columns import Params, Shapes, check_dtype, from_flat, to_flat
from layerwise.foundations.errors import NumericalError, describe
from layerwise.foundations.linalg import guarded_eigh
from layerwise.foundations.operators import check_damping
from layerwise.foundations.vectors import ParamVector
from layerwise.layers.parts import Layers, alone, find_layer, own_shapes, places


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

    @cached_property
    def _spectral(self) -> tuple[Tensor, Tensor]:
        """Non-zero eigenvalues s and eigenvectors V [d, rank], from the smaller Gram matrix."""
        r, d = self.R.shape
        if r <= d:
            values, U = guarded_eigh(self.R @ self.R.mT, name="Gram matrix of the rows")
        else:
            values, U = guarded_eigh(self.R.mT @ self.R, name="low-rank matrix")
        kept = values > values.max().clamp_min(0) * max(r, d) * torch.finfo(values.dtype).eps
        values, U = values[kept], U[:, kept]
        V = self.R.mT @ (U / values.sqrt()) if r <= d else U
        return values, V

    def _fn(self, params: Params, on_range: Tensor, elsewhere: float) -> Params:
        """``V f(s) Vᵀ + f(0) (I − V Vᵀ)``."""
        x = to_flat(params, self.shapes)
        V = self._spectral[1]
        inside = x @ V
        return from_flat((inside * (on_range - elsewhere)) @ V.mT + elsewhere * x, self.shapes)

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
        r, d = self.R.shape
        return (self.R @ self.R.mT if r <= d else self.R.mT @ self.R).norm()

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
        return base + rest * torch.log(torch.tensor(damping, dtype=s.dtype, device=s.device)) if rest else base

    def eigenvalues(self, k: int | None = None) -> Tensor:
        """All eigenvalues (zeros included), or the k largest, ascending."""
        if k is not None:
            self._check_k(k)
        s = self._spectral[0]
        full = torch.cat([s.new_zeros(self.numel() - len(s)), s])
        return full[-(k or self.numel()) :]

    def eigh(self, k: int | None = None) -> tuple[Tensor, Tensor]:
        """The k largest from the Gram matrix of the rows."""
        values, V = self._spectral
        if k is not None and k <= len(values):
            self._check_k(k)
            return values[-k:], V[:, -k:]
        return super().eigh(k)

    def _dense(self) -> "object":
        from layerwise.curvature.dense import DenseMatrix

        return DenseMatrix(self.R.mT @ self.R, self.shapes, True, self.examples, self.layers, self.memory)

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

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "LowRank":
        """Another device or dtype."""
        check_dtype(dtype)
        return replace(self, R=self.R.to(device=device, dtype=dtype))
