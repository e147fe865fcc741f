"""References: gradient descent, Adam and sign descent, in the same engine."""

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from layerwise.optim.elementwise import AdamRule, GradientDescent, SignDescent
from layerwise.optim.engine import Layerwise
from layerwise.optim.options import Overrides


class SGD(Layerwise):
    """``W ← W − η ∇L``, with momentum.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.SGD(torch.nn.Linear(4, 3), lr=0.1, momentum=0.9)
    """

    def __init__(
        self,
        model: nn.Module | ParamsT,
        lr: float | Tensor = 1e-2,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            rule=GradientDescent(),
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            overrides=overrides,
            **options,
        )


class Adam(Layerwise):
    """``W ← W − η m̂ / (√v̂ + ε)``, with decoupled weight decay.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.Adam(torch.nn.Linear(4, 3), lr=1e-3)
    """

    def __init__(
        self,
        model: nn.Module | ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model, rule=AdamRule(betas, eps), lr=lr, weight_decay=weight_decay, overrides=overrides, **options
        )


class Sign(Layerwise):
    """``W ← W − η sign ∇L``; ``ideal=True`` scales by ``‖∇L‖₁``, as steepest descent in the largest entry has it.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.Sign(torch.nn.Linear(4, 3), lr=1e-3)
    """

    def __init__(
        self,
        model: nn.Module | ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        ideal: bool = False,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            rule=SignDescent(ideal),
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            overrides=overrides,
            **options,
        )
