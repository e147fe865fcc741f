"""Rules that step in an eigenbasis of the factors, with a second moment of their own for every entry there."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import NumericalError
from layerwise.foundations.kronecker import split_spectrum
from layerwise.foundations.linalg import gram, guarded_eigh
from layerwise.layers.one_hot import OneHot
from layerwise.layers.standard import Standard
from layerwise.optim.averaging import finite_moments
from layerwise.optim.channels import times_inputs, whole_spectrum
from layerwise.optim.factors import Factors, check_side
from layerwise.optim.rule import Context, Health, Observation, Shape, State


@dataclass
class EigenFactors(Factors):
    """The basis ``U_P ⊗ U_Q`` of the factors; a factor that is left out, or diagonal, has the identity."""

    refreshed = ("U_P", "s_P", "U_Q", "s_Q", "s", "V", "M")

    def init(self, shape: Shape) -> State:
        """Statistics, and identities in place of the basis."""
        state = super().init(shape)
        state.pop("P_root", None)
        state.pop("Q_root", None)
        state.pop("Q_bias_root", None)
        if "P" in state:
            state["U_P"], state["s_P"] = shape.eye(shape.outputs), shape.zeros(shape.outputs)
        if "Q" in state:
            state["s_Q"] = shape.zeros(shape.inputs)
            if state["Q"].ndim == 3:
                state["U_Q"] = shape.eye(self.input_size(shape))
        return state

    def rotate(self, state: State, X: Tensor) -> Tensor:
        """``U_Pᵀ X U_Q``."""
        X = state["U_P"].mT @ X if "U_P" in state else X
        return times_inputs(X, state["U_Q"], state.get("Q_bias")) if "U_Q" in state else X  # that block is 1

    def unrotate(self, state: State, Y: Tensor) -> Tensor:
        """``U_P Y U_Qᵀ``."""
        Y = state["U_P"] @ Y if "U_P" in state else Y
        return times_inputs(Y, state["U_Q"].mT, state.get("Q_bias")) if "U_Q" in state else Y

    def refresh(self, state: State, groups: slice, context: Context, health: Health) -> None:
        """Eigenvectors of the factors."""
        for side in ("P", "Q"):
            if side in state:
                self._refresh_side(state, side, groups, health)
        health.refreshes += 1

    def _refresh_side(self, state: State, side: str, groups: slice, health: Health) -> None:
        M = state[side][groups]
        if f"U_{side}" not in state:
            state[f"s_{side}"][groups] = M
            return
        try:
            values, vectors = guarded_eigh(M, name="factor")
        except NumericalError:
            health.fallbacks += M.shape[0]
            return
        if side == "Q":
            bias = state["Q_bias"][groups] if "Q_bias" in state else None
            values = whole_spectrum(values, state["s_Q"].shape[-1], bias)
        state[f"s_{side}"][groups] = values.to(M.dtype)
        state[f"U_{side}"][groups] = vectors.to(M.dtype)


@dataclass
class CorrectedEigenvalues(EigenFactors):
    """EKFAC: ``U_P [(U_Pᵀ ∇L U_Q) / (s + λ)] U_Qᵀ`` with s the second moments of gradients in the basis.

    scaling "batch": of the examples of the last observed batch; "running": an average over steps of the batch
    gradient's squares times the batch size, begun anew with the factors' eigenvalues at each refresh.
    """

    scaling: str = "batch"
    scaling_decay: float = 0.75
    split: str = "exact"
    name = "ekfac"
    formula = "U_P[(U_Pᵀ ∇L U_Q)/(s + λ)]U_Qᵀ"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_side("scaling", self.scaling, ("batch", "running", "none"))
        self.keeps_recorded = self.scaling == "batch"

    def init(self, shape: Shape) -> State:
        """And scalings."""
        return {**super().init(shape), "s": shape.zeros(shape.outputs, shape.inputs)}

    def refresh(self, state: State, groups: slice, context: Context, health: Health) -> None:
        """Basis, and the factors' own eigenvalues as scalings until better ones come."""
        super().refresh(state, groups, context, health)
        state["s"][groups] = state["s_P"][groups].unsqueeze(-1) * state["s_Q"][groups].unsqueeze(-2)

    def rescale(self, state: State, seen: Observation | None, grad: Tensor, context: Context) -> None:
        """Scalings in the present basis."""
        if self.scaling == "running":
            squares = context.examples * self.rotate(state, grad).square()
            good = torch.isfinite(squares.flatten(1)).all(1).view(-1, 1, 1)
            state["s"].copy_(torch.where(good, torch.lerp(squares, state["s"], self.scaling_decay), state["s"]))
        elif self.scaling == "batch" and seen is not None:
            self._rescale_by_examples(state, seen)

    def _rescale_by_examples(self, state: State, seen: Observation) -> None:
        """Squares of per-example gradients in the basis, summed over examples (and processes)."""
        totals, start = torch.zeros_like(state["s"]), 0
        for calls, k in zip(seen.recorded, seen.groups, strict=True):
            groups = slice(start, start + k)
            basis = {name: state[name][groups] for name in ("U_P", "U_Q", "Q_bias") if name in state}
            for io, factor, _ in calls:
                for chunk in io.chunks():
                    assert isinstance(chunk, Standard)
                    totals[groups] += factor**2 * self._squares(basis, chunk).to(totals)
            start += k
        s = seen.add_up([totals])[0] / seen.examples
        good = torch.isfinite(s.flatten(1)).all(1)
        good = good if seen.seen is None else good & seen.seen
        state["s"].copy_(torch.where(good.view(-1, 1, 1), s, state["s"]))

    def _squares(self, basis: State, chunk: Standard) -> Float[Tensor, "K O I"]:
        """``Σ (U_Pᵀ (Σ_s g aᵀ) U_Q)²``; a basis on channels turns the gradients, or the inputs where they are fewer."""
        U_P, U_Q = basis["U_P"], basis.get("U_Q")
        if U_Q is None or isinstance(chunk.a, OneHot) or chunk.a.shape[-1] == U_Q.shape[-1]:
            return chunk.rotated_squared_sum(U_Q, U_P)
        if chunk.a.shape[1] < chunk.g.shape[-1]:
            a = times_inputs(chunk.a.transpose(1, 2), U_Q, basis.get("Q_bias")).transpose(1, 2)
            return Standard(a, chunk.g).rotated_squared_sum(None, U_P)
        return self.rotate(basis, chunk.per_example_grads()).square().sum((0, 1))

    def direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"]:
        """Divide by the damped scalings, in the basis."""
        return self.unrotate(state, self.rotate(state, grad) / self._damped(state, context))

    def _damped(self, state: State, context: Context) -> Tensor:
        s = state["s"]
        if not context.relative:
            return s + split_spectrum(context.damping, self.split, state["s_Q"], state["s_P"])
        tiny = torch.finfo(s.dtype).tiny
        if self.split == "exact":
            mean = s.mean((-2, -1), keepdim=True)
            return s + torch.where(mean > 0, (context.damping * mean).clamp_min(tiny), 1.0)
        d, s_P, s_Q = context.damping**0.5, state["s_P"], state["s_Q"]
        left, right = d * s_P.mean(-1, keepdim=True), d * s_Q.mean(-1, keepdim=True)
        added = left.unsqueeze(-1) * s_Q.unsqueeze(-2) + s_P.unsqueeze(-1) * right.unsqueeze(-2)
        added = added + (left * right).unsqueeze(-1)
        known = (left * right).unsqueeze(-1) > 0
        return s + torch.where(known, added.clamp_min(tiny), 1.0)

    def quadratic(self, state: State, D: Float[Tensor, "K O I"]) -> Tensor | None:
        """``Σ s (U_Pᵀ D U_Q)²``."""
        return (state["s"] * self.rotate(state, D).square()).sum()

    def conditions(self, state: State, context: Context) -> tuple[Tensor, Tensor] | None:
        """Of the damped scalings."""
        damped = self._damped(state, context).flatten(1)
        added = damped - state["s"].flatten(1)
        return damped.amax(1) / damped.amin(1), added.amax(1)

    def accepts(self, shape: Shape) -> str | None:
        """Both factors are needed."""
        if not all(self.sides(shape)):
            return f"a factor would be larger than max_factor={self.max_factor}"
        return None


