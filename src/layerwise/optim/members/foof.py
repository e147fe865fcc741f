"""FOOF: the input factor alone, inverted."""

from typing import Any

from torch import Tensor, nn

from layerwise.optim.engine import Layerwise
from layerwise.optim.kronecker import KroneckerRoots
from layerwise.optim.options import LOSS_AVERAGE, Overrides, by_scale


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
        rule = KroneckerRoots("identity", "inputs", (1.0, 1.0), max_factor=max_factor, sua=sua)
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
