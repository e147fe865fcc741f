"""Kernels made from a kernel: centred, normalized."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.kernel.kernel import Kernel, MatrixKernel

CENTERINGS = ("per-output", "global", "none")


def check_centering(centering: str) -> None:
    """A centering by name."""
    if centering not in CENTERINGS:
        raise InputError(describe(f"centering={centering!r}", '"per-output", "global" or "none"', "choose one of them"))


def center(rows: Float[Tensor, "*B NP"], functions: int, centering: str) -> Float[Tensor, "*B NP"]:
    """Vectors over functions of examples, minus their mean over examples (for each function) or over everything."""
    check_centering(centering)
    if centering == "none":
        return rows
    if centering == "global":
        return rows - rows.mean(-1, keepdim=True)
    by_example = rows.unflatten(-1, (-1, functions))
    return (by_example - by_example.mean(-2, keepdim=True)).flatten(-2)


@dataclass(frozen=True, eq=False, repr=False)
class Derived(Kernel):
    """A kernel that is made from another of the same shape."""

    of: Kernel

    @property
    def n(self) -> int:  # type: ignore[override]
        """N."""
        return self.of.n

    @property
    def m(self) -> int:  # type: ignore[override]
        """M."""
        return self.of.m

    @property
    def out_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Of the functions."""
        return self.of.out_shape

    @property
    def is_square(self) -> bool:  # type: ignore[override]
        """As the other."""
        return self.of.is_square

    @property
    def dtype(self) -> torch.dtype:
        """As the other."""
        return self.of.dtype

    @property
    def device(self) -> torch.device:
        """As the other."""
        return self.of.device

    def has_matrix(self) -> bool:
        """As the other."""
        return self.of.has_matrix()

    @cached_property
    def _matrix(self) -> Tensor:
        return self._from(self.of.matrix())

    @abstractmethod
    def _from(self, K: Tensor) -> Tensor:
        """This kernel's matrix from the other's."""

    def matrix(self) -> Float[Tensor, "NP MP"]:
        """Formed from the other's matrix."""
        return self._matrix


@dataclass(frozen=True, eq=False, repr=False)
class Centered(Derived):
    """``C K C``, with the centering matrices of rows and columns."""

    centering: str = "per-output"

    def _from(self, K: Tensor) -> Tensor:
        rows = center(K, self.functions, self.centering)
        return center(rows.mT, self.functions, self.centering).mT.contiguous()

    def apply(self, u: Float[Tensor, "B MP"]) -> Float[Tensor, "B NP"]:
        """``C (K (C u))``."""
        return center(self.of.apply(center(u, self.functions, self.centering)), self.functions, self.centering)

    def diag(self) -> Float[Tensor, "NP"]:
        """``K_ii − 2 ⟨φ_i, φ̄⟩ + ‖φ̄‖²``, through products with the indicator vectors of the means."""
        self.require_square("the diagonal")
        if self.has_matrix():
            return self.matrix().diagonal()
        P, rows = self.functions, self.shape[0]
        if self.centering == "global":
            means = torch.full((1, rows), 1 / rows, dtype=self.dtype, device=self.device)
        else:
            means = torch.eye(P, dtype=self.dtype, device=self.device).repeat(1, self.n) / self.n
        with_mean = self.of.apply(means)  # ⟨φ_i, φ̄_p⟩
        squares = (with_mean * means).sum(1)  # ‖φ̄_p‖²
        if self.centering == "global":
            return self.of.diag() - 2 * with_mean[0] + squares
        own = with_mean.view(P, self.n, P).diagonal(dim1=0, dim2=2)  # each function with its own mean: N, P
        return self.of.diag() - 2 * own.reshape(-1) + squares.repeat(self.n)

    def cross(self, x: Any) -> Kernel:
        """New examples, centred by the mean of the second set."""
        between = self.of.cross(x).matrix()
        self.require_square("centred features at new points")
        mean = _row_means(self.of.matrix(), self.functions, self.centering)  # ⟨φ̄, φ_j⟩
        shifted = between - mean.repeat(between.shape[0] // mean.shape[0], 1)
        return MatrixKernel(center(shifted, self.functions, self.centering), self.out_shape, is_square=False)


def _row_means(K: Tensor, functions: int, centering: str) -> Tensor:
    if centering == "global":
        return K.mean(0, keepdim=True)
    return K.unflatten(0, (-1, functions)).mean(0)


@dataclass(frozen=True, eq=False, repr=False)
class Normalized(Derived):
    """Cosines between features."""

    @cached_property
    def _scales(self) -> tuple[Tensor, Tensor]:
        first, second = self.of.diagonals()
        return _inverse_root(first), _inverse_root(second)

    def _from(self, K: Tensor) -> Tensor:
        rows, columns = self._scales
        return rows.unsqueeze(1) * K * columns

    def apply(self, u: Float[Tensor, "B MP"]) -> Float[Tensor, "B NP"]:
        """``D (K (D u))``."""
        rows, columns = self._scales
        return rows * self.of.apply(columns * u)

    def diag(self) -> Float[Tensor, "NP"]:
        """Ones, but where a feature is zero."""
        self.require_square("the diagonal")
        return self.of.diag() * self._scales[0].square()

    def cross(self, x: Any) -> Kernel:
        """Cosines with new examples."""
        return Normalized(self.of.cross(x))


def _inverse_root(diagonal: Tensor) -> Tensor:
    return torch.where(diagonal > 0, diagonal.clamp_min(torch.finfo(diagonal.dtype).tiny).rsqrt(), 0.0)
