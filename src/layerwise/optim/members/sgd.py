"""Gradient descent."""

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from layerwise.optim.elementwise import GradientDescent
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
