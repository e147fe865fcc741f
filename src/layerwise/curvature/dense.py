"""The whole matrix, every layer with every other."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.curvature.matrix import ParamMatrix, merge_weights
from layerwise.foundations.columns import Params, Shapes, check_dtype, from_flat, to_flat
from layerwise.foundations.linalg import norm
from layerwise.foundations.operators import Block, check_damping
from layerwise.foundations.vectors import ParamVector
from layerwise.layers.parts import Layers, alone, find_layer, own_shapes, places


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

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "DenseMatrix":
        """Another device or dtype."""
        check_dtype(dtype)
        moved = self.matrix.to(device=device, dtype=dtype)
        return DenseMatrix(moved, self.shapes, self.psd, self.examples, self.layers, self.memory)
