"""A basis ``U_P ⊗ U_Q`` of a stack's factors: turning into it and back, and keeping it up to date."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.foundations.errors import NumericalError
from layerwise.foundations.linalg import settled_eigh
from layerwise.optim.channels import times_inputs
from layerwise.optim.cuda import factor as symmetric
from layerwise.optim.cuda import storage as stored
from layerwise.optim.cuda.basis_monitor import CLOSELY_COUPLED, basis_watch
from layerwise.optim.cuda.inverse import own_size
from layerwise.optim.cuda.linalg import orthogonal
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.jacobi import tracked_basis
from layerwise.optim.cuda.linalg.jacobi_fp16 import tracked_half
from layerwise.optim.cuda.monitor import Plan
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.storage import products_of
from layerwise.optim.cuda.unscaled import unscaled
from layerwise.optim.rule import Context, State

BASIS = ("U_P", "U_P_scale", "s_P", "U_Q", "U_Q_scale", "s_Q")


def rotate(
    state: State, X: Float[Tensor, "*B K O I"], largest: Tensor | None = None, *, rough: bool = False
) -> Float[Tensor, "*B K O I"]:
    """``U_Pᵀ X U_Q``; `largest` is what no entry of each matrix exceeds, where that is known.

    With a basis that is kept in halves, X is rounded to a half where `rough` will do, else to a pair.
    """
    return unscaled(scaled_rotate(state, X, largest, rough=rough))


def scaled_rotate(
    state: State, X: Float[Tensor, "*B K O I"], largest: Tensor | None = None, *, rough: bool = False
) -> Float[Tensor, "*B K O I"] | Scaled:
    """The same, perhaps not yet divided: in float32 always, and never X itself if there is a basis."""
    P, Q = (stored.matrix(state, name) if name in state else None for name in ("U_P", "U_Q"))
    if isinstance(P, Tensor) or isinstance(Q, Tensor):
        X = X if P is None else P.mT @ X  # type: ignore[operator]
        return X if Q is None else times_inputs(X, Q, state.get("Q_bias"))  # type: ignore[arg-type]  # that block is 1
    if P is None and Q is None:
        return X
    left = None if P is None else P.mT
    if rough:
        return orthogonal.rough_between(left, orthogonal.with_room(X, largest), Q)
    return orthogonal.between(left, stored.operand_of(X, largest), Q)  # type: ignore[arg-type]


def unrotate(state: State, Y: Float[Tensor, "*B K O I"]) -> Float[Tensor, "*B K O I"]:
    """``U_P Y U_Qᵀ``. Nothing magnifies its rounding: of a basis that is kept in pairs, the first halves are enough."""
    return unscaled(scaled_unrotate(state, Y))


def scaled_unrotate(state: State, Y: Float[Tensor, "*B K O I"] | Half) -> Float[Tensor, "*B K O I"] | Scaled:
    """The same, perhaps not yet divided; Y may be a half with room (`orthogonal`) where `in_halves` says so."""
    P, Q = (stored.matrix(state, name) if name in state else None for name in ("U_P", "U_Q"))
    if isinstance(Y, Tensor) and (isinstance(P, Tensor) or isinstance(Q, Tensor)):
        Y = Y if P is None else P @ Y  # type: ignore[operator]
        return Y if Q is None else times_inputs(Y, Q.mT, state.get("Q_bias"))  # type: ignore[arg-type]
    if isinstance(Y, Tensor) and P is None and Q is None:
        return Y
    half = Y if isinstance(Y, Half) else orthogonal.with_room(Y)
    return orthogonal.rough_between(P, half, None if Q is None else Q.mT, narrow=True)  # type: ignore[arg-type]


def in_halves(state: State) -> bool:
    """Whether there is a basis, kept in halves."""
    names = [name for name in ("U_P", "U_Q") if name in state]
    return len(names) > 0 and all(stored.is_halved(state, name) for name in names)


def largest_before(context: Context, X: Float[Tensor, "K O I"]) -> Float[Tensor, "K"]:
    """What a product or a step in the basis left of each group at the last step, its largest entry; zeros at first."""
    known = context.memory.get("largest_before")
    if known is None or len(known) != len(X):
        known = context.memory["largest_before"] = torch.zeros(len(X), dtype=torch.float32, device=X.device)
    return known


def track(state: State, side: str, groups: slice, context: Context, plan: Plan, limit: float = CLOSELY_COUPLED) -> None:
    """The basis of some groups after their factor has changed: by sweeps of products; at first by eigh.

    What overflows keeps its basis and is begun again at its next turn, see `sweeps`. Beyond a coupling of `limit` the
    next turns take more sweeps, where more are of use.
    """
    name = f"U_{side}"
    if name in plan.exact:
        good = begin(state, side, groups, context)
        basis_watch(state, name, context, limit).say_begun(groups, good)
        return
    M = symmetric.operand(state[side][groups])
    kept, sweeps = stored.matrix(state, name, groups), plan.rounds(name)
    if isinstance(kept, Half):
        U, values, couplings = tracked_half(M, kept, sweeps)
    else:
        products = products_of(state, name)
        U, values, couplings = tracked_basis(M, stored.value(state, name, groups), sweeps, products)
    good = torch.isfinite(values).all(-1) & torch.isfinite(couplings[-1])
    basis_watch(state, name, context, limit).say(groups, torch.where(good, couplings, torch.inf))
    stored.write(state, name, groups, U, good)
    stored.write(state, f"s_{side}", groups, values.clamp_min(0), good)


def begin(state: State, side: str, groups: slice, context: Context) -> Bool[Tensor, "K"]:
    """By eigh, largest last, padding apart; a factor that cannot be decomposed keeps its basis. Returns which could."""
    M = symmetric.whole(state[side][groups])
    own = own_size(side, context, M)
    values, vectors, good = _decomposed(M[:, :own, :own])
    U, s = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).repeat(len(M), 1, 1), torch.zeros_like(M[:, 0])
    U[:, :own, :own], s[:, :own] = vectors.to(M.dtype), values.to(M.dtype)
    stored.write(state, f"U_{side}", groups, U, good)
    stored.write(state, f"s_{side}", groups, s, good)
    return good


def _decomposed(M: Float[Tensor, "K n n"]) -> tuple[Tensor, Tensor, Bool[Tensor, "K"]]:
    """Eigenvalues, vectors and which are such; one by one where not all are, so that one does not cost the others."""
    try:
        return *settled_eigh(M, name="factor"), torch.ones(len(M), dtype=torch.bool, device=M.device)
    except NumericalError:
        if len(M) == 1:
            return torch.zeros_like(M[:, 0]), torch.zeros_like(M), torch.zeros(1, dtype=torch.bool, device=M.device)
    values, vectors, good = zip(*(_decomposed(one) for one in M.split(1)), strict=True)
    return torch.cat(values), torch.cat(vectors), torch.cat(good)
