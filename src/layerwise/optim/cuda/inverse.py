"""`RefinedRoots`: inverse roots that are refined from the last ones by products, tested on the device, and solved
exactly where that fails.

| rounds | | products of whole matrices |
|---|---|---|
| 1 | one step of Newton's: what was far by T is far by T² | one precise, one rough |
| 2 | a series: by T³ | one precise, two rough |
| 3 | directions that grew are taken in (`outliers`), then two steps of Newton's | two precise, two rough |

Sampled labels replace a share w of a factor by an estimate of it from one batch: T is then about ``w √(n/rows)``. In
the first turns, with w from a tenth to a half, that is too much for one step, and little enough for a series. Factors
of gradients that few rows dominate (of queries, keys and values: early tokens hear from all later ones) also grow by
more than Newton's iteration can bear, in some directions for each sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.backend import ALL, Factor, InverseRoots, Shifts, Side
from layerwise.optim.channels import times_inputs
from layerwise.optim.cuda import factor as factors
from layerwise.optim.cuda.basis import TrackedSide, largest_before, rotated, unrotated
from layerwise.optim.cuda.device_step import largest_of, room_for_along, run, with_along
from layerwise.optim.cuda.eigenbasis_elementwise import scaled
from layerwise.optim.cuda.factor import DeviceFactor
from layerwise.optim.cuda.fp16_steps import scaled_half
from layerwise.optim.cuda.linalg import two_sided_product
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.newton_inverse import (
    RESIDUAL_LIMIT,
    accepted,
    product_inverse,
    refined_inverse,
    series_inverse,
)
from layerwise.optim.cuda.linalg.outliers import without_outliers
from layerwise.optim.cuda.linalg.products import Products
from layerwise.optim.cuda.monitor import FAILED, MOST_ROUNDS, REFUSED, SOLVED, WANTING, YOUNG_STEPS, InverseMonitor
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.storage import StoredMatrix, between, scaled_between
from layerwise.optim.cuda.unscaled import unscaled
from layerwise.optim.reference import guarded_root
from layerwise.optim.rule import Context

EXACT_BATCHES = 8
"""While statistics are of so few, a new batch changes them too much for a refinement."""
FINE_RESIDUAL = 3e-3
"""Of the estimate of a direction's error, which may be three times as large."""
CONVERGING = 0.7
"""Of the spectral radius of ``I − X M``: below it X is better than what it came from, and a next step will do."""
EASY_TYPICAL, EASY_GROWN = 0.05, 0.4
"""Of what a refinement began with: one step squares both, and what is typical shows in every direction. Measured, the
residual after a step is 0.6 times the square of what was typical, 1.5e-3 here."""
SERIES_ORDER = 3
SERIES_TYPICAL, SERIES_GROWN = 0.12, 0.5
"""The same for the series, which leaves about the cube of both."""
FIRST_TURNS = 2
"""With all rounds, before an inverse that is new is refined in as few as it needs."""
NEWTON_STEPS = 2
"""After directions that grew were taken in."""
ROUNDED = 0.5
"""Of the radius: what a step or a series leaves is less. A larger residual is the rounding of X, which is kept in 22
bits."""


@dataclass
class RefinedInverse:
    """``(M + shift I)⁻¹`` of one side, kept in fp16 or float32 and refined by products."""

    matrix: StoredMatrix
    own: int
    monitor: InverseMonitor = field(init=False)

    def __post_init__(self) -> None:
        K, device = len(self.matrix.data), self.matrix.data.device
        self.monitor = InverseMonitor.over(K, device, FIRST_TURNS)

    def refresh_(
        self, key: Any, M: DeviceFactor, shift: Callable[[], Tensor | None], groups: slice, context: Context
    ) -> None:
        """From the last inverse, or exactly while statistics are young and where the last refinement failed."""
        monitor = self.monitor
        exact = monitor.take_exact(context.step, groups, context.health)
        young = context.age <= EXACT_BATCHES and monitor.is_news(groups, context.age)
        rounds = 0
        if not (exact or young):
            rounds = monitor.most if context.step < YOUNG_STEPS else monitor.rounds(groups)
        call = lambda: self._renew(M, shift(), groups, rounds)  # noqa: E731
        run((key, groups.start, groups.stop, context.damping, rounds), call, context, "refined" if rounds else "exact")
        monitor.send(context.step, groups)

    def _renew(self, factor: DeviceFactor, shift: Tensor | None, groups: slice, rounds: int) -> None:
        """In so many rounds; 0: by Cholesky."""
        M, products, mean = factor.mean[groups], self.matrix.products, factor.mean_eigenvalue(groups)
        assert shift is not None
        damped, known = (shift, factor.own, mean), mean > 0  # in padding: any number > 0
        if not rounds:
            X, good = product_inverse(factors.damped(M, *damped), products=products)
            verdict = torch.where(good, SOLVED, FAILED)
        else:
            M_ = products.prepared(factors.damped_operand(M, *damped), definite=True)
            found = _refined(M_, self.matrix.operand(groups), rounds, products)
            X, good, verdict = found.X, found.radius < CONVERGING, _verdict(found, rounds)
        self.monitor.verdict[groups] = torch.where(known, verdict, SOLVED).to(torch.int8)
        self.matrix.write(groups, X, good & known)

    def solve_(self, M: Tensor, shift: Tensor, groups: slice, context: Context) -> None:
        """Exactly, of a matrix that is not the factor itself."""
        root = self.matrix.value(groups)
        self.matrix.write(groups, guarded_root(M, shift, 1.0, root, context.health))


