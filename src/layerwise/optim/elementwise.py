"""Rules that treat every entry alone: gradient descent, Adam, sign descent. They fit parameters of any shape."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.fused import adam_
from layerwise.optim.rule import Context, Health, Shape, State, UpdateRule


def average_squares_(v: Tensor, x: Tensor, weight: float | Tensor) -> None:
    """``v ← v + weight (x² − v)``; a weight on the device costs a tensor more."""
    if isinstance(weight, Tensor):
        v.lerp_(x.square(), weight)
    else:
        v.mul_(1 - weight).addcmul_(x, x, value=weight)


@dataclass
class GradientDescent(UpdateRule):
    """``∇L``."""

    name = "sgd"
    formula = "∇L"
    matrix_only = False

    def init(self, shape: Shape) -> State:
        """Nothing."""
        return {}

    def direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"]:
        """The gradient itself."""
        return grad


@dataclass
class AdamRule(UpdateRule):
    """``m̂ / (√v̂ + ε)``."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    name = "adam"
    formula = "m̂/(√v̂ + ε)"
    matrix_only = False
    own_momentum = True

    def init(self, shape: Shape) -> State:
        """Both moments and a count of steps."""
        moments = {name: shape.zeros(shape.outputs, shape.inputs) for name in ("m", "v")}
        return {**moments, "steps": shape.zeros()}

    def direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"]:
        """Adam's direction."""
        b1, b2 = self.betas
        state["steps"] += health.taken(1.0, grad)
        if health.gate is not None and grad.dtype == torch.float32:
            t = state["steps"].clamp_min(1)
            corrections = {"correction1": 1 - b1**t, "correction2": 1 - b2**t}
            return adam_(
                state["m"], state["v"], grad, beta1=b1, beta2=b2, eps=self.eps, gate=health.gate, **corrections
            )
        state["m"].lerp_(grad, health.taken(1 - b1, grad))
        average_squares_(state["v"], grad, health.taken(1 - b2, grad))
        t = state["steps"].clamp_min(1).view(-1, 1, 1)  # 0 only if the very first step is left out
        denominator = (state["v"].sqrt() / (1 - b2**t).sqrt()).add_(self.eps)
        return state["m"] / (1 - b1**t) / denominator


@dataclass
class SignDescent(UpdateRule):
    """``sign ∇L``, times ``‖∇L‖₁`` for the steepest descent in the norm of the largest entry."""

    ideal: bool = False
    name = "sign"
    formula = "sign ∇L"
    matrix_only = False

    def init(self, shape: Shape) -> State:
        """Nothing."""
        return {}

    def direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"]:
        """The sign."""
        return grad.sign() * grad.abs().sum((-2, -1), keepdim=True) if self.ideal else grad.sign()
