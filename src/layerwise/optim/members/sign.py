"""Sign descent."""

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from layerwise.optim.elementwise import SignDescent
from layerwise.optim.engine import Layerwise
from layerwise.optim.options import Overrides


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
