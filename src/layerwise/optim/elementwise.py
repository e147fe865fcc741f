"""Rules that treat every entry alone: gradient descent, Adam, sign descent. They fit parameters of any shape."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.adam import adam

from layerwise.optim.cuda.adam_corrections import corrections_
from layerwise.optim.cuda.elementwise import adam_
from layerwise.optim.rule import Context, Health, Shape, State, UpdateRule

FUSED = (torch.float32, torch.float64)


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
    recordable = True
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
    recordable = True
    formula = "m̂/(√v̂ + ε)"
    matrix_only = False
    own_momentum = "betas"

    def init(self, shape: Shape) -> State:
        """Both moments and a count of steps."""
        moments = {name: shape.zeros(shape.outputs, shape.inputs) for name in ("m", "v")}
        return {**moments, "steps": shape.zeros()}

    def direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"]:
        """Adam's direction."""
        b1, b2 = betas = context.option("betas", self.betas)
        if health.gate is not None and grad.dtype == torch.float32:
            return self._in_one_pass(state, grad, betas, self.eps * context.unit, health)
        if health.gate is None and _in_one_piece(state["m"], state["v"], grad) and _all_equal(state["steps"]):
            return self._by_torch(state, grad, betas, self.eps * context.unit)
        state["steps"] += health.taken(1.0, grad)
        state["m"].lerp_(grad, health.taken(1 - b1, grad))
        average_squares_(state["v"], grad, health.taken(1 - b2, grad))
        t = state["steps"].clamp_min(1).view(-1, 1, 1)  # 0 only if the very first step is left out
        denominator = (state["v"].sqrt() / (1 - b2**t).sqrt()).add_(self.eps * context.unit)
        return state["m"] / (1 - b1**t) / denominator

    @staticmethod
    def _by_torch(state: State, grad: Tensor, betas: tuple[float, float], eps: float) -> Tensor:
        """The same in torch's own pass on a CPU: a step of rate −1 from zero is the direction."""
        D, (b1, b2), t = torch.zeros_like(grad), betas, state["steps"][0].clone()
        tensors = [D], [grad], [state["m"]], [state["v"]], list[Tensor](), [t]
        how: dict[str, Any] = {"fused": True, "amsgrad": False, "maximize": False, "weight_decay": 0.0}
        adam(*tensors, beta1=b1, beta2=b2, lr=-1.0, eps=eps, **how)
        state["steps"].copy_(t)
        return D

    def _in_one_pass(
        self, state: State, grad: Tensor, betas: tuple[float, float], eps: float, health: Health
    ) -> Tensor:
        """The same, the moments in the gradient's own order in memory."""
        (b1, b2), transposed = betas, not grad.is_contiguous() and grad.mT.is_contiguous()
        for name in ("m", "v"):
            state[name] = laid_out(state[name], transposed)
        m, v, g = (X.mT if transposed else X.contiguous() for X in (state["m"], state["v"], grad))
        c1, c2 = corrections_(state["steps"], b1, b2, health.gate)
        D = adam_(m, v, g, beta1=b1, beta2=b2, eps=eps, correction1=c1, correction2=c2, gate=health.gate)
        return D.mT if transposed else D


def _in_one_piece(*tensors: Tensor) -> bool:
    """Whether torch's fused pass on a CPU can take them: it goes through memory, whatever the strides."""
    dtype = tensors[0].dtype
    return dtype in FUSED and all(
        X.device.type == "cpu" and X.dtype == dtype and X.is_contiguous() and X.numel() > 0 for X in tensors
    )


def _all_equal(steps: Float[Tensor, "K"]) -> bool:
    """Whether all groups have taken as many: not if some had no gradient at first."""
    return bool((steps == steps[0]).all())


def laid_out(X: Float[Tensor, "K O I"], transposed: bool) -> Float[Tensor, "K O I"]:
    """The same, its matrices or their transposes each in one piece; as it is, where they are."""
    if transposed:
        return X if X.mT.is_contiguous() else X.mT.contiguous().mT
    return X.contiguous()


@dataclass
class SignDescent(UpdateRule):
    """``sign ∇L``, times ``‖∇L‖₁`` for the steepest descent in the norm of the largest entry."""

    ideal: bool = False
    name = "sign"
    recordable = True
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
