"""Kronecker products ``G ⊗ A`` on ``[K, O, I]``, and their eigenbasis with corrected eigenvalues.

With row-major ``vec``, ``(G ⊗ A) vec X = vec(G X Aᵀ)``: A acts on inputs, G on outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.linalg import guarded_cholesky, guarded_eigh
from layerwise.foundations.operators import BlockOperator, EigenOperator, damped_spectrum

SPLITS = ("exact", "trace", "equal")


def check_split(split: str | None, default: str) -> str:
    """A damping split by name."""
    if split is None:
        return default
    if split not in SPLITS:
        raise InputError(not_one_of("damping_split", split, SPLITS))
    return split


@dataclass(frozen=True, eq=False)
class Basis:
    """An orthogonal basis of the inputs: full, on channels alone (each kernel offset alike), or the identity."""

    vectors: Float[Tensor, "K c c"] | None
    taps: int = 1

    def rotate(self, X: Tensor) -> Tensor:
        """``X U`` along the last axis."""
        return self._apply(X, self.vectors)

    def unrotate(self, Y: Tensor) -> Tensor:
        """``Y Uᵀ``."""
        return self._apply(Y, None if self.vectors is None else self.vectors.mT)

    def _apply(self, X: Tensor, U: Tensor | None) -> Tensor:
        if U is None:
            return X
        if self.taps == 1:
            return X @ U
        channels = X.unflatten(-1, (-1, self.taps))
        return torch.einsum("...koct,kcd->...kodt", channels, U).flatten(-2)

    def dense(self, inputs: int, groups: int, like: Tensor) -> Tensor:
        """``[K, I, I]``."""
        eye = torch.eye(inputs, dtype=like.dtype, device=like.device).expand(groups, 1, inputs, inputs)
        return self.rotate(eye.movedim(1, 2).reshape(groups, inputs, inputs).unsqueeze(0))[0]


@dataclass(frozen=True, eq=False)
class InputFactor:
    """A: dense ``[K, I, I]``, diagonal ``[K, I]`` (one-hot inputs), or ``A_ch ⊗ I_taps`` (SUA)."""

    values: Tensor
    taps: int = 1

    @property
    def is_diagonal(self) -> bool:
        """Whether only the diagonal is kept."""
        return self.values.ndim == 2

    @property
    def inputs(self) -> int:
        """I."""
        return self.values.shape[-1] * self.taps

    def right(self, X: Tensor) -> Tensor:
        """``X A``."""
        return X * self.values.unsqueeze(-2) if self.is_diagonal else Basis(self.values, self.taps).rotate(X)

    @cached_property
    def eigh(self) -> tuple[Float[Tensor, "K I"], Basis]:
        """Eigenvalues in the order of the basis."""
        if self.is_diagonal:
            return self.values, Basis(None)
        values, vectors = guarded_eigh(self.values, name="input factor A")
        return values.repeat_interleave(self.taps, -1), Basis(vectors, self.taps)

    def trace(self) -> Float[Tensor, "K"]:
        """Trace of each group's factor."""
        return self.diagonal().sum(-1)

    def square_sum(self) -> Float[Tensor, "K"]:
        """Squared Frobenius norm of each group's factor, in float64."""
        return _squares(self.values) * self.taps

    def diagonal(self) -> Float[Tensor, "K I"]:
        """The diagonal."""
        if self.is_diagonal:
            return self.values
        return self.values.diagonal(dim1=-2, dim2=-1).repeat_interleave(self.taps, -1)

    def dense(self) -> Float[Tensor, "K I I"]:
        """The factor itself."""
        if self.is_diagonal:
            return torch.diag_embed(self.values)
        eye = torch.eye(self.taps, dtype=self.values.dtype, device=self.values.device)
        return torch.stack([torch.kron(a.contiguous(), eye) for a in self.values])

    def inverse(self, shift: Float[Tensor, "K"]) -> "InputFactor":
        """``(A + shift I)⁻¹``."""
        if self.is_diagonal:
            return InputFactor(1 / damped_spectrum(self.values, shift.unsqueeze(-1), "input factor A"), self.taps)
        return InputFactor(_spd_inverse(self.values, shift, "input factor A"), self.taps)


def _spd_inverse(M: Tensor, shift: Tensor, name: str) -> Tensor:
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    root = guarded_cholesky(M + shift.view(-1, 1, 1) * eye, name=name)
    return torch.cholesky_inverse(root)


