"""FOOF and LocoProp: the input factor alone."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.optim.cuda import factor as symmetric
from layerwise.optim.cuda import storage as stored
from layerwise.optim.cuda.monitor import Plan
from layerwise.optim.engine import Layerwise
from layerwise.optim.factors import Factors
from layerwise.optim.options import LOSS_AVERAGE, Overrides, by_scale
from layerwise.optim.roots import guarded_root
from layerwise.optim.rule import Context, Health, State


class FOOF(Layerwise):
    """Gradient descent on neurons: ``W ← W − η ∇L (Q + λ I)⁻¹`` with Q the second moment of the inputs.

    Needs no likelihood and no output gradients.

    Args:
        model: the module that is trained.
        lr: η; by default 1e-3, and 1e-2 for the bare formula.
        damping: λ.
        momentum: of the gradient, as an average (AdamW's β₁).
        weight_decay: decoupled.
        scale: "adam": updates of AdamW's size, for AdamW's rate; "formula": the bare formula, momentum being a sum of
            directions.
        sua: convolutions take activations at different kernel offsets to be uncorrelated: Q is that of the channels,
            alike at each offset, the bias a block of its own. Cheaper; layers with one offset are unchanged.
        loss_average: how the loss in your loop is reduced: over "examples", over "tokens", or None for a sum.
        overrides: options for layers or parameters by pattern, ``{"*.bias": {"weight_decay": 0.0}}``.
        options: all others of `Layerwise`.

    Reference: Benzing 2022.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.FOOF(torch.nn.Linear(4, 3), lr=0.1)
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor | None = None,
        damping: Any = 1e-1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        scale: str = "adam",
        sua: bool = False,
        refresh_every: int = 10,
        max_factor: int = 8192,
        loss_average: str | None = LOSS_AVERAGE,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        rule = Factors("identity", "inputs", (1.0, 1.0), max_factor=max_factor, sua=sua)
        super().__init__(
            model,
            rule=rule,
            scale=scale,
            lr=by_scale(scale, lr, 1e-3, 1e-2),
            damping=damping,
            momentum=momentum,
            weight_decay=weight_decay,
            refresh_every=refresh_every,
            loss_average=loss_average,
            overrides=overrides,
            **options,
        )


@dataclass
class LocalStep(Factors):
    """``∇L (I + η Q)⁻¹``."""

    left: str = "identity"
    name = "locoprop"

    def replayable(self, state: State, plan: Plan) -> bool:
        """No: η is part of it."""
        return False

    def parts(self, state: State, plan: Plan) -> list[Plan]:
        """All at once."""
        return [plan]

    formula = "∇L (I + ηQ)⁻¹"

    def refresh(self, state: State, groups: slice, context: Context, health: Health) -> None:
        """The inverse of ``I + η Q``; η may have changed since."""
        for side in ("Q", "Q_bias"):
            if side not in state:
                continue
            Q, root = symmetric.whole(state[side][groups]), stored.value(state, f"{side}_root", groups)
            ones = torch.ones(Q.shape[0], dtype=Q.dtype, device=Q.device)
            stored.write(state, f"{side}_root", groups, guarded_root(context.lr * Q, ones, 1.0, root, health))
        health.refreshes += 1


class LocoProp(Layerwise):
    """Layers fitted to local targets: ``W ← W − η ∇L (I + η Q)⁻¹``, the minimiser of

        ½ E‖W a − (h − ∂ℓ/∂h)‖² + ‖W − W_t‖² / (2η)

    for the square loss; FOOF with a step of 1 and a damping of 1/η.

    Reference: Amid, Anil and Warmuth 2022.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.LocoProp(torch.nn.Linear(4, 3), lr=1.0)
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1.0,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        max_factor: int = 8192,
        loss_average: str | None = LOSS_AVERAGE,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            rule=LocalStep(max_factor=max_factor),
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            loss_average=loss_average,
            overrides=overrides,
            **options,
        )
