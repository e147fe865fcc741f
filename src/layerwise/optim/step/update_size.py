"""How large a member's update is: as its formula has it, or as large as AdamW's.

With ``scale="adam"`` a matrix member is AdamW with another direction. It keeps AdamW's two moments of the gradient, m
and v; the rule preconditions m instead of the gradient, and the result takes the norm of AdamW's own update:

    W ← (1 − η·decay) W − η · D ‖m̂/(√v̂ + ε)‖ / ‖D‖,    D = P⁻ᵖ m Q⁻ᑫ

matrix by matrix. So η, its schedule and the decay mean what they mean for AdamW, whatever the scale of the loss: D is
linear in m, relative damping makes P and Q free of units, and ε is relative to the first gradient (`unit_of`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.rule import Context, UpdateRule
from layerwise.optim.step.stack import Stack

BETAS = (0.9, 0.999)
"""AdamW's; the first is the group's momentum, where it has one."""
EPS = 1e-8
MOST_CHANGE = 0.2
"""Of its norm that a step may change a matrix by, weight decay aside; see `UpdateSize.bounded`."""
USUAL_GRADIENT = 1e-3
"""The root mean square of a gradient beside which AdamW's ε = 1e-8 is usual."""


@dataclass(frozen=True)
class UpdateSize:
    """ "formula": the direction is what the rule says. "adam": of the size of AdamW's update."""

    method: str = "formula"
    betas: tuple[float, float] | None = None
    """AdamW's, where they were given."""

    def __post_init__(self) -> None:
        if self.method not in ("adam", "formula"):
            raise InputError(
                describe(
                    f"scale={self.method!r}",
                    '"adam" (updates of AdamW\'s size) or "formula" (the bare formula)',
                    "choose one of them",
                )
            )

    def check(self, rule: UpdateRule, graft: str | None) -> None:
        """What an update of AdamW's size cannot be combined with, and what only goes with one."""
        if self.method == "formula":
            if self.betas is not None:
                raise InputError(
                    describe(
                        f'betas={self.betas!r} with scale="formula", which has no moments of AdamW',
                        'momentum=β₁, or scale="adam"',
                        "say one of them",
                    )
                )
            return
        if graft is not None:
            raise InputError(
                describe(
                    f'graft={graft!r} with scale="adam", which sets the norm itself',
                    'scale="formula" with graft, or scale="adam" alone',
                    "leave graft out",
                )
            )
        if not rule.requirements().matrices_only:
            raise InputError(
                describe(
                    f'scale="adam" for {rule.name}, whose formula says how large its update is',
                    "a member that preconditions matrices",
                    "leave scale out",
                )
            )

    def sets(self, stack: Stack) -> bool:
        """Whether the updates of a stack are AdamW's in size."""
        return self.method == "adam" and stack.requires.matrices_only

    def direction(self, stack: Stack, grad: Float[Tensor, "K O I"], context: Context, lr: float | Tensor) -> Tensor:
        """That of the averaged gradient, of the norm of AdamW's update and within bounds."""
        averaged, wanted = self._averaged(stack, grad, context)
        D = context.backend.tensor(stack.rule.direction(stack.state, averaged, context)).to(stack.shape.dtype)
        size = norms(D)
        limits = torch.finfo(size.dtype)
        ratio = (self.bounded(stack, wanted, lr) / size.clamp_min(limits.tiny)).clamp(max=limits.max)
        return D * ratio.to(D.dtype).view(-1, 1, 1)  # a direction of zeros stays so

    def _averaged(self, stack: Stack, grad: Tensor, context: Context) -> tuple[Tensor, Float[Tensor, "K"]]:
        """What the rule gets in the gradient's place, and the norm of AdamW's update."""
        mu, (b1, b2) = 0.0 if stack.requires.own_momentum else stack.group["momentum"], self.betas or BETAS
        state, shape = stack.state, stack.shape
        if "graft_m" not in state:
            state |= {f"graft_{name}": shape.zeros(shape.outputs, shape.inputs) for name in ("m", "v")}
            state["graft_steps"] = shape.zeros()
        moments = {"m": state["graft_m"], "v": state["graft_v"], "steps": state["graft_steps"]}
        wanted = norms(context.backend.adam_(moments, grad, (mu or b1, b2), EPS * context.unit, context))
        state["graft_m"], state["graft_v"] = m, _ = moments["m"], moments["v"]  # a backend may lay them out anew
        if not mu:  # none is wanted, or the rule has its own
            return grad, wanted
        return (grad.lerp(m, mu) if stack.group["nesterov"] else m), wanted

    @staticmethod
    def bounded(stack: Stack, wanted: Float[Tensor, "K"], lr: float | Tensor) -> Float[Tensor, "K"]:
        """So much of a norm that a step of η changes no matrix by more than `MOST_CHANGE` of its own.

        A matrix that begins at zero would never move: its norm counts as no less than that of one which torch
        initialises, entries uniform within ``±1/√I``.
        """
        least = math.sqrt(stack.shape.own_outputs / 3)
        most = MOST_CHANGE * weight_norms(stack).to(wanted).clamp_min(least)
        step = (lr * wanted).clamp_min(torch.finfo(wanted.dtype).tiny)
        return wanted * (most / step).clamp(max=1.0)


def norms(X: Float[Tensor, "K O I"]) -> Float[Tensor, "K"]:
    """Of each matrix, in no less than float32."""
    return torch.linalg.vector_norm(X.flatten(1), dim=1, dtype=torch.promote_types(X.dtype, torch.float32))


def weight_norms(stack: Stack) -> Float[Tensor, "K"]:
    """Of each matrix of weights, without a copy where every parameter is one."""
    found = []
    for spec in stack.specs:
        if spec.form.groups != 1 or len(spec.form.parts) != 1:
            return norms(stack.weight())
        p = spec.form.parts[0].of(stack.params).detach()
        found.append(torch.linalg.vector_norm(p, dtype=stack.shape.dtype))
    return torch.stack(found)


def unit_of(params: Iterable[nn.Parameter]) -> float | None:
    """The root mean square of all gradients over `USUAL_GRADIENT`: what ε = 1e-8 is multiplied by, so that a loss that
    is multiplied by a number takes the same steps. None where there is no gradient, or none that is finite."""
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return None
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    squares = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in dense)
    count = sum(g.numel() for g in grads)
    unit = math.sqrt(squares / max(count, 1)) / USUAL_GRADIENT
    return unit if 0 < unit < math.inf else None
