"""`TrackedBasis`: eigenvectors ``U_P ⊗ U_Q`` of a stack's factors that are kept up to date by products.

A basis is begun by Cholesky and some sweeps (`linalg.first_basis`; a small one by `torch.linalg.eigh`), and takes a
few sweeps (`linalg.jacobi`) at every refresh, whatever its factor has become. What is divided by is measured in
the basis as it is: second moments (SOAP, EKFAC), or else ``diag(Uᵀ M U)``. What is not finite keeps the last basis.

It is kept in fp16. Rounding turns it by 2⁻¹², some hundred times less than what sweeps may leave of a drift; but the
gradient, whose rounding is divided by small moments, is rotated in split fp16, unless half precision will do.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.foundations.errors import NumericalError
from layerwise.foundations.linalg import settled_eigh
from layerwise.optim.backend import ALL, Eigenbasis, Factor, Side
from layerwise.optim.cuda import factor as factors
from layerwise.optim.cuda.device_step import largest_of, run
from layerwise.optim.cuda.factor import DeviceFactor
from layerwise.optim.cuda.linalg import orthogonal
from layerwise.optim.cuda.linalg.first_basis import iterated_once
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.jacobi import rayleigh_quotients, tracked_basis
from layerwise.optim.cuda.linalg.moments_in_new_basis import rotate_moments_, rotate_momentum_, rotation_between
from layerwise.optim.cuda.scaled import Scaled, unscaled
from layerwise.optim.cuda.storage import StoredMatrix, operand_of
from layerwise.optim.cuda.triton.device import on_gpu
from layerwise.optim.rule import Context, Health

FIRST_SWEEPS, LEAST = 4, 256
"""Sweeps of a first basis, and the fewest rows for which they replace eigh. Twelve would make it nearly exact, but it
is that of one batch, and with four losses are the same: the next refreshes, after 2, 4 and 8 steps, go on."""
SWEEPS, YOUNG_SWEEPS, YOUNG_STEPS = 2, 3, 16
"""At each refresh, and before that step, when a new batch weighs more than its steady share and bases turn fast. After
ten steps of a training one sweep is not enough: so many columns turn at once that all are held back (decision 23)."""
OFTEN = 5
"""With fewer steps between refreshes one sweep is enough."""


def rotated(
    P: Half | None, X: Tensor | Half, Q: Half | None, largest: Tensor | None = None, *, rough: bool = False
) -> Tensor | Scaled:
    """``U_Pᵀ X U_Q``, not yet divided; one side may be missing.

    `largest` is what no entry of each matrix exceeds, where that is known. X is rounded to fp16 where `rough` will do,
    if it is not in fp16 with room already, else split.
    """
    left = None if P is None else P.mT
    if isinstance(X, Half):
        return orthogonal.rough_between(left, X, Q)
    if rough:
        return orthogonal.rough_between(left, orthogonal.with_room(X, largest), Q)
    return orthogonal.between(left, operand_of(X, largest), Q)


def unrotated(P: Half | None, Y: Tensor | Half, Q: Half | None) -> Tensor | Scaled:
    """``U_P Y U_Qᵀ``, not yet divided, of a Y in fp16 with room (`orthogonal`): nothing magnifies its rounding."""
    half = Y if isinstance(Y, Half) else orthogonal.with_room(Y)
    return orthogonal.rough_between(P, half, None if Q is None else Q.mT)


def largest_before(known: list[Tensor], X: Tensor | Half) -> Float[Tensor, "K"]:
    """What a product or a step in the basis left of each group at the last step, its largest entry; zeros at first."""
    if not known or len(known[0]) != X.shape[0]:
        known[:] = [torch.zeros(X.shape[0], dtype=torch.float32, device=X.device)]
    return known[0]


@dataclass
class TrackedSide:
    """One side's basis with its eigenvalues."""

    side: Side
    matrix: StoredMatrix
    values: Float[Tensor, "K n"]
    own: int
    """Rows without padding."""
    measured: bool = True
    """Whether second moments are measured in the basis as it is; else steps are made of its eigenvalues, and these are
    measured after the last sweep."""
    half_factor: bool = False
    """Whether the factor is rounded to fp16 for sweeps and for eigenvalues (`precision="half"`)."""
    half_gradient: bool = False
    """Of roots: whether gradients are rotated in fp16, not split."""

    def tensors(self) -> dict[str, Tensor]:
        """Vectors and values."""
        return self.matrix.tensors(f"U_{self.side}") | {f"s_{self.side}": self.values}

    def saved(self, groups: slice) -> dict[str, Tensor]:
        """In float32, without padding."""
        vectors, values = self.matrix.saved(groups, self.own), self.values[groups, : self.own]
        return {f"U_{self.side}": vectors, f"s_{self.side}": values}

    def load(self, name: str, groups: slice, value: Tensor) -> None:
        """The inverse."""
        if name == f"U_{self.side}":
            self.matrix.load(groups, value)
        elif name == f"s_{self.side}":
            self.values[groups, : value.shape[1]] = value.to(self.values)

    def narrow(self, groups: slice) -> "TrackedSide":
        """Views."""
        return replace(self, matrix=self.matrix.narrow(groups), values=self.values[groups])

    def clone(self) -> "TrackedSide":
        """A copy."""
        return replace(self, matrix=self.matrix.clone(), values=self.values.clone())

    def root(
        self, shift: Float[Tensor, "K"], power: float, mean: Float[Tensor, "K"], damped: bool
    ) -> Float[Tensor, "K n"]:
        """``(s + shift)⁻ᵖ``; where nothing is `damped`, of no eigenvalue below rounding, and 1 of factors of zeros, as
        on a CPU."""
        shifted = self.values + shift.unsqueeze(-1)
        if damped:
            return shifted.pow(-power)
        limits = torch.finfo(shifted.dtype)
        floor = self.values.amax(-1, keepdim=True) * limits.eps * self.own
        root = torch.maximum(shifted, floor.clamp_min(limits.tiny)).pow(-power)
        return torch.where(mean.unsqueeze(-1) > 0, root, 1.0)

    def refresh_(
        self,
        key: Any,
        M: DeviceFactor,
        groups: slice,
        context: Context,
        moments: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        """By sweeps, by more of them while statistics are young; groups that were never refreshed are begun. A first
        and perhaps a second moment in the basis are carried along."""
        fresh = context.memory.get("fresh")
        if fresh is None or not all(fresh[groups]):  # nothing that could be captured
            self._with_moments(lambda: self._begin(M, groups, context.health), groups, moments)
            return
        usual = SWEEPS if context.refresh_every >= OFTEN else 1
        sweeps = YOUNG_SWEEPS if context.step < YOUNG_STEPS else usual
        call = lambda: self._with_moments(lambda: self._follow(M, groups, sweeps, context.health), groups, moments)  # noqa: E731
        run((key, groups.start, groups.stop, sweeps), call, context, "basis")

    def begin_(self, M: DeviceFactor, context: Context) -> None:
        """All groups."""
        self._begin(M, slice(0, len(self.values)), context.health)

    def _begin(self, factor: DeviceFactor, groups: slice, health: Health) -> None:
        """By sweeps where that is faster, else by eigh, for which the host waits. A factor of which there is no first
        iterate begins with the identity."""
        if not begins_by_sweeps(self.values):
            self._decompose(factor, groups, health)
            return
        U, good = iterated_once(factor.dense(groups))
        health.count("fallbacks", (~good).sum())
        self._put(groups, U, self.values[groups], torch.ones_like(good))
        rehearsal = good.device.type == "meta"
        self._follow(factor, groups, 1 if rehearsal else FIRST_SWEEPS, Health(on_device=True))
        M = factors.operand(factor.mean[groups], self.half_factor)
        values = rayleigh_quotients(M, self.matrix.half(groups)).clamp_min(0)
        finite = torch.isfinite(values).all(-1, keepdim=True)
        self.values[groups] = torch.where(finite, values, self.values[groups])

    def _decompose(self, factor: DeviceFactor, groups: slice, health: Health) -> None:
        """By eigh, largest last, padding apart."""
        M, own = factor.dense(groups), factor.own
        values, vectors, good = _decomposed(M[:, :own, :own])
        U, s = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).repeat(len(M), 1, 1), torch.zeros_like(M[:, 0])
        U[:, :own, :own], s[:, :own] = vectors.to(M.dtype), values.to(M.dtype)
        health.count("fallbacks", (~good).sum())
        self._put(groups, U, s.clamp_min(0), good)

    def _follow(self, factor: DeviceFactor, groups: slice, sweeps: int, health: Health) -> None:
        M = factors.operand(factor.mean[groups], self.half_factor)
        U, values, couplings = tracked_basis(M, self.matrix.half(groups), sweeps)
        if not self.measured:
            values = rayleigh_quotients(M, U)
        good = torch.isfinite(values).all(-1) & torch.isfinite(couplings[-1])
        health.count("fallbacks", (~good).sum())
        self._put(groups, U, values.clamp_min(0), good)

    def _put(self, groups: slice, U: Tensor | Half, values: Tensor, good: Tensor) -> None:
        self.matrix.write(groups, U, good)
        old = self.values[groups]
        old.copy_(torch.where(good.view(-1, 1), values, old))

    def _with_moments(
        self, renew: Callable[[], None], groups: slice, moments: tuple[Tensor, Tensor | None] | None
    ) -> None:
        """Momentum and second moments as the new basis sees them."""
        if moments is None:
            renew()
            return
        old, side = self.matrix.half(groups), "left" if self.side == "P" else "right"
        old = Half(old.hi.clone(), old.scale)  # of all groups the same, at all times
        renew()
        U, (M, V) = self.matrix.half(groups), (None if X is None else X[groups] for X in moments)
        assert M is not None
        if V is None:
            rotate_momentum_(M, U, old, side)
        else:
            rotate_moments_(M, V, rotation_between(U, old), side)


