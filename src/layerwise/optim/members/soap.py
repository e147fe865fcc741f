"""SOAP: Adam in the eigenbasis of Shampoo's factors."""

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from layerwise.optim.backend import Backend, Eigenbasis, Side
from layerwise.optim.engine import Layerwise
from layerwise.optim.kronecker import FactorPair
from layerwise.optim.options import Overrides, by_scale
from layerwise.optim.rule import Context, Requirements, Shape, State, UpdateRule

NO_SIGNAL = 0.75
"""The power of ε, the rounding of the type, that gradients in the basis must exceed; see `RotatedAdam.floor`."""


@final
@dataclass
class RotatedAdam(UpdateRule):
    """``U_P [M′ / (√V + ε)] U_Qᵀ``, ``M′ = U_Pᵀ M U_Q``, V the average of ``(U_Pᵀ ∇L U_Q)²``.

    The state "M" is M′, in the present basis: it is rotated when the basis is, which spares a rotation at every other
    step. Where V is what rounding leaves of a gradient without any part in a direction, there is no step (`floor`).
    """

    left: str = "gradient"
    right: str = "gradient"
    power: tuple[float, float] = (1.0, 1.0)
    max_factor: int = 8192
    betas: tuple[float, float] = (0.95, 0.95)
    eps: float = 1e-8
    skip_first: bool = True
    name = "soap"
    formula = "U_P[M′/(√V + ε)]U_Qᵀ"

    def __post_init__(self) -> None:
        self.pair = FactorPair(self.left, self.right, self.max_factor)

    def requirements(self, shape: Shape | None = None) -> Requirements:
        """Gradients; M′ is its momentum."""
        names = {side: of for side, of in (("P", self.left), ("Q", self.right)) if of != "identity"}
        return replace(
            self.pair.requirements(shape, (0.0, 0.0)),
            factors={**names, "power": "{:g}, {:g}".format(*self.power)},
            gradient=False,  # the factors take it after the direction
            renewed=("V", "M"),
            own_momentum="betas",
            capturable=True,
            only_rotates=True,
        )

    def init(self, shape: Shape, backend: Backend) -> State:
        """Factors, their basis, both moments with a count of steps, and whether the basis has begun."""
        state = self.pair.init(shape, backend, (0.0, 0.0))
        state["basis"] = backend.eigenbasis(state.get("P"), state.get("Q"), shape, measured=True)
        state["M"] = backend.momentum(shape, state["basis"], self.betas[0])
        state["V"] = shape.zeros(shape.outputs, shape.inputs)
        return state | {"steps": shape.zeros(), "begun": shape.zeros()}

    def refresh(self, state: State, groups: slice, context: Context) -> None:
        """One step of orthogonal iteration, both moments carried along; not before the first direction, which makes
        the first factors."""
        if not self._begins(state, context):
            basis: Eigenbasis = state["basis"]
            basis.follow_(state.get("P"), state.get("Q"), groups, context, state["M"], state["V"])
            context.health.refreshes += 1

    def direction(self, state: State, grad: Any, context: Context) -> Any:
        """Adam's direction in the basis, rotated back. The factors are updated after it, as in the paper; the first
        step only sets the basis, as in the authors' code."""
        begins = self._begins(state, context)
        if begins and context.is_taken():
            self._begin(state, grad, context)
        if begins and (self.skip_first or not context.memory["begun"]):
            D = context.backend.no_step(state["basis"], grad)
        else:
            betas, eps = context.options.get("betas", self.betas), self.eps * context.unit
            rotated = state["basis"].rotate(grad, context)
            floor = lambda correction: self.floor(state, correction, context)  # noqa: E731
            Y = context.backend.adam_in_basis_(state, rotated, grad, betas, eps, floor, context)
            D = state["basis"].unrotate(Y, context)
        if context.observes and not (begins and self.skip_first):
            self._take_gradient(state, grad, context)
        return D

    def floor(self, state: State, correction: Float[Tensor, "K"], context: Context) -> Float[Tensor, "K"] | None:
        """Up to this V is rounding, and no step is taken; None: nothing is rotated, and every entry is exact.

        A gradient G has no part in the null space of its factors, but ``U_Pᵀ G U_Q`` is not zero there: products leave
        some ``ε ‖G‖/√n`` (ε of the type), and vectors that are themselves known to rounding leave more of it, up to
        ``√ε ‖G‖/√n``, below which a factor knows nothing. Adam would make steps of size one of that, in directions that
        differ from one processor to the next. The floor lies between the two, at ``ε^¾ ‖G‖/√n``. ‖G‖² is the trace
        of a factor, an average of squares like V, each over its own weights (`correction` is that of V).
        """
        if state["basis"].trivial:
            return None
        factor, V = state["P"] if "P" in state else state["Q"], state["V"]
        O, I = V.shape[-2:] if context.shape is None else (context.shape.own_outputs, context.shape.own_inputs)
        share = torch.finfo(V.dtype).eps ** (2 * NO_SIGNAL) / max(1, min(O, I))
        beta2 = context.options.get("betas", self.betas)[1]
        return share * (factor.trace() / (1 - beta2 ** factor.count.clamp_min(1))) * correction

    @staticmethod
    def _begins(state: State, context: Context) -> bool:
        """Whether no group has a basis yet; the device is asked once, and after that the host remembers.

        A layer without a gradient at the first step keeps 0 there, and goes on from the identity.
        """
        if "begun" not in context.memory:
            context.memory["begun"] = bool((state["begun"] != 0).any())
        return not context.memory["begun"]

    def _begin(self, state: State, grad: Any, context: Context) -> None:
        self._take_gradient(state, grad, context)
        state["basis"].begin_(state.get("P"), state.get("Q"), context)
        context.health.refreshes += 1
        state["begun"].fill_(1)
        context.memory["begun"] = True

    def _take_gradient(self, state: State, grad: Any, context: Context) -> None:
        """Plain averages from zero, as in the paper: no bias correction, which the basis does not feel."""
        decay = context.options.get("betas", self.betas)[1]
        sides: list[Side] = [side for side in ("P", "Q") if side in state]
        for side, new in context.backend.gradient_moments(grad, sides, context):
            state[side].update_(new, decay, context, how="ema")

    def conditions(self, state: State, context: Context) -> tuple[Tensor, Tensor] | None:
        """Of the second moments."""
        V, eps = state["V"], self.eps * context.unit
        if context.shape is not None:
            V = V[:, : context.shape.own_outputs, : context.shape.own_inputs]
        V = V.flatten(1)
        return (V.amax(1).sqrt() + eps) / (V.amin(1).sqrt() + eps), torch.full_like(V[:, 0], eps)

    def describe(self, shape: Shape) -> str:
        """The update, and of what its bases are."""
        P, Q, missing = self.pair.words(shape)
        bases = [f"{name} of {of}" for name, of in (("U_P", P), ("U_Q", Q)) if of is not None]
        return (f"{self.formula}  {', '.join(bases)}" if bases else "∇L") + missing