@dataclass
class RotatedAdam(EigenFactors):
    """SOAP: Adam in the eigenbasis of Shampoo's factors.

    ``W ← W − η U_P [M′ / (√V + ε)] U_Qᵀ``, ``M′ = U_Pᵀ M U_Q``, V the average of ``(U_Pᵀ ∇L U_Q)²``. The state "M" is
    M′, in the present basis: it is turned when the basis is, which spares a rotation at every other step.
    """

    left: str = "gradient"
    right: str = "gradient"
    betas: tuple[float, float] = (0.95, 0.95)
    eps: float = 1e-8
    skip_first: bool = True
    name = "soap"
    formula = "U_P[M′/(√V + ε)]U_Qᵀ"

    def init(self, shape: Shape) -> State:
        """And both moments, with a count of steps."""
        moments = {name: shape.zeros(shape.outputs, shape.inputs) for name in ("M", "V")}
        return {**super().init(shape), **moments, "steps": shape.zeros(), "begun": shape.zeros()}

    def direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"]:
        """Adam's direction in the basis; the first step only sets the basis, as in the authors' code."""
        first = state["begun"] == 0
        if bool(first.any()):
            self._begin(state, grad, context, health)
            if self.skip_first:
                return torch.zeros_like(grad)
        b1, b2 = self.betas
        state["steps"] += 1
        rotated = self.rotate(state, grad)
        state["M"].lerp_(rotated, 1 - b1)
        state["V"].mul_(b2).addcmul_(rotated, rotated, value=1 - b2)
        t = state["steps"].view(-1, 1, 1)
        step = (state["M"] / state["V"].sqrt().add_(self.eps)).mul_((1 - b2**t).sqrt() / (1 - b1**t))
        D = self.unrotate(state, step)
        self._take_gradient(state, grad, b2)
        return D

    def _begin(self, state: State, grad: Tensor, context: Context, health: Health) -> None:
        self._take_gradient(state, grad, self.betas[1])
        super().refresh(state, slice(None), context, health)
        state["begun"].fill_(1)

    def observe_gradient(self, state: State, grad: Float[Tensor, "K O I"], decay: float, health: Health) -> None:
        """Not before the direction: the paper updates its factors after the step."""
        return

    def _take_gradient(self, state: State, grad: Tensor, decay: float) -> None:
        """Plain averages from zero, as in the paper: no bias correction, which the basis does not feel."""
        for side in ("P", "Q"):
            if side in state:
                new = gram(grad.mT if side == "P" else grad)
                good = finite_moments(new)
                new = new if bool(good.all()) else torch.where(good.view(-1, 1, 1), new, state[side])
                state[side].lerp_(new, 1 - decay)
                state[f"{side}_count"] += good.to(state[f"{side}_count"].dtype)

    def _refresh_side(self, state: State, side: str, groups: slice, health: Health) -> None:
        """One step of orthogonal iteration from the last basis, sorted, with V permuted along; eigh at the start."""
        if bool((state["begun"][groups] == 0).any()):
            super()._refresh_side(state, side, groups, health)
            state[f"U_{side}"][groups] = state[f"U_{side}"][groups].flip(-1)  # largest first
            return
        M, U = state[side][groups], state[f"U_{side}"][groups]
        MU, U_old = M @ U, U.clone()
        order = (U * MU).sum(-2).argsort(dim=-1, descending=True)
        Q, _ = torch.linalg.qr(MU.gather(-1, order.unsqueeze(-2).expand_as(MU)))
        good = torch.isfinite(Q.flatten(1)).all(1)
        health.fallbacks += int((~good).sum())
        if not bool(good.all()):
            return
        state[f"U_{side}"][groups] = Q
        self._turn(state, side, groups, U_old, Q)
        V = state["V"][groups]
        index = order.unsqueeze(-1 if side == "P" else -2).expand_as(V)
        state["V"][groups] = V.gather(-2 if side == "P" else -1, index)

    @staticmethod
    def _turn(state: State, side: str, groups: slice, U_old: Tensor, U_new: Tensor) -> None:
        """The momentum in the new basis, ``U_newᵀ U_old M`` (left), by whichever order is cheaper."""
        M = state["M"][groups] if side == "P" else state["M"][groups].mT
        wide = M.shape[-1] > M.shape[-2]
        turned = (U_new.mT @ U_old) @ M if wide else U_new.mT @ (U_old @ M)
        state["M"][groups] = turned if side == "P" else turned.mT

    def conditions(self, state: State, context: Context) -> tuple[Tensor, Tensor] | None:
        """Of the second moments."""
        V = state["V"].flatten(1)
        return (V.amax(1).sqrt() + self.eps) / (V.amin(1).sqrt() + self.eps), torch.full_like(V[:, 0], self.eps)