def begins_by_sweeps(values: Float[Tensor, "K n"]) -> bool:
    """Whether bases of so many rows are begun by Cholesky and sweeps."""
    return on_gpu(values.device) and values.shape[-1] >= LEAST


def _decomposed(M: Float[Tensor, "K n n"]) -> tuple[Tensor, Tensor, Bool[Tensor, "K"]]:
    """Eigenvalues, vectors and which are such; one by one where not all are, so that one does not cost the others."""
    if M.device.type == "meta":  # a rehearsal, which asks for no values
        return torch.empty_like(M[:, 0]), M, torch.empty_like(M[:, 0, 0], dtype=torch.bool)
    try:
        return *settled_eigh(M, name="factor"), torch.ones(len(M), dtype=torch.bool, device=M.device)
    except NumericalError:
        if len(M) == 1:
            return torch.zeros_like(M[:, 0]), torch.zeros_like(M), torch.zeros(1, dtype=torch.bool, device=M.device)
    values, vectors, good = zip(*(_decomposed(one) for one in M.split(1)), strict=True)
    return torch.cat(values), torch.cat(vectors), torch.cat(good)


@dataclass
class TrackedBasis(Eigenbasis):
    """Both sides; a diagonal factor is its own basis, one that is missing has the identity."""

    P: TrackedSide | None
    Q: TrackedSide | None
    values_P: Tensor
    values_Q: Tensor
    half_gradient: bool = False
    """Whether gradients are rotated in fp16, not split: `precision="half"`."""
    has: tuple[bool, bool] = (True, True)
    """Whether there are P and Q: values of a side without a factor stay zero, and are not saved."""
    before: list[Tensor] = field(default_factory=list)
    """The largest entries of the last step in the basis: from which scale the next is written in fp16."""

    @property
    def trivial(self) -> bool:
        """Never: one side at least is tracked."""
        return False

    @property
    def sides(self) -> list[TrackedSide]:
        """Those that are tracked."""
        return [side for side in (self.P, self.Q) if side is not None]

    @property
    def multiplies_in_fp16(self) -> bool:
        """The gradient is multiplied in fp16."""
        return True

    @property
    def takes_half(self) -> bool:
        """Whether it rotates a gradient that was gathered in fp16 with room."""
        return self.half_gradient

    def tensors(self) -> dict[str, Tensor]:
        """Of both sides."""
        found = self._values(ALL)
        for side in self.sides:
            found |= side.tensors()
        return found

    def _values(self, groups: slice) -> dict[str, Tensor]:
        named = zip(("s_P", "s_Q"), (self.values_P, self.values_Q), self.has, strict=True)
        return {name: values[groups] for name, values, has in named if has}

    def saved(self, groups: slice = ALL) -> dict[str, Tensor]:
        """In float32, without padding."""
        found = self._values(groups)
        for side in self.sides:
            found |= side.saved(groups)
        return found

    def load(self, name: str, groups: slice, value: Tensor) -> None:
        """Into fp16 and padding."""
        for side, values in ((self.P, self.values_P), (self.Q, self.values_Q)):
            own = "s_P" if values is self.values_P else "s_Q"
            if side is not None:
                side.load(name, groups, value)
            elif name == own:
                values[groups, : value.shape[1]] = value.to(values)

    def narrow(self, groups: slice) -> "TrackedBasis":
        """Views."""
        P, Q = (None if side is None else side.narrow(groups) for side in (self.P, self.Q))
        return self._of(P, Q, self.values_P[groups], self.values_Q[groups])

    def clone(self) -> "TrackedBasis":
        """A copy."""
        P, Q = (None if side is None else side.clone() for side in (self.P, self.Q))
        return self._of(P, Q, self.values_P.clone(), self.values_Q.clone())

    def _of(self, P: TrackedSide | None, Q: TrackedSide | None, values_P: Tensor, values_Q: Tensor) -> "TrackedBasis":
        values_P, values_Q = (
            values if side is None else side.values for side, values in ((P, values_P), (Q, values_Q))
        )
        return TrackedBasis(P, Q, values_P, values_Q, self.half_gradient, self.has)

    def refresh_(
        self, P: Factor | None, Q: Factor | None, groups: slice, context: Context, M: Tensor | None = None
    ) -> None:
        """Side by side."""
        self._renew(P, Q, groups, context, None if M is None else (M, None))

    def follow_(
        self, P: Factor | None, Q: Factor | None, groups: slice, context: Context, M: Tensor, V: Tensor
    ) -> None:
        """The same, moments carried along."""
        self._renew(P, Q, groups, context, (M, V))

    def _renew(self, P: Factor | None, Q: Factor | None, groups: slice, context: Context, moments: Any) -> None:
        for factor, side, values in ((P, self.P, self.values_P), (Q, self.Q, self.values_Q)):
            if isinstance(factor, DeviceFactor) and side is not None:
                side.refresh_((id(self), side.side), factor, groups, context, moments)
            elif factor is not None:
                values[groups] = factor.dense(groups)

    def begin_(self, P: Factor | None, Q: Factor | None, context: Context) -> None:
        """All groups of both sides."""
        for factor, side, values in ((P, self.P, self.values_P), (Q, self.Q, self.values_Q)):
            if isinstance(factor, DeviceFactor) and side is not None:
                side.begin_(factor, context)
            elif factor is not None:
                values.copy_(factor.dense())

    def matrices(self) -> tuple[Half | None, Half | None]:
        """U_P and U_Q."""
        P, Q = (None if side is None else side.matrix.half() for side in (self.P, self.Q))
        return P, Q

    def rotate(self, X: Tensor | Half, context: Context | None = None) -> Tensor | Scaled:
        """``U_Pᵀ X U_Q``; a tensor, where no step is under way."""
        P, Q = self.matrices()
        R = rotated(P, X, Q, largest_of(X, context), rough=self.half_gradient)
        if context is None:
            return unscaled(R)
        return R.contiguous() if isinstance(R, Tensor) else R

    def unrotate(self, Y: Tensor | Half, context: Context) -> Tensor | Scaled:
        """``U_P Y U_Qᵀ``, perhaps not yet divided."""
        P, Q = self.matrices()
        return unrotated(P, Y, Q)
