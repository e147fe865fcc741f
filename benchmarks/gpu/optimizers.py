"""Optimizers of one model, of torch and of other packages, as `training` and `best_case` both make them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import layerwise as lw

EVERY = 10
"""Steps between refreshes, for every optimizer that has such a number."""
Step = Callable[[], object]
OfMatrices = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
"""An optimizer of hidden matrices, at a rate."""


@dataclass
class Made:
    """Optimizers of one model, whose steps are taken one after the other."""

    optimizers: list[torch.optim.Optimizer]
    before: Step | None = None

    def step(self) -> None:
        if self.before is not None:
            self.before()
        for opt in self.optimizers:
            opt.step()

    def zero_grad(self) -> None:
        for opt in self.optimizers:
            opt.zero_grad()

    def health(self, count: str) -> int | None:
        """A count of `health()`, over optimizers that have it."""
        found = [getattr(opt.health(), count, None) for opt in self.optimizers if isinstance(opt, lw.optim.Layerwise)]
        known = [n for n in found if n is not None]
        return sum(known) if known else None


def fused_adamw(parameters: list[nn.Parameter], lr: float, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True, **options)


def pytorch_optimizer_soap(matrices: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP

    return SOAP(matrices, lr=lr, precondition_frequency=EVERY)


def heavyball(name: str, **options: Any) -> OfMatrices:
    def make(matrices: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        import heavyball

        heavyball.utils.compile_mode = None
        return getattr(heavyball, name)(matrices, lr=lr, **options)

    return make


def meta(soap: bool) -> OfMatrices:
    """Distributed Shampoo on one device; its names have changed over time."""

    def make(matrices: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        import distributed_shampoo as package

        def first(*names: str) -> Any:
            return next(getattr(package, name) for name in names if hasattr(package, name))

        options: dict[str, Any] = {"precondition_frequency": EVERY, "start_preconditioning_step": EVERY}
        if soap:
            options["preconditioner_config"] = first("DefaultSOAPConfig", "DefaultEigenvalueCorrectedShampooConfig")
        else:
            options["grafting_config"] = first("AdamPreconditionerConfig", "AdamGraftingConfig")(beta2=0.95)
        return package.DistributedShampoo(matrices, lr=lr, max_preconditioner_dim=8192, **options)

    return make
