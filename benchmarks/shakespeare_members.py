"""Optimizers that race in `shakespeare.py`, each with the rate that its grid is built around."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import layerwise as lw
from layerwise.optim.elementwise import AdamRule

ADAMW_RATE = 1e-3
"""Of AdamW, and of embeddings, norm layers, biases and the head beside every other member."""
ADAMW_BETAS = (0.9, 0.99)
EVERY = 10
REST = {name: {"update": "fallback"} for name in ("tokens", "positions", "head")}
Optimizers = list[torch.optim.Optimizer]


@dataclass(frozen=True)
class Member:
    """How an optimizer is made at a rate; those of `lw.optim` take further options."""

    rate: float
    make: Callable[..., Optimizers]


def _adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=ADAMW_BETAS, weight_decay=0.1, fused=True)


def _torch_muon(model: nn.Module, lr: float) -> Optimizers:
    matrices = [m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "head"]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.1), _adamw(rest, ADAMW_RATE)]


def _own(member: str, **options: Any) -> Callable[..., Optimizers]:
    def make(model: nn.Module, lr: float, **more: Any) -> Optimizers:
        rest = {
            "fallback_lr": ADAMW_RATE,
            "update_fallback": AdamRule(ADAMW_BETAS),
            "overrides": REST,
            "scale": "formula",
        }
        return [
            getattr(lw.optim, member)(model, lr=lr, weight_decay=0.1, loss_average="tokens", **rest, **options, **more)
        ]

    return make


# Options and rates are from a small model (2 × 64, 32 × 32 tokens, one seed): steps to a loss for which AdamW needs 425
# at the best of four rates, torch's Muon 256. AdamW's best rate there is 5e-3, where 1e-3 is usual at a width of 384;
# the rates of what has Adam's norms are taken to fall with it, though a little less (at a width of 160 Shampoo and KFAC
# are as fast at 2e-3 as at 8e-4). Muon's stay.
#
# Adam's norms in place of K-FAC's clip: attention has hardly any gradient at the start, so its natural-gradient step is
# large, and a clip makes the steps of all parameters small, those of embeddings and head among them: loss 3.3 after 100
# steps at the rate that is the default, where others are at 2.4. Momentum is here a sum of directions, so the best rate
# is below AdamW's, at a third to a half. Nesterov's takes KFAC from 246 steps to 208 and Shampoo from 225 to 209; Muon
# has it anyway.
_GRAFTED: dict[str, Any] = {"refresh_every": EVERY, "graft": "adam", "nesterov": True}
# Averages of 5 observations, 50 steps, and not of 20: 246 steps, not 253. Dampings of 0.03 and 0.1 are alike, 0.3 is
# worse (263). Factors of the gradient (Shampoo, SOAP) are taken at every step: at every tenth they need 254 for 225 and
# 307 for 255.
_CURVATURE: dict[str, Any] = {
    **_GRAFTED,
    "factor_every": EVERY,
    "factor_decay": 0.8,
    "likelihood": "categorical",
    "damping": 0.1,
    "clip": None,
}
MEMBERS: dict[str, Member] = {
    "torch AdamW": Member(ADAMW_RATE, lambda model, lr: [_adamw(list(model.parameters()), lr)]),
    "torch Muon": Member(2e-2, _torch_muon),
    "Muon": Member(2e-2, _own("Muon")),
    # 246 steps, 255 with β₁ = 0.95
    "SOAP": Member(3e-3, _own("SOAP", betas=(0.9, 0.95), refresh_every=EVERY)),
    # powers of ½ (Morwani et al. 2024) need 253 steps, the first paper's ¼ 337
    "Shampoo": Member(5e-4, _own("Shampoo", power=0.5, **_GRAFTED)),
    "KFAC": Member(5e-4, _own("KFAC", **_CURVATURE)),
    "EKFAC": Member(5e-4, _own("EKFAC", scaling="running", **_CURVATURE)),
}
