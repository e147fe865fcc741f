"""Optimizers that race in `shakespeare.py`, each with the rate that its grid is built around."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import layerwise as lw

ADAMW_RATE = 1e-3
"""Of AdamW, and of embeddings, norm layers, biases and the head beside every other member."""
EVERY = 10
REST = {name: {"update": "fallback"} for name in ("tokens", "positions", "head")}
Optimizers = list[torch.optim.Optimizer]


@dataclass(frozen=True)
class Member:
    """How an optimizer is made at a rate."""

    rate: float
    make: Callable[[nn.Module, float], Optimizers]


def _adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True)


def _torch_muon(model: nn.Module, lr: float) -> Optimizers:
    matrices = [m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "head"]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.1), _adamw(rest, ADAMW_RATE)]


def _own(member: str, **options: Any) -> Callable[[nn.Module, float], Optimizers]:
    def make(model: nn.Module, lr: float) -> Optimizers:
        common = {"fallback_lr": ADAMW_RATE, "loss_average": "tokens", "overrides": REST}
        return [getattr(lw.optim, member)(model, lr=lr, **common, **options)]

    return make


# Adam's norms in place of K-FAC's clip: attention has hardly any gradient at the start, so its natural-gradient step is
# large, and a clip would make the steps of all parameters small, those of embeddings and head among them.
_CURVATURE: dict[str, Any] = {
    "refresh_every": EVERY,
    "factor_every": EVERY,
    "likelihood": "categorical",
    "damping": 0.1,
    "clip": None,
    "graft": "adam",
    "weight_decay": 0.1,
}
MEMBERS: dict[str, Member] = {
    "torch AdamW": Member(ADAMW_RATE, lambda model, lr: [_adamw(list(model.parameters()), lr)]),
    "torch Muon": Member(2e-2, _torch_muon),
    "Muon": Member(2e-2, _own("Muon", weight_decay=0.1)),
    "SOAP": Member(3e-3, _own("SOAP", refresh_every=EVERY, weight_decay=0.1)),
    "Shampoo": Member(3e-4, _own("Shampoo", refresh_every=EVERY, graft="adam", weight_decay=0.1)),
    "KFAC": Member(3e-4, _own("KFAC", **_CURVATURE)),
    "EKFAC": Member(3e-4, _own("EKFAC", scaling="running", **_CURVATURE)),
}
