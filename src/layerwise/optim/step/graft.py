"""Step sizes from elsewhere: grafted norms, and clipping."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.cuda import elementwise as fused
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.unscaled import unscaled
from layerwise.optim.elementwise import AdamRule
from layerwise.optim.rule import Context, Health
from layerwise.optim.step.stack import Stack


@dataclass(frozen=True)
class Graft:
    """Each layer's direction takes the norm of another method's: the gradient's own, or Adam's."""

    method: str | None = None

    def __post_init__(self) -> None:
        if self.method not in (None, "gradient", "adam"):
            raise InputError(describe(f"graft={self.method!r}", 'None, "gradient" or "adam"', "choose one of them"))

    def apply(
        self, stack: Stack, grad: Float[Tensor, "K O I"], D: Float[Tensor, "K O I"] | Scaled, health: Health
    ) -> Float[Tensor, "K O I"] | Scaled:
        """``D ‖G‖ / ‖D‖``, layer by layer."""
        if self.method is None or not stack.rule.matrix_only or isinstance(D, Scaled):
            return D
        wanted = grad if self.method == "gradient" else self._adam(stack, grad, health)
        size, target = _layer_norms(stack, D), _layer_norms(stack, wanted)
        ratio = torch.where(size > 0, target / size.clamp_min(torch.finfo(D.dtype).tiny), 1.0)
        return D * ratio.view(-1, 1, 1)

    @staticmethod
    def _adam(stack: Stack, grad: Tensor, health: Health) -> Tensor:
        adam = AdamRule()
        names = ("m", "v", "steps")
        if "graft_m" not in stack.state:
            stack.state.update({f"graft_{k}": v for k, v in adam.init(stack.shape).items()})
        state = {name: stack.state[f"graft_{name}"] for name in names}
        return adam.direction(state, grad, Context(0, 0.0, 0.0, False, {}), health)


def _layer_norms(stack: Stack, X: Float[Tensor, "K O I"]) -> Float[Tensor, "K"]:
    """The norm of each group's layer."""
    of_groups = torch.linalg.vector_norm(X.flatten(1), dim=1)
    if stack.groups == len(stack.specs):
        return of_groups
    whole = [of_groups[groups].norm().expand(groups.stop - groups.start) for _, groups in stack.slices()]
    return torch.cat(whole)


@dataclass(frozen=True)
class Clip:
    """How large a step may be: by its predicted change of the loss ("kl"), or by its norm."""

    kind: str | None = None
    bound: float = 0.0

    @classmethod
    def read(cls, given: Any) -> "Clip":
        """None, a number, or a pair."""
        if given is None:
            return cls()
        kind, bound = given if isinstance(given, tuple) and len(given) == 2 else ("kl", given)
        if kind not in ("kl", "norm") or not isinstance(bound, int | float) or not bound > 0:
            raise InputError(
                describe(
                    f"clip={given!r}",
                    'None, a number > 0 (bound on η²⟨D, ∇L⟩), ("kl", number) or ("norm", number)',
                    "pass e.g. clip=1e-3",
                )
            )
        return cls(kind, float(bound))

    def describe(self) -> str | None:
        """For `print(opt)`."""
        return None if self.kind is None else f"{self.kind} {self.bound:g}"

    def factor(
        self,
        stacks: Sequence[Stack],
        directions: Sequence[Tensor | Scaled],
        grads: Sequence[Tensor],
        lrs: Sequence[float | Tensor],
        waits: bool = True,
    ) -> float | Tensor:
        """What all directions are multiplied by, at most 1; where nobody `waits` for the device, a tensor there."""
        if self.kind is None:
            return 1.0
        if self.kind == "norm":
            terms, bound = [(1.0, dot(D, D)) for D in map(unscaled, directions)], self.bound**2
        else:
            terms = [
                (lr**2, _along(D, grad))
                for stack, D, grad, lr in zip(stacks, directions, grads, lrs, strict=True)
                if stack.rule.matrix_only
            ]
            bound = self.bound
        if waits:
            change = sum(weight * float(term) for weight, term in terms)
            return min(1.0, (bound / change) ** 0.5) if change > 0 else 1.0
        if not terms:
            return 1.0
        total = torch.stack([weight * term.to(terms[0][1]) for weight, term in terms]).sum()
        return torch.where(total > 0, (bound / total).sqrt().clamp(max=1.0), 1.0)


def _along(D: Tensor | Scaled, grad: Tensor) -> Tensor:
    """``⟨D, ∇L⟩``, unless it was found when D was made."""
    return D.along if isinstance(D, Scaled) and D.along is not None else dot(D, grad)


def dot(X: Tensor | Scaled, Y: Tensor) -> Tensor:
    """``⟨X, Y⟩``; on a GPU in one pass, whatever their types."""
    if isinstance(X, Scaled):
        return fused.dot(X, Y.contiguous())
    if X.device.type == "cpu" or X.dtype == torch.float64:
        return (X * Y).sum()
    return fused.dot(X.contiguous(), Y.contiguous())
