"""`Factors`: ``P⁻ᵖ ∇L Q⁻ᑫ`` with factors from inputs, output gradients, or the gradient itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.kronecker import split_damping
from layerwise.foundations.linalg import gram
from layerwise.optim.averaging import finite_moments, update_mean
from layerwise.optim.channels import block_state, mean_input_eigenvalue, times_inputs
from layerwise.optim.cuda import factor as symmetric
from layerwise.optim.cuda import storage as stored
from layerwise.optim.cuda.basis import (
    BASIS,
    in_halves,
    largest_before,
    scaled_rotate,
    scaled_unrotate,
    track,
)
from layerwise.optim.cuda.basis_monitor import basis_watch, coupled
from layerwise.optim.cuda.eigenbasis_elementwise import scaled
from layerwise.optim.cuda.fp16_steps import scaled_half
from layerwise.optim.cuda.inverse import EXACT_BATCHES, refine_inverse, watch_of
from layerwise.optim.cuda.linalg import two_sided_product as long_sums
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.split_fp16 import product
from layerwise.optim.cuda.monitor import Plan, Watch, method
from layerwise.optim.cuda.rows import average_rows_
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.unscaled import unscaled
from layerwise.optim.roots import condition_numbers, guarded_root, mean_eigenvalue
from layerwise.optim.rule import Context, Health, Observation, Shape, State, UpdateRule

LEFT = ("outgrads", "gradient", "identity")
SMALL_POWER = 0.25
YOUNG_STEPS = 16
"""Until then a new batch weighs more than its steady share, and a basis turns fast."""
RIGHT = ("inputs", "gradient", "identity")


def check_side(name: str, value: str, known: tuple[str, ...]) -> None:
    """A statistic by name."""
    if value not in known:
        raise InputError(describe(f"{name}={value!r}", " or ".join(f'"{k}"' for k in known), "choose one of them"))


def gradient_moments(
    grad: Float[Tensor, "K O I"], sides: Sequence[str], largest: Tensor | None = None
) -> Iterator[tuple[str, Float[Tensor, "K n n"]]]:
    """``∇L ∇Lᵀ`` (P) or ``∇Lᵀ ∇L`` (Q), one after the other; on a GPU in pairs of float16, one triangle.

    `largest` is what no entry of each matrix exceeds, where that is known.
    """
    by_halves = grad.device.type == "cuda" and grad.dtype == torch.float32
    pair = stored.operand_of(grad, largest) if by_halves and sides else None
    for side in sides:
        if pair is None:
            yield side, gram(grad.mT if side == "P" else grad)
        else:
            yield side, product(*((pair, pair.mT) if side == "P" else (pair.mT, pair)), symmetric=True)


def _same_shift(M: Tensor | None, damping: float) -> Tensor | None:
    return None if M is None else torch.full((M.shape[0],), damping, dtype=M.dtype, device=M.device)


@dataclass
class Factors(UpdateRule):
    """Two factors a layer, each raised to a negative power.

    left: "outgrads" (``P = 1/N Σ g gᵀ``), "gradient" (``∇L ∇Lᵀ``) or "identity"; right: "inputs" (``Q = mean a aᵀ``),
    "gradient" (``∇Lᵀ ∇L``) or "identity".
    """

    left: str = "outgrads"
    right: str = "inputs"
    power: tuple[float, float] = (1.0, 1.0)
    split: str = "trace"
    max_factor: int = 8192
    accumulate: bool = False
    """Sum statistics instead of averaging them (Shampoo's own accumulator)."""
    sua: bool = field(default=False, kw_only=True)
    """Whether Q of a convolution acts on channels alone; see `layerwise.optim.channels`."""
    refreshed = ("P_root", "P_root_scale", "Q_root", "Q_root_scale", "Q_bias_root", *BASIS)
    name = "factors"
    recordable = True
    formula = "P⁻ᵖ ∇L Q⁻ᑫ"
    takes_rows = True

    def pads(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Where factors are treated by products; SUA's blocks are not."""
        sides = [p for side, p in zip((self.left, self.right), self.power, strict=True) if side != "identity"]
        return not self.sua and all(self.method(p, dtype, device) == "newton" for p in sides)

    def use_solver(self, solver: str) -> None:
        """Cholesky is for inverses alone."""
        super().use_solver(solver)
        for side, power in zip((self.left, self.right), self.power, strict=True):
            if side != "identity":
                self.method(power, torch.float32, torch.device("cpu"))

    def method(self, power: float, dtype: torch.dtype, device: torch.device) -> str:
        """How a factor is solved."""
        return method(self.solver, power, dtype, device)

    def __post_init__(self) -> None:
        check_side("left", self.left, LEFT)
        check_side("right", self.right, RIGHT)
        check_side("damping_split", self.split, ("trace", "equal", "exact"))
        if self.sua and self.right != "inputs":
            raise InputError(
                describe(f'sua=True with right="{self.right}"', 'right="inputs"', "leave sua out: it is about inputs")
            )
        self.refreshes = (self.left, self.right) != ("identity", "identity")
        self.needs_inputs = self.right == "inputs"
        self.needs_outgrads = self.left == "outgrads"

    def statistics(self) -> dict[str, str]:
        """What P and Q are moments of, and the powers of the roots beside them."""
        how, sides = "sum of " if self.accumulate else "", {"P": self.left, "Q": self.right}
        return {k: how + of for k, of in sides.items() if of != "identity"} | {
            "power": "{:g}, {:g}".format(*self.power)
        }

    @property
    def is_curvature(self) -> bool:
        """Whether ``P ⊗ Q`` approximates a curvature matrix."""
        return self.left == "outgrads" and self.right == "inputs"

    # --- state -------------------------------------------------------------------------------------------

    def sides(self, shape: Shape) -> tuple[bool, bool]:
        """Whether a stack has a left and a right factor: one that would be too large is left out."""
        left = self.left != "identity" and shape.outputs <= self.max_factor
        fits = self.input_size(shape) <= self.max_factor or shape.one_hot
        return left, self.right != "identity" and fits

    def moments(self, shape: Shape) -> tuple[bool, bool]:
        """Those of the sides that have a factor: the moment of a side beyond `max_factor` is never formed."""
        left, right = self.sides(shape)
        return left and self.needs_outgrads, right and self.needs_inputs

    def by_channel(self, shape: Shape) -> bool:
        """Whether a stack's input factor is that of its channels."""
        return self.sua and shape.taps > 1

    def input_size(self, shape: Shape) -> int:
        """Rows of the matrix that is kept for Q."""
        return shape.channels if self.by_channel(shape) else shape.inputs

    def init(self, shape: Shape) -> State:
        """Zero statistics, identities in place of their roots (or of a basis, where that is kept up to date)."""
        left, right = self.sides(shape)
        p, q = self.power
        state: State = {}
        if left:
            state |= {"P": symmetric.zeros(shape, shape.outputs, self._newton(p, shape)), "P_count": shape.zeros()}
            self._keep(state, "P", shape, p)
        if right and shape.one_hot:
            state |= {"Q": shape.zeros(shape.inputs), "Q_count": shape.zeros()}
            state["Q_root"] = torch.ones_like(state["Q"])
        elif right:
            size = self.input_size(shape)
            state |= {"Q": symmetric.zeros(shape, size, self._newton(q, shape)), "Q_count": shape.zeros()}
            self._keep(state, "Q", shape, q)
        if right and self.by_channel(shape):
            state |= block_state(shape)
            if shape.bias:
                state["Q_bias_root"] = torch.ones_like(state["Q_bias"])
        return state

    def _keep(self, state: State, side: str, shape: Shape, power: float) -> None:
        """A root; or a basis with its eigenvalues, where roots cannot be refined by products."""
        size, by_products = symmetric.size(state[side]), self._newton(power, shape)
        halves = self.halves_kept(shape, power) if by_products else 0
        if by_products and power != 1:
            stored.keep(state, f"U_{side}", shape.eye(size), halves)
            state[f"s_{side}"] = shape.zeros(size)
        else:
            # One inverse alone (FOOF's) is no great part of a state, and making squares of it a twentieth of the step.
            both = "identity" not in (self.left, self.right)
            triangle = both and halves > 0 and symmetric.packs_inverse(shape, size)
            stored.keep(state, f"{side}_root", shape.eye(size), halves, triangle)

    def _newton(self, power: float, like: Shape | Tensor) -> bool:
        """Whether a factor is treated by products; SUA's blocks are not."""
        return self.method(power, like.dtype, like.device) == "newton" and not self.sua

    def halves_kept(self, shape: Shape, power: float) -> int:
        """Of a matrix that is refined by products: pairs, unless 11 bits are asked for, or the power is a small one.

        A direction ``P⁻¹ G Q⁻¹`` magnifies the rounding of G about a thousand times (condition 1e6, damping 1e-3), with
        powers of ¼ some twenty times.
        """
        if shape.dtype != torch.float32:
            return 0
        return 1 if self.precision == "half" or power <= SMALL_POWER else 2

    # --- statistics --------------------------------------------------------------------------------------

    def observe(self, state: State, seen: Observation, decay: float, health: Health) -> None:
        """Inputs and output gradients, as they come."""
        for side, moment, rows in (("P", seen.G, seen.outgrads), ("Q", seen.A, seen.inputs)):
            if side in state and rows is not None:
                average_rows_(state[side], state[f"{side}_count"], rows, decay, health)
            elif side in state and moment is not None:
                update_mean(state[side], state[f"{side}_count"], moment, decay, seen.seen, health)

    def factors_wait(self, state: State) -> bool:
        """Where roots are kept; beside a basis, every step reads how large factors are."""
        return "U_P" not in state and "U_Q" not in state

    def observe_gradient(self, state: State, grad: Float[Tensor, "K O I"], decay: float, health: Health) -> None:
        """Second moments of the gradient itself."""
        made = {"P": self.left == "gradient", "Q": self.right == "gradient"}
        for side, new in gradient_moments(grad, [side for side in made if made[side] and side in state]):
            if self.accumulate:
                good = finite_moments(new)
                good = good if health.gate is None else good & health.gate
                new = symmetric.alike(new, state[side])
                state[side] += torch.where(good.view(-1, *[1] * (new.ndim - 1)), new, 0.0)
                state[f"{side}_count"] += good.to(state[f"{side}_count"].dtype)
            else:
                update_mean(state[side], state[f"{side}_count"], new, decay, None, health)

    # --- decompositions ----------------------------------------------------------------------------------

    def shifts(self, state: State, groups: slice, context: Context) -> tuple[Tensor | None, Tensor | None]:
        """What damping adds to the left and to the right factor, one number a group."""
        P = state["P"][groups] if "P" in state else None
        Q = state["Q"][groups] if "Q" in state else None
        d = context.damping
        if context.relative:
            # λ is relative to the mean eigenvalue of P ⊗ Q: each of two curvature factors takes its root.
            d = d**0.5 if self.is_curvature and P is not None and Q is not None else d
            floor = torch.finfo((P if P is not None else Q).dtype).tiny  # type: ignore[union-attr]
            left = None if P is None else (d * self._mean_left(P, context)).clamp_min(floor)
            right = None if Q is None else (d * self._mean_right(state, groups, context)).clamp_min(floor)
            return left, right
        if P is None or Q is None or not self.is_curvature:
            return _same_shift(P, d), _same_shift(Q, d)
        left, right = split_damping(
            d, self.split, self._mean_right(state, groups, context), self._mean_left(P, context)
        )
        return left, right

    @staticmethod
    def _mean_left(P: Tensor, context: Context) -> Tensor:
        return mean_eigenvalue(P, None if context.shape is None else context.shape.own_outputs)

    @staticmethod
    def _mean_right(state: State, groups: slice, context: Context) -> Tensor:
        return mean_input_eigenvalue(state, groups, None if context.shape is None else context.shape.own_inputs)

    def refresh(self, state: State, groups: slice, context: Context, health: Health) -> None:
        """Inverse roots of the damped factors."""
        if "P" not in state and "Q" not in state:
            return
        plan = self.plan(state, groups, context, health) if context.plan is None else context.plan
        left, right = self.shifts(state, groups, context)
        p, q = self.power
        for side, shift, power in (("P", left, p), ("Q", right, q), ("Q_bias", right, q)):
            if shift is None or side not in state or plan.only not in (None, f"{side}_root"):
                continue
            M = state[side][groups]
            if f"U_{side}" in state:
                track(state, side, groups, context, plan, self.coupling_limit)
            elif M.ndim > 2 and self._newton(power, M):
                refine_inverse(state, side, groups, shift, context, plan)
            else:
                root = state[f"{side}_root"][groups]
                exact = self.solver == "eigh"
                root.copy_(guarded_root(M, shift, power, root, health, by_eigh=exact))
        health.refreshes += 1

    @property
    def coupling_limit(self) -> float:
        """How far a basis may lag behind its factor before it is brought up to it in more rounds.

        By the larger power of those that are not inverses, which need no basis.
        """
        return coupled(max((p for p in self.power if p not in (0, 1)), default=1.0))

    def watched(self, state: State) -> list[str]:
        """Matrices that are refined by products."""
        found = []
        for side, power in zip(("P", "Q"), self.power, strict=True):
            if side in state and state[side].ndim > 2 and self._newton(power, state[side]):
                found.append(f"U_{side}" if f"U_{side}" in state else f"{side}_root")
        return found

    def plan(self, state: State, groups: slice, context: Context, health: Health) -> Plan:
        """Which matrices are solved exactly, and which of the others take more rounds."""
        exact, rounds = set(), {}
        for name in self.watched(state):
            root = name.endswith("_root")
            known = (state, name, context)
            watch = watch_of(*known) if root else basis_watch(*known, self.coupling_limit)
            first = watch.take_exact(context.step, groups, health)
            young = root and context.age <= EXACT_BATCHES and watch.is_news(groups, context.age)
            if first or young:
                exact.add(name)
            else:
                rounds[name] = watch.most if context.step < YOUNG_STEPS else watch.rounds(groups)
        more, most = (frozenset(name for name in rounds if rounds[name] > least) for least in (1, 2))
        return Plan(frozenset(exact), more, most=most)

    def parts(self, state: State, plan: Plan) -> list[Plan]:
        """Inverses one by one: each is recorded apart, so that few recordings serve all plans."""
        names = self.watched(state)
        apart = self._by_products(state) and all(name.endswith("_root") for name in names)
        return plan.parts(names) if apart else [plan]

    def _by_products(self, state: State) -> bool:
        """Whether all factors are treated by products (and Cholesky)."""
        factors = [side for side in ("P", "Q") if side in state]
        return len(factors) > 0 and len(self.watched(state)) == len(factors)

    def report(self, groups: slice, context: Context) -> None:
        """Send what the device says of the matrices that were refined."""
        for watch in context.memory.values():
            if isinstance(watch, Watch):
                watch.post(context.step, groups)

    def replayable(self, state: State, plan: Plan) -> bool:
        """Where all factors are treated by products and Cholesky: eigh waits for the device."""
        return self._by_products(state) and all(name.endswith("_root") for name in plan.exact)

    def ready(self, state: State, groups: slice) -> bool:
        """Whether no factor is zero."""
        return all(bool((mean_eigenvalue(state[side][groups]) > 0).all()) for side in ("P", "Q") if side in state)

    def conditions(self, state: State, context: Context) -> tuple[Tensor, Tensor] | None:
        """Bounds on condition numbers, and the damping added, per group."""
        if "P" not in state and "Q" not in state:
            return None
        whole = slice(None)
        left, right = self.shifts(state, whole, context)
        blocks = (("P", left), ("Q", right), ("Q_bias", right))
        bounds = [condition_numbers(state[s], shift) for s, shift in blocks if shift is not None and s in state]
        shifts = [shift for shift in (left, right) if shift is not None]
        return torch.stack(bounds).amax(0), torch.stack(shifts).amax(0)

    # --- the step ----------------------------------------------------------------------------------------

    def direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"]:
        """``P⁻ᵖ ∇L Q⁻ᑫ``."""
        return unscaled(self._preconditioned(state, grad, context, health))

    def scaled_direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"] | Scaled:
        """The same, not yet divided; a member with a direction of its own has that."""
        if type(self).direction is not Factors.direction:
            return super().scaled_direction(state, grad, context, health)
        return self._preconditioned(state, grad, context, health)

    def _preconditioned(self, state: State, grad: Tensor, context: Context, health: Health) -> Tensor | Scaled:
        largest = context.largest_of(grad)
        if stored.are_packed_pairs(state, "P_root", "Q_root") and grad.dtype == torch.float32:
            (P, P_scale), (Q, Q_scale) = ((state[f"{s}_root"], state[f"{s}_root_scale"]) for s in ("P", "Q"))
            if long_sums.takes(P, grad, Q):
                before = largest_before(context, grad)
                return long_sums.long_between(P, P_scale, grad, Q, Q_scale, largest, before)
        P, Q = (stored.matrix(state, name) if name in state else None for name in ("P_root", "Q_root"))
        if isinstance(P, Tensor) or isinstance(Q, Tensor):
            D = stored.between(P, grad, None, largest=largest)
            D = D if Q is None else times_inputs(D, Q, state.get("Q_bias_root"))  # type: ignore[arg-type]
        else:
            D = stored.scaled_between(P, grad, Q, largest=largest)
        return self._in_basis(state, unscaled(D), context) if "U_P" in state or "U_Q" in state else D

    def _in_basis(self, state: State, grad: Tensor, context: Context) -> Tensor | Scaled:
        """``U_P [(s_P + shift)⁻ᵖ (s_Q + shift)⁻ᑫ ⊙ U_Pᵀ ∇L U_Q] U_Qᵀ``: the same where a basis is kept, not roots."""
        shifts = self.shifts(state, slice(None), context)
        a, b = (
            (state[f"s_{side}"] + shift.unsqueeze(-1)).pow(-power)
            if f"U_{side}" in state and shift is not None
            else None
            for side, shift, power in zip(("P", "Q"), shifts, self.power, strict=True)
        )
        rough = all(isinstance(stored.matrix(state, name), Half) for name in ("U_P", "U_Q") if name in state)
        R = scaled_rotate(state, grad, context.largest_of(grad), rough=rough)
        along = context.room_for_along(grad)  # ⟨U_P Y U_Qᵀ, ∇L⟩ is ⟨Y, R⟩
        if in_halves(state):
            Y = scaled_half(R, a, b, largest_before(context, grad), along=along)
        else:
            Y = scaled(R, a, b, out=R.C if isinstance(R, Scaled) else R, along=along)
        return context.with_along(scaled_unrotate(state, Y))

    def quadratic(self, state: State, D: Float[Tensor, "K O I"]) -> Tensor | None:
        """``⟨D, P D Q⟩``."""
        if self.left != "outgrads" or "P" not in state or "Q" not in state:
            return None
        P, Q = symmetric.whole(state["P"]), symmetric.whole(state["Q"])
        return (D * (P @ times_inputs(D, Q, state.get("Q_bias")))).sum()

    def describe(self, shape: Shape) -> str:
        """Which statistics, and what was left out."""
        left, right = self.sides(shape)
        P = f"({self.left}, {shape.outputs})" if left else None
        Q = f"({self.right}, {self.input_words(shape)})" if right else None
        large = [
            f"{side} has no factor: {size} > max_factor={self.max_factor}"
            for side, size, asked, has in (
                ("left", shape.outputs, self.left != "identity", left),
                ("right", self.input_size(shape), self.right != "identity", right),
            )
            if asked and not has
        ]
        return self._words(P, Q) + (f"  [{'; '.join(large)}]" if large else "")

    def _words(self, P: str | None, Q: str | None) -> str:
        """The update, its factors with what they are made of."""
        p, q = self.power
        terms = [None if P is None else f"P^-{p:g} {P}", "∇L", None if Q is None else f"Q^-{q:g} {Q}"]
        return " ".join(term for term in terms if term is not None)

    def input_words(self, shape: Shape) -> str:
        """The size of Q, and what is assumed of it."""
        if self.by_channel(shape):
            return f"SUA: {shape.channels} channels at {shape.taps} offsets{', bias apart' if shape.bias else ''}"
        return f"{'diagonal ' if shape.one_hot else ''}{shape.inputs}"
