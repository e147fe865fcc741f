"""`Graft`: each layer's direction takes the norm of another method's."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, not_one_of
from layerwise.optim.elementwise import AdamRule
from layerwise.optim.rule import Context
from layerwise.optim.step.stack import Stack


@dataclass(frozen=True)
class Graft:
    """Of the gradient itself, or of Adam's direction."""

    method: str | None = None

    def __post_init__(self) -> None:
        if self.method not in (None, "gradient", "adam"):
            raise InputError(not_one_of("graft", self.method, (None, "gradient", "adam")))

    def apply(
        self, stack: Stack, grad: Float[Tensor, "K O I"], D: Float[Tensor, "K O I"], context: Context
    ) -> Float[Tensor, "K O I"]:
        """``D ‖G‖ / ‖D‖``, layer by layer."""
        if self.method is None or not stack.requires.matrices_only:
            return D
        wanted = grad if self.method == "gradient" else self._adam(stack, grad, context)
        size, target = _layer_norms(stack, D), _layer_norms(stack, wanted)
        ratio = torch.where(size > 0, target / size.clamp_min(torch.finfo(D.dtype).tiny), 1.0)
        return D * ratio.view(-1, 1, 1)

    @staticmethod
    def _adam(stack: Stack, grad: Tensor, context: Context) -> Tensor:
        adam, state = AdamRule(), stack.state
        begin_adam(stack)
        own = {name: state[f"graft_{name}"] for name in ("m", "v", "steps")}
        D = context.backend.adam_(own, grad, adam.betas, adam.eps, context)
        state |= {f"graft_{name}": X for name, X in own.items()}  # a backend may lay them out anew
        return D


def begin_adam(stack: Stack) -> None:
    """Moments of Adam's whole direction, unless they are there: a state of `scale="adam"` may have some rows alone."""
    shape, state = stack.shape, stack.state
    whole = (shape.groups, shape.outputs, shape.inputs)
    if all(name in state and state[name].shape == whole for name in ("graft_m", "graft_v")):
        return
    state |= {f"graft_{k}": v for k, v in AdamRule().init(shape, stack.backend).items()}


def _layer_norms(stack: Stack, X: Float[Tensor, "K O I"]) -> Float[Tensor, "K"]:
    """The norm of each group's layer."""
    of_groups = torch.linalg.vector_norm(X.flatten(1), dim=1)
    if stack.groups == len(stack.specs):
        return of_groups
    whole = [of_groups[groups].norm().expand(groups.stop - groups.start) for _, groups in stack.layers]
    return torch.cat(whole)