@dataclass(frozen=True, eq=False)
class Kronecker(EigenOperator):
    """``G ⊗ A``, group by group.

    Damping can be added to the product (``"exact"``, through the eigenbasis) or to the factors:
    ``(G + √λ/π I) ⊗ (A + π√λ I)`` with ``π² = (tr A / I) / (tr G / O)`` (``"trace"``) or π = 1 (``"equal"``).
    `solve` uses `solve_split` unless told otherwise; every other operation is exact unless told otherwise.
    """

    A: InputFactor
    G: Float[Tensor, "K O O"]
    solve_split: str = "trace"
    kind = "kfac"
    _inverses: dict[tuple[float, str], tuple[InputFactor, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(K, O, I)."""
        return self.G.shape[0], self.G.shape[-1], self.A.inputs

    @cached_property
    def _eigh_G(self) -> tuple[Tensor, Tensor]:
        return guarded_eigh(self.G, name="output factor G")

    @property
    def spectrum(self) -> Float[Tensor, "..."]:
        """All products of eigenvalues."""
        return self._eigh_G[0].unsqueeze(-1) * self.A.eigh[0].unsqueeze(-2)

    def rotate(self, X: Tensor) -> Tensor:
        """``U_Gᵀ X U_A``."""
        return self.A.eigh[1].rotate(self._eigh_G[1].mT @ X)

    def unrotate(self, Y: Tensor) -> Tensor:
        """``U_G Y U_Aᵀ``."""
        return self._eigh_G[1] @ self.A.eigh[1].unrotate(Y)

    def mv(self, X: Float[Tensor, "*B K O I"]) -> Float[Tensor, "*B K O I"]:
        """``G X A``."""
        return self.A.right(self.G @ X)

    def solve(
        self, X: Float[Tensor, "*B K O I"], damping: float, split: str | None = None
    ) -> Float[Tensor, "*B K O I"]:
        """``(G + √λ/π)⁻¹ X (A + π√λ)⁻¹``, or through the eigenbasis."""
        split = check_split(split, self.solve_split)
        if split == "exact":
            return self.power(X, -1.0, damping, "exact")
        A, G = self.inverse_factors(damping, split)
        return A.right(G @ X)

    def inverse_factors(self, damping: float, split: str) -> tuple[InputFactor, Tensor]:
        """The damped factors' inverses, kept for the next solve with the same damping."""
        if (damping, split) not in self._inverses:
            left, right = self.shifts(damping, split)
            self._inverses.clear()  # one damping at a time: inverses are as large as the factors
            self._inverses[damping, split] = (
                self.A.inverse(right),
                _spd_inverse(self.G, left, "output factor G"),
            )
        return self._inverses[damping, split]

    def shifts(self, damping: float, split: str) -> tuple[Float[Tensor, "K"], Float[Tensor, "K"]]:
        """``√λ/π`` for G and ``π√λ`` for A, one a group."""
        return split_damping(damping, split, self.A.trace() / self.A.inputs, _mean_diagonal(self.G))

    def damping_vector(self, damping: float, split: str | None) -> float | Tensor:
        """What a split adds to the product of two eigenvalues."""
        return split_spectrum(damping, check_split(split, "exact"), self.A.eigh[0], self._eigh_G[0])

    def trace(self) -> Float[Tensor, ""]:
        """``Σ_k tr A tr G``."""
        return (self.A.trace() * self.G.diagonal(dim1=-2, dim2=-1).sum(-1)).sum()

    def frobenius_squared(self) -> Float[Tensor, ""]:
        """``Σ_k ‖A‖² ‖G‖²``."""
        return (self.A.square_sum() * _squares(self.G)).sum()

    def diagonal(self) -> Float[Tensor, "K O I"]:
        """``diag G diag Aᵀ``."""
        return self.G.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * self.A.diagonal().unsqueeze(-2)

    def as_matrix(self) -> Float[Tensor, "D D"]:
        """``kron(G, A)`` of each group on the diagonal; torch 2.11 makes it of contiguous matrices alone."""
        return torch.block_diag(
            *(torch.kron(g.contiguous(), a.contiguous()) for g, a in zip(self.G, self.A.dense(), strict=True))
        )

    def scaled(self, factor: float) -> "Kronecker":
        """``c`` goes to G."""
        if factor < 0:
            raise InputError(
                describe(f"a factor of {factor}", "a factor ≥ 0 for a Kronecker product", "use F + G lazily")
            )
        return Kronecker(self.A, self.G * factor, self.solve_split)

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of both factors."""
        k, o, i = self.shape
        channels = i // max(1, self.A.taps)
        return {"A": (k, i) if self.A.is_diagonal else (k, channels, channels), "G": (k, o, o)}

    def tensors(self) -> dict[str, Tensor]:
        """Both factors."""
        return {"A": self.A.values, "G": self.G}

    def options(self) -> dict[str, Any]:
        """Kernel offsets and split."""
        return {"taps": self.A.taps, "solve_split": self.solve_split}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> "Kronecker":
        """The inverse of `tensors` and `options`."""
        split = check_split(str(options["solve_split"]), "trace")
        return cls(InputFactor(tensors["A"], int(options["taps"])), tensors["G"], split)


@dataclass(frozen=True, eq=False)
class EigenKronecker(EigenOperator):
    """``(U_G ⊗ U_A) diag(s) (U_G ⊗ U_A)ᵀ``: the Kronecker basis with eigenvalues of its own.

    The factors' eigenvalues are kept for the factored damping modes, which add
    ``λ + √λ (π s_G + s_A / π)`` to s.
    """

    basis: Basis
    U_G: Float[Tensor, "K O O"]
    scalings: Float[Tensor, "K O I"]
    s_A: Float[Tensor, "K I"]
    s_G: Float[Tensor, "K O"]
    solve_split: str = "exact"
    kind = "ekfac"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(K, O, I)."""
        k, o, i = self.scalings.shape
        return k, o, i

    @property
    def spectrum(self) -> Float[Tensor, "..."]:
        """The scalings."""
        return self.scalings

    def rotate(self, X: Tensor) -> Tensor:
        """``U_Gᵀ X U_A``."""
        return self.basis.rotate(self.U_G.mT @ X)

    def unrotate(self, Y: Tensor) -> Tensor:
        """``U_G Y U_Aᵀ``."""
        return self.U_G @ self.basis.unrotate(Y)

    def damping_vector(self, damping: float, split: str | None) -> float | Tensor:
        """``λ``, or ``λ + √λ (π s_G + s_A / π)``."""
        return split_spectrum(damping, check_split(split, "exact"), self.s_A, self.s_G)

    def solve(
        self, X: Float[Tensor, "*B K O I"], damping: float, split: str | None = None
    ) -> Float[Tensor, "*B K O I"]:
        """``Q (s + λ)⁻¹ Qᵀ``."""
        return self.power(X, -1.0, damping, check_split(split, self.solve_split))

    def diagonal(self) -> Float[Tensor, "K O I"]:
        """``(U_G ∘ U_G) s (U_A ∘ U_A)ᵀ``."""
        vectors = self.basis.vectors
        squared = Basis(None if vectors is None else vectors.square(), self.basis.taps)
        return squared.unrotate(self.U_G.square() @ self.scalings)

    def scaled(self, factor: float) -> "EigenKronecker":
        """``c s``."""
        if factor < 0:
            raise InputError(describe(f"a factor of {factor}", "a factor ≥ 0", "use a lazy sum"))
        return EigenKronecker(
            self.basis, self.U_G, self.scalings * factor, self.s_A, self.s_G * factor, self.solve_split
        )

    def plus(self, other: BlockOperator) -> BlockOperator | None:
        """Scalings add up in one and the same basis."""
        if not isinstance(other, EigenKronecker) or not self.same_basis(other):
            return None
        return EigenKronecker(
            self.basis,
            self.U_G,
            self.scalings + other.scalings,
            self.s_A,
            self.s_G + other.s_G,
            self.solve_split,
        )

    def same_basis(self, other: "EigenKronecker") -> bool:
        """Whether both are diagonal in the same basis."""
        u, w = self.basis.vectors, other.basis.vectors
        same_inputs = (u is None and w is None) or (u is not None and w is not None and torch.equal(u, w))
        return same_inputs and torch.equal(self.U_G, other.U_G)

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of bases and eigenvalues."""
        k, o, i = self.shape
        channels = i // max(1, self.basis.taps)
        inputs = {"s_A": (k, i), "U_A": (k, channels, channels)}
        return {"U_G": (k, o, o), "scalings": self.shape, "s_G": (k, o), **inputs}

    def tensors(self) -> dict[str, Tensor]:
        """Bases and eigenvalues."""
        stored = {"U_G": self.U_G, "scalings": self.scalings, "s_A": self.s_A, "s_G": self.s_G}
        return stored if self.basis.vectors is None else {**stored, "U_A": self.basis.vectors}

    def options(self) -> dict[str, Any]:
        """Kernel offsets and split."""
        return {"taps": self.basis.taps, "solve_split": self.solve_split}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> "EigenKronecker":
        """The inverse of `tensors` and `options`."""
        basis = Basis(tensors.get("U_A"), int(options["taps"]))
        return cls(
            basis,
            tensors["U_G"],
            tensors["scalings"],
            tensors["s_A"],
            tensors["s_G"],
            check_split(str(options["solve_split"]), "exact"),
        )


def _squares(M: Tensor) -> Float[Tensor, "K"]:
    return torch.linalg.vector_norm(M.flatten(1), dim=1, dtype=torch.float64).square()


def _mean_diagonal(M: Tensor) -> Float[Tensor, "K"]:
    return M.diagonal(dim1=-2, dim2=-1).mean(-1)


def split_damping(
    damping: float, split: str, mean_A: Float[Tensor, "K"], mean_G: Float[Tensor, "K"]
) -> tuple[Float[Tensor, "K"], Float[Tensor, "K"]]:
    """``(√λ/π, π√λ)``; a factor that is zero gives π = 1."""
    pi = torch.ones_like(mean_A)
    if split == "trace":
        known = (mean_A > 0) & (mean_G > 0)
        pi = torch.where(known, mean_A / torch.where(known, mean_G, 1.0), 1.0).sqrt()
    return damping**0.5 / pi, damping**0.5 * pi


def split_spectrum(damping: float, split: str, s_A: Tensor, s_G: Tensor) -> float | Tensor:
    """``λ``, or what the factored forms add to ``s_G s_Aᵀ``."""
    if split == "exact":
        return damping
    left, right = split_damping(damping, split, s_A.mean(-1), s_G.mean(-1))
    return damping + s_G.unsqueeze(-1) * right.view(-1, 1, 1) + s_A.unsqueeze(-2) * left.view(-1, 1, 1)