class Refined(NamedTuple):
    """An inverse, the numbers of `inverse_errors`, and how many rounds its guess was worth."""

    X: Tensor
    residual: Tensor
    radius: Tensor
    needed: Tensor | int


def _refined(M: Any, guess: Any, rounds: int, products: Products) -> Refined:
    if rounds == 1:
        return Refined(*refined_inverse(M, guess, products=products), 1)
    if rounds == 2:
        X, residual, radius, typical = series_inverse(M, guess, SERIES_ORDER, products)
        easy = (typical <= EASY_TYPICAL) & (radius <= EASY_GROWN**SERIES_ORDER)
        return Refined(X, residual, radius, torch.where(easy, 1, 2))
    X, drift = without_outliers(M, guess, products=products)
    easy = (drift.typical <= EASY_TYPICAL) & (drift.grown <= EASY_GROWN)
    series = (drift.typical <= SERIES_TYPICAL) & (drift.grown <= SERIES_GROWN)
    needed = torch.where(easy, 1, torch.where(series, 2, 3))
    return Refined(*refined_inverse(M, X, steps=NEWTON_STEPS, products=products), needed)


def _verdict(found: Refined, rounds: int) -> Tensor:
    """Rounds that would have done or will, where it converges; see `solver`.

    Where rounding is all that is left, more rounds, or Cholesky, would leave it too: it is counted, and no more. But a
    factor that has grown or shrunk as a whole leaves as much; only all rounds, which take the scale out, tell the two.
    """
    fine = accepted(found.residual, found.radius) & (found.residual <= FINE_RESIDUAL)
    rounded = accepted(0 * found.radius, found.radius) & (found.residual >= ROUNDED * found.radius)
    within = rounded & (found.residual <= RESIDUAL_LIMIT)
    enough = fine | (rounded if rounds == MOST_ROUNDS else within)
    wanting, needed = ~fine & ~within, torch.where(enough, found.needed, min(rounds + 1, MOST_ROUNDS))
    return torch.where(found.radius < CONVERGING, needed + wanting * WANTING, REFUSED)


