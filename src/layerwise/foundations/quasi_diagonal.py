"""Quasi-diagonal matrices: the diagonal and, for each output, the bias's interaction with its row of weights.

Each unit (k, o) has a diagonal D over its weights, f for its bias and the cross row ``κ = E[g_b g_w]``. Two
matrices have these entries. ``"arrow"`` has zeros elsewhere, as the name says, and is in general indefinite.
``"psd"`` fills the rest in so that the matrix is positive semi-definite and inverts as Ollivier (2015) does:

    M_psd = Tᵀ diag(D − κ²/f, f) T,   (T v)_b = v_b + κᵀ v_w / f,   (T v)_w = v_w

With `completion` None, products and norms use the arrow and solves, powers, samples and determinants the PSD
form. Damping is added to the statistics first (``D + λ``, ``f + λ``).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, NumericalError, describe, not_one_of
from layerwise.foundations.linalg import guarded_eigh, squared_norm
from layerwise.foundations.operators import BlockOperator, damped_spectrum

UNITS_BYTES = 64 * 2**20
"""Scratch for the dense blocks of some units at a time."""


@dataclass(frozen=True, eq=False)
class QuasiDiagonal(BlockOperator):
    """See the module's docstring."""

    D: Float[Tensor, "K O J"]
    f: Float[Tensor, "K O"]
    cross: Float[Tensor, "K O J"]
    completion: str | None = None
    kind = "quasidiag"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(K, O, I)."""
        k, o, j = self.D.shape
        return k, o, j + 1

    @property
    def is_psd(self) -> bool:
        """The arrow is not, in general."""
        return self.completion == "psd"

    def _psd(self, default: bool) -> bool:
        return default if self.completion is None else self.completion == "psd"

    def _ratio(self, damping: float = 0.0) -> Tensor:
        """``κ / f``, zero where both vanish."""
        f = (self.f + damping).unsqueeze(-1)
        return torch.where(f > 0, self.cross / torch.where(f > 0, f, 1.0), 0.0)

    def _schur(self, damping: float = 0.0) -> Tensor:
        """``D − κ²/f``."""
        return (self.D + damping - self.cross * self._ratio(damping)).clamp_min(0)

    def mv(self, X: Float[Tensor, "*B K O I"]) -> Float[Tensor, "*B K O I"]:
        """Arrow: ``(D v_w + κ v_b, κᵀ v_w + f v_b)``."""
        w, b = X[..., :-1], X[..., -1]
        cross = (self.cross * w).sum(-1)
        if not self._psd(default=False):
            out = self.D * w + self.cross * b.unsqueeze(-1)
        else:
            # Off-diagonal weights: κ κᵀ / f; the diagonal stays D.
            out = self._schur() * w + self.cross * ((self._ratio() * w).sum(-1) + b).unsqueeze(-1)
        return torch.cat([out, (cross + self.f * b).unsqueeze(-1)], dim=-1)

    def solve(
        self, X: Float[Tensor, "*B K O I"], damping: float, split: str | None = None
    ) -> Float[Tensor, "*B K O I"]:
        """In closed form, O(d)."""
        w, b = X[..., :-1], X[..., -1]
        if self._psd(default=True):
            schur = damped_spectrum(self._schur(damping), 0.0, "quasi-diagonal weights")
            f = damped_spectrum(self.f, damping, "quasi-diagonal bias")
            x_w = (w - self._ratio(damping) * b.unsqueeze(-1)) / schur
            x_b = (b - (self.cross * x_w).sum(-1)) / f
        else:
            D = damped_spectrum(self.D, damping, "quasi-diagonal weights")
            schur = self.f + damping - (self.cross.square() / D).sum(-1)
            if bool((schur <= 0).any()):
                raise NumericalError(
                    describe(
                        f"an arrow matrix that is indefinite at damping {damping:g} "
                        f"(smallest Schur complement {float(schur.min()):.3g})",
                        "a positive definite matrix",
                        'use completion="psd", or more damping',
                    )
                )
            x_b = (b - (self.cross * w / D).sum(-1)) / schur
            x_w = (w - self.cross * x_b.unsqueeze(-1)) / D
        return torch.cat([x_w, x_b.unsqueeze(-1)], dim=-1)

    def power(
        self, X: Float[Tensor, "*B K O I"], exponent: float, damping: float, split: str | None = None
    ) -> Float[Tensor, "*B K O I"]:
        """Unit by unit through small eigendecompositions; -1 in closed form."""
        if exponent == -1:
            return self.solve(X, damping)
        lead = X.shape[:-3]
        flat = X.reshape(-1, self.D.shape[0] * self.D.shape[1], X.shape[-1])
        out = torch.empty_like(flat)
        for units, values, vectors in self._units(damping, default_psd=True):
            s = damped_spectrum(values, 0.0, self.kind, exponent) ** exponent
            rotated = torch.einsum("uij,bui->buj", vectors, flat[:, units]) * s
            out[:, units] = torch.einsum("uij,buj->bui", vectors, rotated)
        return out.reshape(*lead, *self.shape)

    def sample(self, count: int, damping: float, generator: torch.Generator) -> Float[Tensor, "n K O I"]:
        """``T⁻¹ diag(D − κ²/f, f)^{-1/2} z`` of the damped statistics; the arrow by its own Schur complement."""
        z = torch.randn(count, *self.shape, generator=generator, device=generator.device, dtype=self.D.dtype)
        z = z.to(self.D.device)
        if not self._psd(default=True):
            D = damped_spectrum(self.D, damping, self.kind)
            schur = damped_spectrum(self.f + damping - (self.cross.square() / D).sum(-1), 0.0, self.kind)
            b = (z[..., -1] / schur.sqrt()).unsqueeze(-1)
            return torch.cat([z[..., :-1] / D.sqrt() - self.cross * b / D, b], dim=-1)
        schur = damped_spectrum(self._schur(damping), 0.0, self.kind)
        f = damped_spectrum(self.f, damping, self.kind)
        w = z[..., :-1] / schur.sqrt()
        b = z[..., -1] / f.sqrt() - (self._ratio(damping) * w).sum(-1)
        return torch.cat([w, b.unsqueeze(-1)], dim=-1)

    def trace(self) -> Float[Tensor, ""]:
        """``Σ D + Σ f``, in both completions."""
        return self.D.sum() + self.f.sum()

    def frobenius_squared(self) -> Float[Tensor, ""]:
        """Arrow: ``Σ D² + f² + 2 κ²``; PSD adds ``Σ_{i≠j} (κ_i κ_j / f)²``."""
        total = squared_norm(self.D) + squared_norm(self.f) + 2 * squared_norm(self.cross)
        if self._psd(default=False):
            each = self.cross.double() * self._ratio()
            c = each.sum(-1)  # Σ κ² / f
            total = total + (c.square() - each.square().sum(-1)).sum()
        return total

    def diagonal(self) -> Float[Tensor, "K O I"]:
        """D, then f."""
        return torch.cat([self.D, self.f.unsqueeze(-1)], dim=-1)

    def logdet(self, damping: float, split: str | None = None) -> Float[Tensor, ""]:
        """``Σ log(D − κ²/f) + log f`` of the damped statistics, or the arrow's Schur form."""
        if self._psd(default=True):
            schur = damped_spectrum(self._schur(damping), 0.0, self.kind)
            return schur.log().sum() + damped_spectrum(self.f, damping, self.kind).log().sum()
        D = damped_spectrum(self.D, damping, self.kind)
        schur = self.f + damping - (self.cross.square() / D).sum(-1)
        return D.log().sum() + damped_spectrum(schur, 0.0, self.kind).log().sum()

    def eigenvalues(self) -> Float[Tensor, "D"]:
        """Unit by unit."""
        return torch.cat([values.flatten() for _, values, _ in self._units(0.0, default_psd=False)]).sort().values

    def eigenvectors(self, chosen: Tensor) -> Float[Tensor, "n K O I"]:
        """Unit by unit; each has its support in one unit."""
        k, o, i = self.shape
        values, where, vectors = [], [], []
        for units, s, U in self._units(0.0, default_psd=False):
            values.append(s.flatten())
            vectors.append(U.mT.reshape(-1, i))
            where.append(torch.arange(units.start, units.stop, device=s.device).repeat_interleave(i))
        order = torch.cat(values).sort().indices[chosen]
        rows, unit = torch.cat(vectors)[order], torch.cat(where)[order]
        out = rows.new_zeros(len(order), k * o, i)
        out[torch.arange(len(order)), unit] = rows
        return out.view(-1, k, o, i)

    def as_matrix(self) -> Float[Tensor, "D D"]:
        """Small dense blocks on the diagonal."""
        blocks = [M for _, M in self._dense_units(0.0, default_psd=False)]
        return torch.block_diag(*torch.cat(blocks))

    def _dense_units(self, damping: float, default_psd: bool) -> Iterator[tuple[slice, Tensor]]:
        k, o, i = self.shape
        D, f, cross = (
            self.D.reshape(k * o, -1) + damping,
            self.f.reshape(-1) + damping,
            self.cross.reshape(k * o, -1),
        )
        ratio = self._ratio(damping).reshape(k * o, -1)
        step = max(1, UNITS_BYTES // (i * i * D.dtype.itemsize))
        for start in range(0, k * o, step):
            u = slice(start, min(start + step, k * o))
            M = torch.diag_embed(torch.cat([D[u], f[u].unsqueeze(-1)], dim=-1))
            M[:, :-1, -1] = cross[u]
            M[:, -1, :-1] = cross[u]
            if self._psd(default_psd):
                outer = cross[u].unsqueeze(-1) * ratio[u].unsqueeze(-2)
                M[:, :-1, :-1] += outer - torch.diag_embed(outer.diagonal(dim1=-2, dim2=-1))
            yield u, M

    def _units(self, damping: float, default_psd: bool) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for u, M in self._dense_units(damping, default_psd):
            values, vectors = guarded_eigh(M, name="quasi-diagonal unit", clamp=self._psd(default_psd))
            yield u, values, vectors

    def scaled(self, factor: float) -> "QuasiDiagonal":
        """``c M``."""
        if factor < 0 and self.completion == "psd":
            raise InputError(describe(f"a factor of {factor}", "a factor ≥ 0", "use a lazy sum"))
        return replace(self, D=self.D * factor, f=self.f * factor, cross=self.cross * factor)

    def plus(self, other: BlockOperator) -> BlockOperator | None:
        """Statistics add up where the completion is the arrow's (the PSD form is not linear in them)."""
        if not isinstance(other, QuasiDiagonal) or other.completion != self.completion or self.completion == "psd":
            return None
        return replace(self, D=self.D + other.D, f=self.f + other.f, cross=self.cross + other.cross)

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the statistics."""
        k, o, i = self.shape
        return {"D": (k, o, i - 1), "f": (k, o), "cross": (k, o, i - 1)}

    def tensors(self) -> dict[str, Tensor]:
        """Statistics."""
        return {"D": self.D, "f": self.f, "cross": self.cross}

    def options(self) -> dict[str, Any]:
        """The completion."""
        return {"completion": self.completion}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> "QuasiDiagonal":
        """The inverse of `tensors` and `options`."""
        completion = options["completion"]
        if completion not in (None, "psd", "arrow"):
            raise InputError(not_one_of("completion", completion, ("psd", "arrow", None)))
        return cls(tensors["D"], tensors["f"], tensors["cross"], completion)

    def numel(self) -> int:
        """D."""
        return math.prod(self.shape)
