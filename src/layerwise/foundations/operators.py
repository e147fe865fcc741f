"""Symmetric matrices acting on one block of parameters, ``X [*B, K, O, I]``: linear algebra without networks.

``vec`` is row-major, so that a block is a matrix on ``D = K·O·I`` numbers in the order of ``X.flatten()``.
Most operators have an orthogonal eigenbasis that is cheap to apply; `EigenOperator` derives every operation from it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.arithmetic import OwnArithmetic
from layerwise.foundations.errors import InputError, NumericalError, describe
from layerwise.foundations.linalg import guarded_eigh, squared_norm

OPERATORS: dict[str, type["BlockOperator"]] = {}
"""Operators by name, for loading."""


def check_damping(damping: Any) -> float:
    """λ ≥ 0, as a number."""
    if not isinstance(damping, int | float) and not (isinstance(damping, Tensor) and damping.numel() == 1):
        raise InputError(describe(f"damping={damping!r}", "a number ≥ 0", "pass e.g. damping=1e-3"))
    if not (float(damping) >= 0 and math.isfinite(damping)):
        raise InputError(describe(f"damping={float(damping)}", "a finite number ≥ 0", "pass e.g. damping=1e-3"))
    return float(damping)


def damped_spectrum(spectrum: Tensor, damping: float | Tensor, name: str, exponent: float = -1.0) -> Tensor:
    """``s + λ``, or an error that says which damping is needed for this power of it."""
    damped = spectrum + damping
    if exponent >= 0 and exponent == int(exponent):
        return damped
    low = float(damped.min()) if damped.numel() else 1.0
    floor = float(damped.max()) * torch.finfo(damped.dtype).eps if damped.numel() else 0.0
    if low < 0 or (low <= floor and exponent < 0):
        lowest = float(spectrum.min())
        needed = f"damping > {-lowest:.3g}" if lowest < 0 else "damping > 0"
        raise NumericalError(
            describe(
                f"{name} with smallest eigenvalue {lowest:.3g} and damping {_shown(damping)}",
                "a positive definite matrix after damping",
                f"pass {needed}",
            )
        )
    return damped


def _shown(damping: float | Tensor) -> str:
    return f"{float(torch.as_tensor(damping).min()):.3g}"


class BlockOperator(OwnArithmetic, ABC):
    """A symmetric matrix on ``[K, O, I]``."""

    kind: ClassVar[str]
    default_split: ClassVar[str] = "exact"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            OPERATORS[cls.kind] = cls

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(K, O, I)."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What is stored."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """What is stored beside tensors, as JSON."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> "BlockOperator":
        """The inverse of `tensors` and `options`."""

    def stored_shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Shapes that `tensors` must have for an operator on `shape`; None where nobody has said."""
        return None

    @abstractmethod
    def mv(self, X: Float[Tensor, "*B K O I"]) -> Float[Tensor, "*B K O I"]:
        """``M vec X``."""

    @abstractmethod
    def power(
        self, X: Float[Tensor, "*B K O I"], exponent: float, damping: float, split: str | None = None
    ) -> Float[Tensor, "*B K O I"]:
        """``(M + λI)^p vec X``."""

    @abstractmethod
    def sample(self, count: int, damping: float, generator: torch.Generator) -> Float[Tensor, "n K O I"]:
        """Draws from ``N(0, (M + λI)⁻¹)``."""

    @abstractmethod
    def trace(self) -> Float[Tensor, ""]:
        """Sum of the eigenvalues."""

    @abstractmethod
    def frobenius_squared(self) -> Float[Tensor, ""]:
        """Sum of the squared eigenvalues, in float64: of float32 numbers it may not be finite."""

    @abstractmethod
    def diagonal(self) -> Float[Tensor, "K O I"]:
        """The diagonal."""

    @abstractmethod
    def logdet(self, damping: float, split: str | None = None) -> Float[Tensor, ""]:
        """``log det(M + λI)``."""

    @abstractmethod
    def eigenvalues(self) -> Float[Tensor, "D"]:
        """All eigenvalues, ascending."""

    @abstractmethod
    def eigenvectors(self, chosen: Tensor) -> Float[Tensor, "n K O I"]:
        """Eigenvectors of the eigenvalues at these places of `eigenvalues()`."""

    @abstractmethod
    def scaled(self, factor: float) -> "BlockOperator":
        """``c M``."""

    def solve(
        self, X: Float[Tensor, "*B K O I"], damping: float, split: str | None = None
    ) -> Float[Tensor, "*B K O I"]:
        """``(M + λI)⁻¹ vec X``."""
        return self.power(X, -1.0, damping, split)

    def plus(self, other: "BlockOperator") -> "BlockOperator | None":
        """The sum in the same structure; None where it has none."""
        return None

    @property
    def is_psd(self) -> bool:
        """Whether the matrix is known to be positive semi-definite."""
        return True

    def numel(self) -> int:
        """D."""
        return math.prod(self.shape)

    def as_matrix(self) -> Float[Tensor, "D D"]:
        """The matrix itself."""
        first = next(iter(self.tensors().values()))
        eye = torch.eye(self.numel(), dtype=first.dtype, device=first.device)
        return self.mv(eye.view(-1, *self.shape)).flatten(1).mT

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "BlockOperator":
        """Another device or dtype."""
        moved = {k: t.to(device=device, dtype=dtype) for k, t in self.tensors().items()}
        return self.from_tensors(moved, self.options())


class EigenOperator(BlockOperator):
    """An operator whose orthogonal eigenbasis is cheap to apply: ``M = Q diag(s) Qᵀ``."""

    @property
    @abstractmethod
    def spectrum(self) -> Float[Tensor, "..."]:
        """Eigenvalues, in the shape of a rotated block."""

    @abstractmethod
    def rotate(self, X: Tensor) -> Tensor:
        """``Qᵀ vec X``."""

    @abstractmethod
    def unrotate(self, Y: Tensor) -> Tensor:
        """``Q Y``."""

    def damping_vector(self, damping: float, split: str | None) -> float | Tensor:
        """What is added to each eigenvalue."""
        return damping

    def power(
        self, X: Float[Tensor, "*B K O I"], exponent: float, damping: float, split: str | None = None
    ) -> Float[Tensor, "*B K O I"]:
        """``Q (s + λ)^p Qᵀ``."""
        damped = damped_spectrum(self.spectrum, self.damping_vector(damping, split), self.kind, exponent)
        return self.unrotate(self.rotate(X) * damped**exponent)

    def mv(self, X: Float[Tensor, "*B K O I"]) -> Float[Tensor, "*B K O I"]:
        """``Q s Qᵀ``."""
        return self.unrotate(self.rotate(X) * self.spectrum)

    def sample(self, count: int, damping: float, generator: torch.Generator) -> Float[Tensor, "n K O I"]:
        """``Q (s + λ)^{-1/2} z``."""
        s = damped_spectrum(self.spectrum, damping, self.kind)
        z = torch.randn(count, *s.shape, generator=generator, device=generator.device, dtype=s.dtype).to(s.device)
        return self.unrotate(z / s.sqrt())

    def trace(self) -> Float[Tensor, ""]:
        """``Σ s``."""
        return self.spectrum.sum()

    def frobenius_squared(self) -> Float[Tensor, ""]:
        """``Σ s²``."""
        return squared_norm(self.spectrum)

    def logdet(self, damping: float, split: str | None = None) -> Float[Tensor, ""]:
        """``Σ log(s + λ)``."""
        return damped_spectrum(self.spectrum, self.damping_vector(damping, split), self.kind).log().sum()

    def eigenvalues(self) -> Float[Tensor, "D"]:
        """Sorted spectrum."""
        return self.spectrum.flatten().sort().values

    def eigenvectors(self, chosen: Tensor) -> Float[Tensor, "n K O I"]:
        """Columns of Q."""
        where = self.spectrum.flatten().sort().indices[chosen]
        basis = torch.zeros(len(where), self.numel(), dtype=self.spectrum.dtype, device=self.spectrum.device)
        basis[torch.arange(len(where)), where] = 1
        return self.unrotate(basis.view(-1, *self.spectrum.shape))


@dataclass(frozen=True, eq=False)
class Diagonal(EigenOperator):
    """A diagonal matrix."""

    values: Float[Tensor, "K O I"]
    psd: bool = True
    kind = "diag"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(K, O, I)."""
        k, o, i = self.values.shape
        return k, o, i

    @property
    def is_psd(self) -> bool:
        """As built."""
        return self.psd

    @property
    def spectrum(self) -> Float[Tensor, "..."]:
        """The diagonal."""
        return self.values

    def rotate(self, X: Tensor) -> Tensor:
        """Already there."""
        return X

    def unrotate(self, Y: Tensor) -> Tensor:
        """Already there."""
        return Y

    def diagonal(self) -> Float[Tensor, "K O I"]:
        """The diagonal."""
        return self.values

    def scaled(self, factor: float) -> "Diagonal":
        """``c M``."""
        return replace(self, values=self.values * factor, psd=self.psd and factor >= 0)

    def plus(self, other: BlockOperator) -> BlockOperator | None:
        """Diagonals add up."""
        if not isinstance(other, Diagonal):
            return None
        return Diagonal(self.values + other.values, self.psd and other.psd)

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the diagonal."""
        return {"values": self.shape}

    def tensors(self) -> dict[str, Tensor]:
        """The diagonal."""
        return {"values": self.values}

    def options(self) -> dict[str, Any]:
        """Definiteness."""
        return {"psd": self.psd}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> "Diagonal":
        """The inverse of `tensors` and `options`."""
        return cls(tensors["values"], bool(options["psd"]))


@dataclass(frozen=True, eq=False)
class Block(EigenOperator):
    """Dense blocks: one for the whole layer (J = 1), or one for each group (J = K)."""

    matrix: Float[Tensor, "J P P"]
    block_shape: tuple[int, int, int]
    psd: bool = True
    kind = "block"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(K, O, I)."""
        return self.block_shape

    @property
    def is_psd(self) -> bool:
        """As built."""
        return self.psd

    @cached_property
    def _eigh(self) -> tuple[Tensor, Tensor]:
        return guarded_eigh(self.matrix, name="dense block", clamp=self.psd)

    @property
    def spectrum(self) -> Float[Tensor, "..."]:
        """[J, P]."""
        return self._eigh[0]

    def _flat(self, X: Tensor) -> Tensor:
        j, p = self.matrix.shape[:2]
        return X.reshape(*X.shape[:-3], j, p)

    def rotate(self, X: Tensor) -> Tensor:
        """``Uᵀ x``."""
        return torch.einsum("jpq,...jp->...jq", self._eigh[1], self._flat(X))

    def unrotate(self, Y: Tensor) -> Tensor:
        """``U y``."""
        return torch.einsum("jpq,...jq->...jp", self._eigh[1], Y).reshape(*Y.shape[:-2], *self.block_shape)

    def mv(self, X: Float[Tensor, "*B K O I"]) -> Float[Tensor, "*B K O I"]:
        """``M x``, without a decomposition."""
        return torch.einsum("jpq,...jq->...jp", self.matrix, self._flat(X)).reshape(X.shape)

    def trace(self) -> Float[Tensor, ""]:
        """Sum of the diagonal."""
        return self.matrix.diagonal(dim1=-2, dim2=-1).sum()

    def frobenius_squared(self) -> Float[Tensor, ""]:
        """Sum of squares."""
        return squared_norm(self.matrix)

    def diagonal(self) -> Float[Tensor, "K O I"]:
        """The diagonal."""
        return self.matrix.diagonal(dim1=-2, dim2=-1).reshape(self.block_shape)

    def as_matrix(self) -> Float[Tensor, "D D"]:
        """Blocks on the diagonal."""
        return self.matrix[0] if self.matrix.shape[0] == 1 else torch.block_diag(*self.matrix)

    def scaled(self, factor: float) -> "Block":
        """``c M``."""
        return Block(self.matrix * factor, self.block_shape, self.psd and factor >= 0)

    def plus(self, other: BlockOperator) -> BlockOperator | None:
        """Blocks of one kind add up."""
        if not isinstance(other, Block) or other.matrix.shape != self.matrix.shape:
            return None
        return Block(self.matrix + other.matrix, self.block_shape, self.psd and other.psd)

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one block, or one a group."""
        blocks = self.shape[0] if self.matrix.shape[0] == self.shape[0] else 1
        size = self.numel() // max(1, blocks)
        return {"matrix": (blocks, size, size)}

    def tensors(self) -> dict[str, Tensor]:
        """The blocks."""
        return {"matrix": self.matrix}

    def options(self) -> dict[str, Any]:
        """Shape and definiteness."""
        return {"shape": list(self.block_shape), "psd": self.psd}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> "Block":
        """The inverse of `tensors` and `options`."""
        k, o, i = options["shape"]
        return cls(tensors["matrix"], (k, o, i), bool(options["psd"]))
