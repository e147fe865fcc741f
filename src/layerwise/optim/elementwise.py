"""Rules that treat every entry alone: gradient descent, Adam, sign descent. They fit parameters of any shape, and are
what the optimizer falls back to where its own rule does not fit."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from layerwise.optim.backend import Backend
from layerwise.optim.rule import Context, Requirements, Shape, State, UpdateRule


@final
@dataclass
class GradientDescent(UpdateRule):
    """``∇L``."""

    name = "sgd"
    formula = "∇L"

    def requirements(self, shape: Shape | None = None) -> Requirements:
        """Nothing."""
        return Requirements(matrices_only=False, capturable=True, elementwise=True)

    def init(self, shape: Shape, backend: Backend) -> State:
        """Nothing."""
        return {}

    def direction(self, state: State, grad: Float[Tensor, "K O I"], context: Context) -> Float[Tensor, "K O I"]:
        """The gradient itself."""
        return grad


@final
@dataclass
class AdamRule(UpdateRule):
    """``m̂ / (√v̂ + ε)``: m and v averages of the gradient and its square, both without the bias of their start."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    name = "adam"
    formula = "m̂/(√v̂ + ε)"

    def requirements(self, shape: Shape | None = None) -> Requirements:
        """Nothing but gradients; m is its momentum."""
        return Requirements(matrices_only=False, own_momentum="betas", capturable=True, elementwise=True)

    def init(self, shape: Shape, backend: Backend) -> State:
        """Both moments and a count of steps."""
        m, v = (shape.zeros(shape.outputs, shape.inputs) for _ in range(2))
        return {"m": m, "v": v, "steps": shape.zeros()}

    def direction(self, state: State, grad: Float[Tensor, "K O I"], context: Context) -> Float[Tensor, "K O I"]:
        """Adam's direction."""
        betas = context.options.get("betas", self.betas)
        return context.backend.adam_(state, grad, betas, self.eps * context.unit, context)


@final
@dataclass
class SignDescent(UpdateRule):
    """``sign ∇L``, times ``‖∇L‖₁`` for the steepest descent in the norm of the largest entry."""

    ideal: bool = False
    name = "sign"
    formula = "sign ∇L"

    def requirements(self, shape: Shape | None = None) -> Requirements:
        """Nothing; ``‖∇L‖₁`` is of the whole parameter."""
        return Requirements(matrices_only=False, capturable=True, elementwise=not self.ideal)

    def init(self, shape: Shape, backend: Backend) -> State:
        """Nothing."""
        return {}

    def direction(self, state: State, grad: Float[Tensor, "K O I"], context: Context) -> Float[Tensor, "K O I"]:
        """The sign."""
        return grad.sign() * grad.abs().sum((-2, -1), keepdim=True) if self.ideal else grad.sign()
