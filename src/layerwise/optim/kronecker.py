"""Two factors a layer: which second moments P and Q are of, what damping adds to them, and ``P⁻ᵖ ∇L Q⁻ᑫ``."""

from dataclasses import dataclass, field
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.kronecker import split_damping
from layerwise.optim.backend import Backend, Factor, Shifts, Side
from layerwise.optim.rule import Context, Observation, Requirements, Shape, State, UpdateRule

LEFT = ("outgrads", "gradient", "identity")
RIGHT = ("inputs", "gradient", "identity")


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """One of some names."""
    if value not in known:
        raise InputError(not_one_of(name, value, known))


@dataclass(frozen=True)
class FactorPair:
    """What P and Q are second moments of, and which stacks have them.

    left: "outgrads" (``P = 1/N Σ g gᵀ``), "gradient" (``∇L ∇Lᵀ``) or "identity"; right: "inputs" (``Q = mean a aᵀ``),
    "gradient" (``∇Lᵀ ∇L``) or "identity".
    """

    left: str
    right: str
    max_factor: int = 8192
    """A side longer than this has no factor."""
    by_channel: bool = False
    """SUA: whether Q of a convolution acts on channels alone."""

    def __post_init__(self) -> None:
        check_choice("left", self.left, LEFT)
        check_choice("right", self.right, RIGHT)
        if self.by_channel and self.right != "inputs":
            raise InputError(
                describe(f'sua=True with right="{self.right}"', 'right="inputs"', "leave sua out: it is about inputs")
            )

    def sides(self, shape: Shape) -> tuple[bool, bool]:
        """Whether a stack has P and Q: a factor that would be too large is left out."""
        left = self.left != "identity" and shape.outputs <= self.max_factor
        fits = self.input_size(shape) <= self.max_factor or shape.one_hot
        return left, self.right != "identity" and fits

    def input_size(self, shape: Shape) -> int:
        """Rows of the matrix that is kept for Q."""
        return shape.channels if self.by_channel and shape.taps > 1 else shape.inputs

    def requirements(self, shape: Shape | None, powers: tuple[float, float], **others: Any) -> Requirements:
        """Which statistics; of a side beyond `max_factor` no moment is ever formed."""
        P, Q = (True, True) if shape is None else self.sides(shape)
        names = {"P": self.left, "Q": self.right}
        used = (self.left != "identity", self.right != "identity")
        return Requirements(
            inputs=Q and self.right == "inputs",
            outgrads=P and self.left == "outgrads",
            gradient="gradient" in (self.left, self.right),
            by_channel=self.by_channel,
            refreshes=any(used),
            powers=tuple(power if on else None for power, on in zip(powers, used, strict=True)),  # type: ignore[arg-type]
            **{"factors": {side: of for side, of in names.items() if of != "identity"}, **others},
        )

    def init(self, shape: Shape, backend: Backend, power: tuple[float, float]) -> State:
        """Factors without statistics."""
        (left, right), state = self.sides(shape), State()
        if left:
            state["P"] = backend.factor("P", shape, shape.outputs, power[0], self.by_channel)
        if right:
            state["Q"] = backend.factor("Q", shape, self.input_size(shape), power[1], self.by_channel)
        return state

    def observe(self, state: State, seen: Observation, context: Context, how: Any = "mean") -> None:
        """Output gradients and inputs, or the gradient itself; whichever came."""
        decay = context.options["factor_decay"]
        P, Q = state.get("P"), state.get("Q")
        if seen.gradient is not None:
            of_gradient: list[Side] = []
            if P is not None and self.left == "gradient":
                of_gradient.append("P")
            if Q is not None and self.right == "gradient":
                of_gradient.append("Q")
            for side, new in context.backend.gradient_moments(seen.gradient, of_gradient, context):
                state[side].update_(new, decay, context, how=how)
        if P is not None and seen.G is not None:
            P.update_(seen.G, decay, context, seen.seen)
        if Q is not None and seen.A is not None:
            Q.update_(seen.A, decay, context, seen.seen)

    def shifts(self, context: Context, split: str = "trace") -> Shifts:
        """What damping λ adds to P and to Q, one number a group.

        λ is relative to the mean eigenvalue of ``P ⊗ Q`` (or of the one factor that there is): each of two curvature
        factors takes its root, ``√λ tr P/O`` and ``√λ tr Q/I``. Absolute, it is divided between the two by `split`:
        "trace", ``√λ/π`` to P and ``π√λ`` to Q with ``π² = (tr Q/I)/(tr P/O)``, or "equal", π = 1.
        """
        damping, is_curvature = context.damping, self.left == "outgrads" and self.right == "inputs"

        def of_means(mean_P: Tensor | None, mean_Q: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
            curvature = is_curvature and mean_P is not None and mean_Q is not None
            if context.relative:
                d = damping**0.5 if curvature else damping
                left, right = (None if mean is None else _share(d, mean) for mean in (mean_P, mean_Q))
                return left, right
            if curvature:
                assert mean_P is not None
                assert mean_Q is not None
                return split_damping(damping, split, mean_A=mean_Q, mean_G=mean_P)
            left = None if mean_P is None else torch.full_like(mean_P, damping)
            return left, None if mean_Q is None else torch.full_like(mean_Q, damping)

        return of_means

    def quadratic(self, state: State, D: Float[Tensor, "K O I"]) -> Tensor | None:
        """``⟨D, P D Q⟩``, where P and Q are a curvature's."""
        if self.left != "outgrads" or "P" not in state or "Q" not in state:
            return None
        return (D * state["P"].product(state["Q"].product(D))).sum()

    def words(self, shape: Shape) -> tuple[str | None, str | None, str]:
        """P and Q with what they are made of, and what was left out."""
        left, right = self.sides(shape)
        if self.by_channel and shape.taps > 1:
            inputs = f"SUA: {shape.channels} channels at {shape.taps} offsets{', bias apart' if shape.bias else ''}"
        else:
            inputs = f"{'diagonal ' if shape.one_hot else ''}{shape.inputs}"
        large = [
            f"{side} has no factor: {size} > max_factor={self.max_factor}"
            for side, size, asked, has in (
                ("left", shape.outputs, self.left != "identity", left),
                ("right", self.input_size(shape), self.right != "identity", right),
            )
            if asked and not has
        ]
        P, Q = f"({self.left}, {shape.outputs})" if left else None, f"({self.right}, {inputs})" if right else None
        return P, Q, f"  [{'; '.join(large)}]" if large else ""


@final
@dataclass
class KroneckerRoots(UpdateRule):
    """``P⁻ᵖ ∇L Q⁻ᑫ``: the rule of K-FAC, FOOF and Shampoo, each with its own P, Q and powers."""

    left: str = "outgrads"
    right: str = "inputs"
    power: tuple[float, float] = (1.0, 1.0)
    split: str = "trace"
    """How absolute damping is divided between P and Q."""
    max_factor: int = 8192
    accumulate: bool = False
    """Sum statistics instead of averaging them (Shampoo's own accumulator)."""
    sua: bool = field(default=False, kw_only=True)
    name = "factors"
    formula = "P⁻ᵖ ∇L Q⁻ᑫ"

    def __post_init__(self) -> None:
        self.pair = FactorPair(self.left, self.right, self.max_factor, self.sua)
        check_choice("damping_split", self.split, ("trace", "equal", "exact"))

    def requirements(self, shape: Shape | None = None) -> Requirements:
        """Statistics of both sides, as far as they have factors."""
        how = "sum of " if self.accumulate else ""
        factors = {side: how + of for side, of in (("P", self.left), ("Q", self.right)) if of != "identity"}
        factors["power"] = "{:g}, {:g}".format(*self.power)
        return self.pair.requirements(shape, self.power, factors=factors, capturable=True, deferrable=True)

    def init(self, shape: Shape, backend: Backend) -> State:
        """Factors, and identities in place of their roots."""
        state = self.pair.init(shape, backend, self.power)
        if state:
            state["roots"] = backend.inverse_roots(state.get("P"), state.get("Q"), self.power, shape)
        return state

    def observe(self, state: State, seen: Observation, context: Context) -> None:
        """Running means, or sums, of second moments."""
        self.pair.observe(state, seen, context, how="sum" if self.accumulate else "mean")

    def refresh(self, state: State, groups: slice, context: Context) -> None:
        """Inverse roots of the damped factors."""
        if "roots" in state:
            shifts = self.pair.shifts(context, self.split)
            state["roots"].refresh_(state.get("P"), state.get("Q"), shifts, groups, context)
            context.health.refreshes += 1

    def direction(self, state: State, grad: Float[Tensor, "K O I"], context: Context) -> Any:
        """``P⁻ᵖ ∇L Q⁻ᑫ``."""
        if "roots" not in state:  # both sides are too long for a factor
            return grad
        return state["roots"].direction(grad, context, self.pair.shifts(context, self.split))

    def conditions(self, state: State, context: Context) -> tuple[Tensor, Tensor] | None:
        """Bounds on condition numbers, and the damping added, per group."""
        return factor_conditions(state, self.pair.shifts(context, self.split))

    def quadratic(self, state: State, D: Float[Tensor, "K O I"]) -> Tensor | None:
        """``⟨D, P D Q⟩``."""
        return self.pair.quadratic(state, D)

    def describe(self, shape: Shape) -> str:
        """Which statistics, and what was left out."""
        P, Q, missing = self.pair.words(shape)
        return formula_words(P, "∇L", Q, self.power) + missing


def formula_words(P: str | None, between: str, Q: str | None, power: tuple[float, float]) -> str:
    """``P^-1 (outgrads, 8) ∇L Q^-1 (inputs, 4)``."""
    terms = [None if P is None else f"P^-{power[0]:g} {P}", between, None if Q is None else f"Q^-{power[1]:g} {Q}"]
    return " ".join(term for term in terms if term is not None)


def factor_conditions(state: State, shifts: Shifts) -> tuple[Tensor, Tensor] | None:
    """The larger of both factors' bounds, and of what damping adds to them."""
    factors: list[Factor | None] = [state.get("P"), state.get("Q")]
    added = shifts(*(None if factor is None else factor.mean_eigenvalue() for factor in factors))
    found = [(M, shift) for M, shift in zip(factors, added, strict=True) if M is not None and shift is not None]
    if not found:
        return None
    bounds = [factor.condition(shift) for factor, shift in found]
    return torch.stack(bounds).amax(0), torch.stack([shift for _, shift in found]).amax(0)


def _share(damping: float, mean: Float[Tensor, "K"]) -> Float[Tensor, "K"]:
    """Of the mean eigenvalue; 1, where a factor is still zero: its root is then the identity, and not infinite."""
    return torch.where(mean > 0, (damping * mean).clamp_min(torch.finfo(mean.dtype).tiny), 1.0)
