"""`RotatedAdam`: SOAP, Adam in the eigenbasis of Shampoo's factors."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from layerwise.foundations.linalg import finite_matrices
from layerwise.optim.averaging import finite_moments
from layerwise.optim.cuda import factor as symmetric
from layerwise.optim.cuda import storage as stored
from layerwise.optim.cuda.adam_corrections import corrections_
from layerwise.optim.cuda.basis import in_halves
from layerwise.optim.cuda.elementwise import rotated_adam_
from layerwise.optim.cuda.elementwise_torch import above
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.jacobi import carried
from layerwise.optim.cuda.linalg.moments_in_new_basis import turn_between, turn_moments_
from layerwise.optim.cuda.linalg.orthogonal import ROOM
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.triton.splits import bound_scale
from layerwise.optim.cuda.unscaled import unscaled
from layerwise.optim.eigenbasis import EigenFactors
from layerwise.optim.elementwise import average_squares_
from layerwise.optim.factors import gradient_moments
from layerwise.optim.rule import Context, Health, Shape, State

NO_SIGNAL = 0.75
"""The power of ε, the rounding of the type, that gradients in the basis must exceed; see `RotatedAdam.floor`."""
DEPENDENT = 64
"""Times ε, of the largest: columns of ``M U`` that others leave no more of are rounding to a good part, and stay."""
UNBOUNDED_STEP = 2.0**7
"""Of Adam, where its step has no bound."""


def step_bound(beta1: float, beta2: float) -> float:
    """What no entry of ``M/(√V + ε)·√c₂/c₁`` exceeds, at any step, in a basis that stays.

    By Cauchy and Schwarz |M| is at most ``(1 − β₁) √(Σ (β₁²/β₂)ᵗ Σ β₂ᵗ g²)``; with equal averages the bound is 1. Where
    momentum lasts longer than the root of V there is none, only a number that is seldom reached. A basis that turns may
    make more of it, √n times as much at worst; what exceeds it a thousand times is cut off.

    >>> step_bound(0.95, 0.95), round(step_bound(0.9, 0.999), 2)
    (1.0, 7.27)
    """
    if beta1**2 >= beta2:
        return UNBOUNDED_STEP
    return max(1.0, round((1 - beta1) / ((1 - beta2) * (1 - beta1**2 / beta2)) ** 0.5, 6))


def _columns(X: Float[Tensor, "K m n"], order: Int[Tensor, "K n"]) -> Float[Tensor, "K m n"]:
    return X.gather(-1, order.unsqueeze(-2).expand_as(X))


def _with_null_last(
    Z: Float[Tensor, "K n n"], U: Float[Tensor, "K n n"], order: Int[Tensor, "K n"], null: Bool[Tensor, "K n"]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Columns of Z, those of U in place of null ones, these last; U, the order and which are null likewise."""
    last = null.to(torch.int8).argsort(dim=-1, stable=True)
    Z = torch.where(null.unsqueeze(-2), U, Z)
    return _columns(Z, last), _columns(U, last), order.gather(-1, last), null.gather(-1, last)


