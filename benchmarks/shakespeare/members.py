"""Optimizers that race in `shakespeare.py`: each at AdamW's rate, for a grid that is the same for all."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import layerwise as lw

RATES = (2e-3, 1e-3, 4e-3)
"""The middle one first: the others need not go on for longer than it took."""
BETAS, DECAY = (0.9, 0.99), 0.1
"""Of all, as nanoGPT has them for this text."""
REST = ("tokens", "positions", "head")
"""Layers that are no hidden matrices: AdamW's, under every member."""
Optimizers = list[torch.optim.Optimizer]
Make = Callable[[nn.Module, float], Optimizers]


def _adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=BETAS, weight_decay=DECAY, fused=True)


def _torch_muon(model: nn.Module, lr: float) -> Optimizers:
    matrices = [m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in REST]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    return [muon, _adamw(rest, lr)]


def own(member: str, **options: Any) -> Make:
    """With its defaults and `OPTIONS`, but for betas and decay, which are everybody's."""

    def make(model: nn.Module, lr: float) -> Optimizers:
        overrides = {name: {"update": "fallback"} for name in REST}
        usual = {"lr": lr, "betas": BETAS, "weight_decay": DECAY, "overrides": overrides}
        return [getattr(lw.optim, member)(model, **usual, **OPTIONS[member], **options)]

    return make


OPTIONS: dict[str, dict[str, Any]] = {
    "Muon": {},
    "SOAP": {},
    "Shampoo": {},
    # statistics of drawn labels cost a backward: every tenth step
    "KFAC": {"factor_every": 10},
    "EKFAC": {"factor_every": 10, "scaling": "running"},
}
MEMBERS: dict[str, Make] = {
    "torch AdamW": lambda model, lr: [_adamw(list(model.parameters()), lr)],
    "torch Muon": _torch_muon,
    **{member: own(member) for member in OPTIONS},
}
