"""A basis ``U_P ⊗ U_Q`` of a stack's factors: turning into it and back, and keeping it up to date."""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import NumericalError
from layerwise.foundations.linalg import guarded_eigh
from layerwise.foundations.linalg.basis_tracking import tracked_basis
from layerwise.foundations.linalg.half_pairs import HalfPair, multiply, split
from layerwise.optim import stored
from layerwise.optim.channels import times_inputs
from layerwise.optim.rule import Context, Health, State
from layerwise.optim.solver import Watch

BASIS = ("U_P", "U_P_scale", "s_P", "U_Q", "U_Q_scale", "s_Q")
YOUNG_STEPS, YOUNG_SWEEPS = 16, 3
"""While statistics begin, a basis turns fast: more sweeps."""


def rotate(state: State, X: Float[Tensor, "*B K O I"]) -> Float[Tensor, "*B K O I"]:
    """``U_Pᵀ X U_Q``."""
    if "U_P" in state:
        X = stored.times(stored.matrix(state, "U_P").mT, X)
    if "U_Q" not in state:
        return X
    U = stored.matrix(state, "U_Q")
    return stored.times(X, U) if isinstance(U, HalfPair) else times_inputs(X, U, state.get("Q_bias"))  # that block is 1


def unrotate(state: State, Y: Float[Tensor, "*B K O I"]) -> Float[Tensor, "*B K O I"]:
    """``U_P Y U_Qᵀ``. Nothing magnifies its rounding: where the basis is kept in pairs, their first halves are enough."""
    for name, left in (("U_P", True), ("U_Q", False)):
        if name not in state:
            continue
        U = stored.matrix(state, name)
        if isinstance(U, HalfPair):
            Y = stored.times_roughly(U, split(Y)) if left else stored.times_roughly(split(Y), U.mT)
        else:
            Y = U @ Y if left else times_inputs(Y, U.mT, state.get("Q_bias"))
    return Y


def track(state: State, side: str, groups: slice, context: Context, health: Health) -> None:
    """The basis of some groups after their factor has changed: by sweeps of products; at first by eigh."""
    name, M = f"U_{side}", state[side][groups]
    watch = context.memory.setdefault(name, Watch([True] * len(state[side])))
    if watch.take_exact(context.step, groups):
        begin(state, side, groups, health)
        return
    product = multiply if stored.is_paired(state, name) else torch.matmul
    sweeps = YOUNG_SWEEPS if context.step < YOUNG_STEPS else 1
    U, values, _ = tracked_basis(M, stored.value(state, name, groups), sweeps=sweeps, matmul=product)
    good = torch.isfinite(values).all(-1)
    health.count("fallbacks", (~good).sum())
    stored.write(state, name, groups, U, good)
    stored.write(state, f"s_{side}", groups, values.clamp_min(0), good)


def begin(state: State, side: str, groups: slice, health: Health) -> None:
    """By eigh; a factor that cannot be decomposed keeps its basis."""
    try:
        values, vectors = guarded_eigh(state[side][groups], name="factor")
    except NumericalError:
        health.fallbacks += groups.stop - groups.start
        return
    stored.write(state, f"U_{side}", groups, vectors.to(state[side].dtype))
    stored.write(state, f"s_{side}", groups, values.to(state[side].dtype))
