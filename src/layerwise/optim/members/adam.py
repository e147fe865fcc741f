"""Adam, with decoupled weight decay."""

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from layerwise.optim.elementwise import AdamRule
from layerwise.optim.engine import Layerwise
from layerwise.optim.options import Overrides


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