@dataclass
class RefinedRoots(InverseRoots):
    """Inverses where the power is 1, else a basis with eigenvalues; a diagonal factor has the root itself."""

    power: tuple[float, float]
    sides: dict[Side, RefinedInverse | TrackedSide | Tensor]
    by_eigh: bool = False
    of: tuple[Factor | None, Factor | None] = (None, None)
    """The factors P and Q."""
    before: list[Tensor] = field(default_factory=list)
    """The largest entries of the last direction: from which scale the next is written in fp16."""

    def __post_init__(self) -> None:
        self.reads_factors = any(isinstance(side, TrackedSide) for side in self.sides.values())

    @property
    def splits_gradient(self) -> bool:
        """Whether the gradient is multiplied in fp16."""
        kept = [side.matrix for side in self.sides.values() if not isinstance(side, Tensor)]
        return any(matrix.halved for matrix in kept)

    def tensors(self) -> dict[str, Tensor]:
        """By side."""
        found: dict[str, Tensor] = {}
        for name, side in self.sides.items():
            if isinstance(side, Tensor):
                found[f"{name}_root"] = side
            else:
                found |= side.tensors() if isinstance(side, TrackedSide) else side.matrix.tensors(f"{name}_root")
        return found

    def saved(self, groups: slice = ALL) -> dict[str, Tensor]:
        """In float32, without padding."""
        found: dict[str, Tensor] = {}
        for name, side in self.sides.items():
            if isinstance(side, TrackedSide):
                found |= side.saved(groups)
            else:
                root = side[groups] if isinstance(side, Tensor) else side.matrix.saved(groups, side.own)
                found[f"{name}_root"] = root
        return found

    def load(self, name: str, groups: slice, value: Tensor) -> None:
        """Into fp16."""
        for key, side in self.sides.items():
            if isinstance(side, TrackedSide):
                side.load(name, groups, value)
            elif name == f"{key}_root" and isinstance(side, Tensor):
                side[groups] = value
            elif name == f"{key}_root" and isinstance(side, RefinedInverse):
                side.matrix.load(groups, value)

    def narrow(self, groups: slice) -> "RefinedRoots":
        """Views, with monitors of their own."""
        found: dict[Side, Any] = {}
        for name, side in self.sides.items():
            if isinstance(side, RefinedInverse):
                found[name] = RefinedInverse(side.matrix.narrow(groups), side.own)
            else:
                found[name] = side[groups] if isinstance(side, Tensor) else side.narrow(groups)
        return replace(self, sides=found, before=[])

    def refresh_(
        self,
        P: Factor | None,
        Q: Factor | None,
        shifts: Shifts,
        groups: slice,
        context: Context,
        scale: float | None = None,
    ) -> None:
        """Side by side: each is captured by itself, so that few graphs serve all numbers of rounds."""
        for place, factor in enumerate((P, Q)):
            name: Side = "P" if place == 0 else "Q"
            side = self.sides.get(name)
            if side is None or not isinstance(factor, DeviceFactor):
                continue
            shift = lambda place=place: shifts(*means((P, Q), groups))[place]  # noqa: E731
            if isinstance(side, TrackedSide):
                side.refresh_((id(self), name), factor, groups, context)
            elif isinstance(side, RefinedInverse) and scale is None:
                side.refresh_((id(self), name), factor, shift, groups, context)
            else:
                M, added = factor.dense(groups), shift()
                assert added is not None
                M = M if scale is None else scale * M
                if isinstance(side, RefinedInverse):
                    side.solve_(M, added, groups, context)
                else:
                    root = side[groups]
                    root.copy_(guarded_root(M, added, self.power[place], root, context.health, self.by_eigh))

    def direction(self, X: Float[Tensor, "K O I"], context: Context, shifts: Shifts) -> Tensor | Scaled:
        """``P⁻ᵖ X Q⁻ᑫ``, perhaps not yet divided by the scales of fp16."""
        P, Q, largest = self.sides.get("P"), self.sides.get("Q"), largest_of(X, context)
        if isinstance(P, RefinedInverse) and isinstance(Q, RefinedInverse) and X.dtype == torch.float32:
            (A, a), (B, b) = ((side.matrix.data, side.matrix.scale) for side in (P, Q))
            if P.matrix.packed_pair and Q.matrix.packed_pair and two_sided_product.takes(A, X, B):
                before = largest_before(self.before, X)
                return two_sided_product.long_between(A, a, X, B, b, largest, before)  # type: ignore[arg-type]
        left, right = (side.matrix.matrix() if isinstance(side, RefinedInverse) else side for side in (P, Q))
        left, right = (None if isinstance(side, TrackedSide) else side for side in (left, right))
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            D = between(left, X, None, largest=largest)
            D = D if right is None else times_inputs(D, right)  # type: ignore[arg-type]
        else:
            D = scaled_between(left, X, right, largest=largest)
        return self._in_basis(unscaled(D), context, shifts) if self.reads_factors else D

    def _in_basis(self, X: Tensor, context: Context, shifts: Shifts) -> Tensor | Scaled:
        """``U_P [(s_P + shift)⁻ᵖ (s_Q + shift)⁻ᑫ ⊙ U_Pᵀ ∇L U_Q] U_Qᵀ``: the same where a basis is kept, not roots."""
        P, Q = (side if isinstance(side, TrackedSide) else None for side in (self.sides.get("P"), self.sides.get("Q")))
        a, b = (
            None if side is None or shift is None else (side.values + shift.unsqueeze(-1)).pow(-power)
            for side, shift, power in zip((P, Q), shifts(*means(self.of)), self.power, strict=True)
        )
        kept = [side.matrix for side in (P, Q) if side is not None]
        U_P, U_Q = (None if side is None else side.matrix.matrix() for side in (P, Q))
        rough = all(isinstance(matrix.matrix(), Half) for matrix in kept)
        R = rotated(U_P, X, U_Q, largest_of(X, context), rough=rough)
        along = room_for_along(X, context)  # ⟨U_P Y U_Qᵀ, ∇L⟩ is ⟨Y, R⟩
        if all(matrix.halved for matrix in kept):
            Y = scaled_half(R, a, b, largest_before(self.before, X), along=along)
        else:
            Y = scaled(R, a, b, out=R.C if isinstance(R, Scaled) else R, along=along)
        return with_along(unrotated(U_P, Y, U_Q), context)


def means(factors: tuple[Factor | None, Factor | None], groups: slice = ALL) -> list[Tensor | None]:
    """Mean eigenvalues, which damping is relative to."""
    return [None if factor is None else factor.mean_eigenvalue(groups) for factor in factors]