@dataclass
class RotatedAdam(EigenFactors):
    """SOAP: Adam in the eigenbasis of Shampoo's factors.

    ``W ← W − η U_P [M′ / (√V + ε)] U_Qᵀ``, ``M′ = U_Pᵀ M U_Q``, V the average of ``(U_Pᵀ ∇L U_Q)²``. The state "M" is
    M′, in the present basis: it is turned when the basis is, which spares a rotation at every other step. Where V is
    what rounding leaves of a gradient without any part in a direction, there is no step (`floor`).
    """

    left: str = "gradient"
    right: str = "gradient"
    betas: tuple[float, float] = (0.95, 0.95)
    eps: float = 1e-8
    skip_first: bool = True
    name = "soap"
    recordable = True
    own_momentum = "betas"
    formula = "U_P[M′/(√V + ε)]U_Qᵀ"

    def init(self, shape: Shape) -> State:
        """And both moments, with a count of steps."""
        moments = {name: shape.zeros(shape.outputs, shape.inputs) for name in ("M", "V")}
        return {**super().init(shape), **moments, "steps": shape.zeros(), "begun": shape.zeros()}

    def _preconditioned(self, state: State, grad: Tensor, context: Context, health: Health) -> Tensor | Scaled:
        """Factors are updated after the step, as in the paper."""
        begins = self._begins(state, context)
        D = super()._preconditioned(state, grad, context, health)
        if context.observes and not (begins and self.skip_first):
            self._take_gradient(state, grad, context, health)
        return D

    def step_in_basis(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"] | Half | None:
        """Adam's direction in the basis; the first step only sets the basis, as in the authors' code."""
        if self._begins(state, context):
            if health.gate is not None and not bool(health.gate):  # asked at the first steps alone
                return None
            self._begin(state, grad, context, health)
            if self.skip_first:
                return None
        b1, b2 = context.option("betas", self.betas)
        rotated = self.turned(state, grad, context)
        if health.gate is not None and grad.dtype == torch.float32:
            return self._fused_step(state, rotated, grad, context, health)
        rotated = unscaled(rotated)
        state["steps"] += health.taken(1.0, grad)
        state["M"].lerp_(rotated, health.taken(1 - b1, grad))
        average_squares_(state["V"], rotated, health.taken(1 - b2, grad))
        t = state["steps"].clamp_min(1)
        floor, t = self.floor(state, 1 - b2**t, context), t.view(-1, 1, 1)
        step = (state["M"] / state["V"].sqrt().add_(self.eps * context.unit)).mul_((1 - b2**t).sqrt() / (1 - b1**t))
        if floor is None:
            return step
        kept = above(state["V"], floor)
        health.count("floored_layers", (kept.flatten(1).amin(1) == 0).sum())
        return step.mul_(kept)

    def floor(self, state: State, correction: Float[Tensor, "K"], context: Context) -> Float[Tensor, "K"] | None:
        """Up to this V is rounding, and no step is taken; None: nothing is rotated, and every entry is exact.

        A gradient G has no part in the null space of its factors, but ``U_Pᵀ G U_Q`` is not zero there: products leave
        some ``ε ‖G‖/√n`` (ε of the type), and vectors that are themselves known to rounding leave more of it, up to
        ``√ε ‖G‖/√n``, below which a factor knows nothing. Adam would make steps of size one of that, in directions that
        differ from one processor to the next. The floor lies between the two, at ``ε^¾ ‖G‖/√n``. ‖G‖² is the trace
        of a factor, an average of squares like V, each over its own weights (`correction` is that of V).
        """
        side = next((side for side in ("P", "Q") if f"U_{side}" in state), None)
        if side is None:
            return None
        O, I = state["V"].shape[-2:] if context.shape is None else (context.shape.own_outputs, context.shape.own_inputs)
        share = torch.finfo(state["V"].dtype).eps ** (2 * NO_SIGNAL) / max(1, min(O, I))
        squares = symmetric.diagonal(state[side]).sum(-1) / (
            1 - context.option("betas", self.betas)[1] ** state[f"{side}_count"].clamp_min(1)
        )
        return share * squares * correction

    def _fused_step(
        self, state: State, rotated: Tensor | Scaled, grad: Tensor, context: Context, health: Health
    ) -> Tensor | Half:
        """The same in one pass; not over the gradient itself, which a stack without factors has in place of R.

        Where the basis is kept in halves the step is written as one, with one scale for all steps, because it is
        bounded. Its rounding is below 1e-3 unless its entries are of the order 1e-6: with gradients that are a million
        times smaller than ε.
        """
        b1, b2 = context.option("betas", self.betas)
        c1, c2 = corrections_(state["steps"], b1, b2, health.gate)
        halves = in_halves(state)
        scale = bound_scale(ROOM * step_bound(b1, b2)) if halves else 1.0
        out = None if rotated is grad or isinstance(rotated, Scaled) else rotated
        if halves:
            out = torch.empty(grad.shape, dtype=torch.float16, device=grad.device)
        Y = rotated_adam_(
            state["M"],
            state["V"],
            rotated,
            beta1=b1,
            beta2=b2,
            eps=self.eps * context.unit,
            correction1=c1,
            correction2=c2,
            floor=self.floor(state, c2, context),
            gate=health.gate,
            out=out,
            factor=scale,
        )
        return Half(Y, torch.full_like(c1, scale)) if halves else Y

    @staticmethod
    def _begins(state: State, context: Context) -> bool:
        """Whether no group has a basis yet; the device is asked once, and after that the host remembers.

        A layer without a gradient at the first step keeps 0 there, and goes on from the identity.
        """
        if "begun" not in context.memory:
            context.memory["begun"] = bool((state["begun"] != 0).any())
        return not context.memory["begun"]

    def refresh(self, state: State, groups: slice, context: Context, health: Health) -> None:
        """Not before the first direction, which makes the first factors."""
        if not self._begins(state, context):
            super().refresh(state, groups, context, health)

    def _begin(self, state: State, grad: Tensor, context: Context, health: Health) -> None:
        self._take_gradient(state, grad, context, health)
        groups = slice(0, len(grad))
        # Always by eigh: where nobody waits, a plan has been made before there were factors.
        plan = self.plan(state, groups, context, health)._replace(exact=frozenset(self.watched(state)))
        super().refresh(state, groups, replace(context, plan=plan), health)
        self.report(groups, context)
        state["begun"].fill_(1)
        context.memory["begun"] = True

    def observe_gradient(self, state: State, grad: Float[Tensor, "K O I"], decay: float, health: Health) -> None:
        """Not before the direction: the paper updates its factors after the step."""
        return

    def _take_gradient(self, state: State, grad: Tensor, context: Context, health: Health) -> None:
        """Plain averages from zero, as in the paper: no bias correction, which the basis does not feel."""
        decay = context.option("betas", self.betas)[1]
        sides = [side for side in ("P", "Q") if side in state]
        for side, new in gradient_moments(grad, sides, context.largest_of(grad)):
            good = finite_moments(new)
            good = good if health.gate is None else good & health.gate
            if health.gate is not None and new.dtype == torch.float32:
                symmetric.ema_(state[side], new, good * (1 - decay))
                state[f"{side}_count"] += good.to(state[f"{side}_count"].dtype)
                continue
            new = symmetric.alike(new, state[side])
            if health.gate is not None or not bool(good.all()):
                new = torch.where(good.view(-1, *[1] * (new.ndim - 1)), new, state[side])
            state[side].lerp_(new, 1 - decay)
            state[f"{side}_count"] += good.to(state[f"{side}_count"].dtype)

    def _refresh_side(self, state: State, side: str, groups: slice, context: Context, health: Health) -> None:
        """One step of orthogonal iteration from the last basis, sorted, with V permuted along; eigh at the start.

        Where the basis is kept up to date by products, momentum and second moments are turned with it.
        """
        if self._begins(state, context):
            super()._refresh_side(state, side, groups, context, health)
            if not self.tracked(state, side):  # the order of a tracked basis is of no account
                state[f"U_{side}"][groups] = state[f"U_{side}"][groups].flip(-1)  # largest first
            return
        if self.tracked(state, side):
            U_old = stored.rough_copy(state, f"U_{side}", groups)
            super()._refresh_side(state, side, groups, context, health)
            self._carry(state, side, groups, U_old)
            return
        M, U = state[side][groups], state[f"U_{side}"][groups]
        U_old = U.clone()
        MU = M @ U
        order = (U * MU).sum(-2).argsort(dim=-1, descending=True)
        Q, order = self._orthogonal(MU, U, order, waits=health.gate is None)
        good = finite_matrices(Q)
        health.count("fallbacks", (~good).sum())
        if health.gate is None and not bool(good.all()):
            return
        if health.gate is not None:
            Q = torch.where(good.view(-1, 1, 1), Q, U_old)
            order = torch.where(good.unsqueeze(-1), order, torch.arange(order.shape[-1], device=order.device))
        state[f"U_{side}"][groups] = Q
        M = state["M"][groups]
        state["M"][groups] = Q.mT @ (U_old @ M) if side == "P" else (M @ U_old.mT) @ Q
        V = state["V"][groups]
        index = order.unsqueeze(-1 if side == "P" else -2).expand_as(V)
        state["V"][groups] = V.gather(-2 if side == "P" else -1, index)

    @staticmethod
    def _orthogonal(MU: Tensor, U: Tensor, order: Tensor, waits: bool) -> tuple[Tensor, Tensor]:
        """Q of ``M U`` with its columns in this order, and the order itself, of which null vectors are put last.

        Where M is singular some columns of ``M U`` depend on those before, and QR makes any vectors of them: rounding.
        In their place are the columns of U. Those and the others are as independent as the others are. A column that is
        small beside the first is a null vector before any QR. Those that QR finds come after all that are large: what
        is left of them is orthogonalized again within the columns that they have spoilt.
        """
        Z, U = _columns(MU, order), _columns(U, order)
        limit = DEPENDENT * torch.finfo(Z.dtype).eps
        norms = torch.linalg.vector_norm(Z, dim=-2)
        null = norms <= limit * norms[..., :1]
        if not waits or bool(null.any()):
            Z, U, order, null = _with_null_last(Z, U, order, null)
        Q, R = torch.linalg.qr(Z)
        sizes = R.diagonal(dim1=-2, dim2=-1).abs().masked_fill(null, 0.0)
        further = ~null & (sizes <= limit * sizes.amax(-1, keepdim=True))
        if waits and not bool(further.any()):
            return Q, order
        Z, _, order, _ = _with_null_last(Z, U, order, null | further)
        good = int(further.int().argmax(-1)[further.any(-1)].min()) if waits else 0
        if 2 * good < Z.shape[-1]:
            return torch.linalg.qr(Z)[0], order
        rest = Q[..., good:]  # an exact basis of what the good columns leave, whatever it was made of
        return torch.cat([Q[..., :good], rest @ torch.linalg.qr(rest.mT @ Z[..., good:])[0]], -1), order

    @staticmethod
    def _carry(state: State, side: str, groups: slice, U_old: stored.Kept) -> None:
        """Momentum and second moments in the new basis."""
        U, M, V = stored.matrix(state, f"U_{side}", groups), state["M"][groups], state["V"][groups]
        left = side == "P"
        if isinstance(U, Half) and isinstance(U_old, Half):
            turn_moments_(M, V, turn_between(U, U_old), "left" if left else "right")
            return
        assert isinstance(U, Tensor)  # of float64
        assert isinstance(U_old, Tensor)
        turn = U.mT @ U_old
        V.copy_(carried(V, turn, "left" if left else "right"))
        M.copy_(turn @ M if left else M @ turn.mT)

    def conditions(self, state: State, context: Context) -> tuple[Tensor, Tensor] | None:
        """Of the second moments."""
        V = state["V"]
        if context.shape is not None:
            V = V[:, : context.shape.own_outputs, : context.shape.own_inputs]
        V = V.flatten(1)
        eps = self.eps * context.unit
        return (V.amax(1).sqrt() + eps) / (V.amin(1).sqrt() + eps), torch.full_like(V[:, 0], eps)
