"""Optimizers that are compared in `cifar.py`, and the eight settings among which each may choose."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

import layerwise as lw


@dataclass(frozen=True)
class Member:
    """How an optimizer is made at a rate and a decay."""

    make: Callable[[nn.Module, float, float], torch.optim.Optimizer]
    rates: tuple[float, ...] = (3e-3, 9e-3, 2.7e-2, 8.1e-2)
    decays: tuple[float, ...] = (0.1, 1.0)
    """Decoupled: weights shrink by rate × decay at every step."""

    def settings(self) -> list[tuple[float, float]]:
        return list(product(self.rates, self.decays))

    def is_edge(self, rate: float) -> bool:
        """Whether a rate is the lowest or the highest of the grid: a better one may lie beyond."""
        return rate in (min(self.rates), max(self.rates))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _adamw(model: nn.Module, lr: float, decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_trained(model), lr=lr, weight_decay=decay, fused=True)


def _sgd(model: nn.Module, lr: float, decay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(_trained(model), lr=lr, momentum=0.9, nesterov=True, weight_decay=decay, fused=True)


def _own(member: str, **options: Any) -> Member:
    """With its defaults."""
    return Member(lambda model, lr, decay: getattr(lw.optim, member)(model, lr=lr, weight_decay=decay, **options))


MEMBERS = {
    "torch AdamW": Member(_adamw),
    # its decay is a gradient's term, in units of the loss
    "torch SGD, Nesterov": Member(_sgd, (0.4, 1.0, 2.5, 6.0), (3e-4, 1e-3)),
    "Muon": _own("Muon"),
    "SOAP": _own("SOAP"),
    # statistics of drawn labels cost a backward: every tenth step
    "KFAC": _own("KFAC", factor_every=10),
    "EKFAC": _own("EKFAC", factor_every=10, scaling="running"),
}