class SOAP(Layerwise):
    """Adam in the eigenbasis of Shampoo's factors.

    ``W ← W − η U_P [M′ / (√V + ε)] U_Qᵀ`` with ``M′ = U_Pᵀ M U_Q``; the basis is renewed every `refresh_every` steps by
    one orthogonal iteration.

    Args:
        model: the module that is trained, or parameters (or groups of them) as torch's optimizers take them: among
            these an embedding looks like a matrix; give it a group with ``"update": "fallback"``.
        lr: η; by default 1e-3, and 3e-3 for the bare formula.
        betas: of the momentum, and of V and the factors; by default (0.9, 0.99), and the paper's (0.95, 0.95) for the
            bare formula.
        eps: ε; with ``scale="adam"`` relative to how large gradients are at the start.
        weight_decay: decoupled.
        scale: "adam": updates of AdamW's size, for AdamW's rate, whatever the scale of the loss; "formula": as in
            the paper.
        skip_first: the first step only sets the basis, as in the authors' code.
        overrides: options for layers or parameters by pattern, ``{"*.bias": {"weight_decay": 0.0}}``.
        options: all others of `Layerwise`.

    Reference: Vyas et al. 2024.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.SOAP(torch.nn.Linear(4, 3), lr=3e-3)
    """

    fixed = ("separate_bias",)

    def __init__(
        self,
        model: nn.Module | ParamsT,
        lr: float | Tensor | None = None,
        betas: tuple[float, float] | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        scale: str = "adam",
        skip_first: bool = True,
        refresh_every: int = 10,
        max_factor: int = 8192,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        decays = by_scale(scale, betas, (0.9, 0.99), (0.95, 0.95))
        rule = RotatedAdam(max_factor=max_factor, betas=decays, eps=eps, skip_first=skip_first)
        super().__init__(
            model,
            rule=rule,
            scale=scale,
            lr=by_scale(scale, lr, 1e-3, 3e-3),
            weight_decay=weight_decay,
            refresh_every=refresh_every,
            separate_bias=True,
            overrides=overrides,
            **options,
        )
