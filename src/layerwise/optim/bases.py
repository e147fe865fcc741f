"""A basis ``U_P ⊗ U_Q`` of a stack's factors: turning into it and back, and keeping it up to date."""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import NumericalError
from layerwise.foundations.fused_scaled import Scaled
from layerwise.foundations.fused_unscaled import unscaled
from layerwise.foundations.linalg import guarded_eigh
from layerwise.foundations.linalg.basis_tracking import tracked_basis
from layerwise.optim import stored
from layerwise.optim.channels import times_inputs
from layerwise.optim.refined import own_size, watch_of
from layerwise.optim.rule import Context, Health, State
from layerwise.optim.solver import EASY, FAILED, REFINED, Plan
from layerwise.optim.stored import products_of

BASIS = ("U_P", "U_P_scale", "s_P", "U_Q", "U_Q_scale", "s_Q")
MORE_SWEEPS = 3
"""At first, when a basis turns fast, and after one sweep did not suffice."""
COUPLED = 0.045
"""Of the coupling before the last sweep. On factors of trainings EKFAC's directions err by a fifth of it, Shampoo's by
a sixth (power ½) or a fourteenth (¼)."""
LOOSELY_COUPLED = 0.5
"""The same where second moments are measured in whatever basis there is: about what a step of orthogonal iteration,
SOAP's own, leaves of a factor that changes fast."""


def rotate(state: State, X: Float[Tensor, "*B K O I"], largest: Tensor | None = None) -> Float[Tensor, "*B K O I"]:
    """``U_Pᵀ X U_Q``; `largest` is what no entry of each matrix exceeds, where that is known."""
    P, Q = (stored.matrix(state, name) if name in state else None for name in ("U_P", "U_Q"))
    if isinstance(P, Tensor) or isinstance(Q, Tensor):
        X = X if P is None else P.mT @ X  # type: ignore[operator]
        return X if Q is None else times_inputs(X, Q, state.get("Q_bias"))  # type: ignore[arg-type]  # that block is 1
    return stored.between(None if P is None else P.mT, X, Q, largest=largest)


def unrotate(state: State, Y: Float[Tensor, "*B K O I"]) -> Float[Tensor, "*B K O I"]:
    """``U_P Y U_Qᵀ``. Nothing magnifies its rounding: of a basis that is kept in pairs, the first halves are enough."""
    return unscaled(scaled_unrotate(state, Y))


def scaled_unrotate(state: State, Y: Float[Tensor, "*B K O I"]) -> Float[Tensor, "*B K O I"] | Scaled:
    """The same, perhaps not yet divided."""
    P, Q = (stored.matrix(state, name) if name in state else None for name in ("U_P", "U_Q"))
    if isinstance(P, Tensor) or isinstance(Q, Tensor):
        Y = Y if P is None else P @ Y  # type: ignore[operator]
        return Y if Q is None else times_inputs(Y, Q.mT, state.get("Q_bias"))  # type: ignore[arg-type]
    return stored.scaled_between(P, Y, None if Q is None else Q.mT, rough=True)


def track(
    state: State, side: str, groups: slice, context: Context, health: Health, plan: Plan, limit: float = COUPLED
) -> None:
    """The basis of some groups after their factor has changed: by sweeps of products; at first by eigh.

    Beyond a coupling of `limit` the next turns take more sweeps.
    """
    name, M = f"U_{side}", state[side][groups]
    if name in plan.exact:
        begin(state, side, groups, context, health)
        return
    sweeps, products = MORE_SWEEPS if name in plan.more else 1, products_of(state, name)
    U, values, left = tracked_basis(M, stored.value(state, name, groups), sweeps=sweeps, products=products)
    good = torch.isfinite(values).all(-1)
    verdict = torch.where(good, torch.where(left < limit, EASY, REFINED), FAILED)
    watch_of(state, name, context).verdict[groups] = verdict.to(torch.int8)
    stored.write(state, name, groups, U, good)
    stored.write(state, f"s_{side}", groups, values.clamp_min(0), good)


def begin(state: State, side: str, groups: slice, context: Context, health: Health) -> None:
    """By eigh, largest last, padding apart; a factor that cannot be decomposed keeps its basis."""
    M = state[side][groups]
    own = own_size(side, context, M)
    try:
        values, vectors = guarded_eigh(M[:, :own, :own], name="factor")
    except NumericalError:
        health.fallbacks += len(M)
        return
    U, s = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).repeat(len(M), 1, 1), torch.zeros_like(M[:, 0])
    U[:, :own, :own], s[:, :own] = vectors.to(M.dtype), values.to(M.dtype)
    stored.write(state, f"U_{side}", groups, U)
    stored.write(state, f"s_{side}", groups, s)
