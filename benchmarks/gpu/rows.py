"""Optimizers that are trained with: members of `lw.optim` with their defaults, torch's own, and other packages'."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import layerwise as lw
from gpu.optimizers import EVERY, Made, OfMatrices, fused_adamw, heavyball, meta, pytorch_optimizer_soap
from gpu.tasks import Task

RATE = 1e-3
"""AdamW's, which is the default of all members: their updates have the norms of AdamW's."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    make: Callable[[Task, nn.Module], Made]
    aim: float | None = None
    """Milliseconds that it may add to an iteration of a GPT."""
    package: str = "torch"
    steps: int | None = None
    """Steps that are trained, where they are dear."""
    own: bool = False
    """Whether it is a member of `lw.optim`."""

    def available(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def _member(name: str, member: str, aim: float | None = None, **options: Any) -> Row:
    """Nothing is given but how often statistics are taken, and that embeddings and the head of a GPT are AdamW's."""

    def make(task: Task, model: nn.Module) -> Made:
        return Made([getattr(lw.optim, member)(model, overrides=task.overrides(), **options)])

    return Row(name, make, aim, own=True)


def _beside(name: str, matrices: OfMatrices, **options: Any) -> Row:
    """An optimizer of hidden matrices, with fused AdamW for the rest."""

    def make(task: Task, model: nn.Module) -> Made:
        chosen = task.matrices(model)
        known = {id(p) for p in chosen}
        rest = [p for p in model.parameters() if id(p) not in known]
        return Made([matrices(chosen, RATE), fused_adamw(rest, RATE)])

    return Row(name, make, **options)


def _torch_muon(matrices: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")  # at AdamW's rate


OURS = [
    _member("Muon", "Muon", 5.5),
    _member("KFAC empirical 10", "KFAC", 8.0, factor_every=10, estimator="empirical"),
    _member("KFAC sampled 10", "KFAC", 10.0, factor_every=10),
    _member("KFAC", "KFAC"),
    _member("EKFAC running 10", "EKFAC", 9.0, scaling="running", factor_every=10),
    _member("EKFAC", "EKFAC"),
    _member("Shampoo 10", "Shampoo", 8.0, factor_every=10),
    _member("Shampoo", "Shampoo"),
    _member("SOAP 10", "SOAP", 9.0, factor_every=10),
    _member("SOAP", "SOAP", 12.0),
    _member("SOAP refresh 1", "SOAP", refresh_every=1),
]
"""A number is that of steps between statistics; without one it is every step, which is the default."""
TORCHS = [
    Row("torch AdamW, fused", lambda task, model: Made([fused_adamw(list(model.parameters()), RATE)])),
    _beside("torch Muon", _torch_muon),
]
PEERS = [
    _beside("Meta Shampoo", meta(False), package="distributed_shampoo", steps=60),
    _beside("Meta SOAP", meta(True), package="distributed_shampoo", steps=60),
    _beside("pytorch-optimizer SOAP", pytorch_optimizer_soap, package="pytorch_optimizer", steps=60),
    _beside("heavyball SOAP", heavyball("SOAP", precondition_frequency=EVERY), package="heavyball", steps=60),
    _beside("heavyball Muon", heavyball("Muon"), package="heavyball", steps=60),
]


def rows(chosen: list[str] | None, peers: bool = True) -> list[Row]:
    """By name, or all that are installed."""
    known = [*OURS, *TORCHS, *(PEERS if peers else [])]
    if chosen is None:
        return [row for row in known if row.available()]
    if unknown := sorted(set(chosen) - {row.name for row in known}):
        raise SystemExit(
            f"Unknown --members {', '.join(map(repr, unknown))}. Available: {', '.join(repr(r.name) for r in known)}."
        )
    return [row for row in known if row.name in chosen]
