"""`Factors`: ``P⁻ᵖ ∇L Q⁻ᑫ`` with factors from inputs, output gradients, or the gradient itself."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.kronecker import split_damping
from layerwise.optim.averaging import update_mean
from layerwise.optim.roots import condition_numbers, guarded_root, mean_eigenvalue
from layerwise.optim.rule import Context, Health, Observation, Shape, State, UpdateRule

LEFT = ("outgrads", "gradient", "identity")
RIGHT = ("inputs", "gradient", "identity")


def check_side(name: str, value: str, known: tuple[str, ...]) -> None:
    """A statistic by name."""
    if value not in known:
        raise InputError(describe(f"{name}={value!r}", " or ".join(f'"{k}"' for k in known), "choose one of them"))


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
    refreshed = ("P_root", "Q_root")
    name = "factors"
    formula = "P⁻ᵖ ∇L Q⁻ᑫ"

    def __post_init__(self) -> None:
        check_side("left", self.left, LEFT)
        check_side("right", self.right, RIGHT)
        check_side("damping_split", self.split, ("trace", "equal", "exact"))
        self.refreshes = (self.left, self.right) != ("identity", "identity")
        self.needs_inputs = self.right == "inputs"
        self.needs_outgrads = self.left == "outgrads"

    @property
    def is_curvature(self) -> bool:
        """Whether ``P ⊗ Q`` approximates a curvature matrix."""
        return self.left == "outgrads" and self.right == "inputs"

    # --- state -------------------------------------------------------------------------------------------

    def sides(self, shape: Shape) -> tuple[bool, bool]:
        """Whether a stack has a left and a right factor: one that would be too large is left out."""
        left = self.left != "identity" and shape.outputs <= self.max_factor
        fits = shape.inputs <= self.max_factor or shape.one_hot
        return left, self.right != "identity" and fits

    def init(self, shape: Shape) -> State:
        """Zero statistics, identities in place of their roots."""
        left, right = self.sides(shape)
        state: State = {}
        if left:
            state |= {"P": shape.zeros(shape.outputs, shape.outputs), "P_count": shape.zeros()}
            state["P_root"] = shape.eye(shape.outputs)
        if right and shape.one_hot:
            state |= {"Q": shape.zeros(shape.inputs), "Q_count": shape.zeros()}
            state["Q_root"] = torch.ones_like(state["Q"])
        elif right:
            state |= {"Q": shape.zeros(shape.inputs, shape.inputs), "Q_count": shape.zeros()}
            state["Q_root"] = shape.eye(shape.inputs)
        return state

    # --- statistics --------------------------------------------------------------------------------------

    def observe(self, state: State, seen: Observation, decay: float, health: Health) -> None:
        """Inputs and output gradients, as they come."""
        if "P" in state and seen.G is not None:
            update_mean(state["P"], state["P_count"], seen.G, decay, seen.seen, health)
        if "Q" in state and seen.A is not None:
            update_mean(state["Q"], state["Q_count"], seen.A, decay, seen.seen, health)

    def observe_gradient(self, state: State, grad: Float[Tensor, "K O I"], decay: float, health: Health) -> None:
        """Second moments of the gradient itself."""
        for side, made in (("P", self.left == "gradient"), ("Q", self.right == "gradient")):
            if not made or side not in state:
                continue
            new = grad @ grad.mT if side == "P" else grad.mT @ grad
            if self.accumulate:
                good = torch.isfinite(new.flatten(1)).all(1)
                state[side] += torch.where(good.view(-1, 1, 1), new, 0.0)
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
            left = None if P is None else (d * mean_eigenvalue(P)).clamp_min(floor)
            right = None if Q is None else (d * mean_eigenvalue(Q)).clamp_min(floor)
            return left, right
        if P is None or Q is None or not self.is_curvature:
            return _same_shift(P, d), _same_shift(Q, d)
        left, right = split_damping(d, self.split, mean_eigenvalue(Q), mean_eigenvalue(P))
        return left, right

    def refresh(self, state: State, groups: slice, context: Context, health: Health) -> None:
        """Inverse roots of the damped factors."""
        if "P" not in state and "Q" not in state:
            return
        left, right = self.shifts(state, groups, context)
        for side, shift, power in (("P", left, self.power[0]), ("Q", right, self.power[1])):
            if shift is None:
                continue
            M, root = state[side][groups], state[f"{side}_root"][groups]
            root.copy_(guarded_root(M, shift, power, root, health))
        health.refreshes += 1

    def ready(self, state: State, groups: slice) -> bool:
        """Whether no factor is zero."""
        return all(bool((mean_eigenvalue(state[side][groups]) > 0).all()) for side in ("P", "Q") if side in state)

    def conditions(self, state: State, context: Context) -> tuple[Tensor, Tensor] | None:
        """Bounds on condition numbers, and the damping added, per group."""
        if "P" not in state and "Q" not in state:
            return None
        whole = slice(None)
        left, right = self.shifts(state, whole, context)
        bounds = [condition_numbers(state[s], shift) for s, shift in (("P", left), ("Q", right)) if shift is not None]
        shifts = [shift for shift in (left, right) if shift is not None]
        return torch.stack(bounds).amax(0), torch.stack(shifts).amax(0)

    # --- the step ----------------------------------------------------------------------------------------

    def direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"]:
        """``P⁻ᵖ ∇L Q⁻ᑫ``."""
        D = state["P_root"] @ grad if "P_root" in state else grad
        if "Q_root" not in state:
            return D
        Q = state["Q_root"]
        return D * Q.unsqueeze(-2) if Q.ndim == 2 else D @ Q

    def quadratic(self, state: State, D: Float[Tensor, "K O I"]) -> Tensor | None:
        """``⟨D, P D Q⟩``."""
        if self.left != "outgrads" or "P" not in state or "Q" not in state:
            return None
        Q = state["Q"]
        PDQ = state["P"] @ (D * Q.unsqueeze(-2) if Q.ndim == 2 else D @ Q)
        return (D * PDQ).sum()

    def describe(self, shape: Shape) -> str:
        """Which statistics, and what was left out."""
        left, right = self.sides(shape)
        p, q = self.power
        terms = [f"P^-{p:g} ({self.left}, {shape.outputs})"] if left else []
        terms.append("∇L")
        if right:
            terms.append(f"Q^-{q:g} ({self.right}, {'diagonal ' if shape.one_hot else ''}{shape.inputs})")
        large = [
            f"{side} has no factor: {size} > max_factor={self.max_factor}"
            for side, size, asked, has in (
                ("left", shape.outputs, self.left != "identity", left),
                ("right", shape.inputs, self.right != "identity", right),
            )
            if asked and not has
        ]
        return " ".join(terms) + (f"  [{'; '.join(large)}]" if large else "")
