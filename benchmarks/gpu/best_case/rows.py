"""Optimizers of the best case: members of `lw.optim`, torch's own, and those of other packages."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import layerwise as lw
from gpu.best_case.model import REST, hidden, without
from gpu.optimizers import EVERY, Made, OfMatrices, fused_adamw, heavyball, meta, pytorch_optimizer_soap

SMALL = 1e-6
"""Learning rate: the same batch comes at every step, and is hardly learnt."""
NATURAL = 1e-8
"""Of members that divide by curvature: at `SMALL` they learn the batch by heart, and factors change by hundreds of
times in fifty steps. What that costs is a row of its own."""
DECAY = 0.01


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    make: Callable[[nn.Module], Made]
    tail: str | None = None
    """The row whose time is that of the parameters which are not hidden matrices."""
    aims: tuple[float, ...] = ()
    """Milliseconds a step, hidden matrices only: the first aim and the next."""
    factor_every: int = 1
    sampled: bool = False
    own: bool = False
    """Whether it is a member of `lw.optim`."""
    package: str = "torch"
    steps: int = 0
    """Steps of the warm-up, where they are dear; 0 for the usual number."""

    def available(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


JOINT, SEPARATE, TORCH = "AdamW tail", "AdamW tail with biases", "torch fused AdamW tail"
"""Tails: of members that take a bias as a column of its matrix; of members whose biases get the fallback; torch's."""


def _member(member: str, lr: float | None = None, **options: Any) -> Callable[[nn.Module], Made]:
    rate = lr or (NATURAL if member in ("KFAC", "EKFAC") else SMALL)

    def make(model: nn.Module) -> Made:
        usual = {"lr": rate, "weight_decay": DECAY, "loss_average": "tokens", "overrides": REST, "scale": "formula"}
        return Made([getattr(lw.optim, member)(model, **usual, **options)])

    return make


def _tail(biases: bool) -> Callable[[nn.Module], Made]:
    """The engine's fallback on all that is left, told of nothing else.

    All gradients are computed, as in any iteration; those of the hidden matrices are let go before the step.
    """

    def make(model: nn.Module) -> Made:
        others = hidden(model, biases=not biases)
        for p in others:
            p.requires_grad_(False)
        options: dict[str, Any] = {"separate_bias": biases, "overrides": {"*": {"update": "fallback"}}}
        opt = lw.optim.Layerwise(model, left="gradient", right="gradient", lr=SMALL, weight_decay=DECAY, **options)

        def let_go() -> None:
            for p in others:
                p.grad = None

        for p in others:
            p.requires_grad_(True)
        return Made([opt], let_go)

    return make


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return fused_adamw(parameters, SMALL, weight_decay=DECAY)


def _beside(matrices: OfMatrices) -> Callable[[nn.Module], Made]:
    """Another optimizer for hidden matrices, fused AdamW for the rest."""
    return lambda model: Made([matrices(hidden(model), SMALL), _adamw(without(model, hidden(model)))])


def _kronecker(every: int) -> list[Row]:
    aims, foof = ((8.0, 5.0), (4.0,)) if every == EVERY else ((14.0, 10.0), (8.0,))
    common: dict[str, Any] = {"refresh_every": EVERY, "factor_every": every}
    rows = [
        ("KFAC", _member("KFAC", **common), JOINT, aims),
        ("KFAC sampled", _member("KFAC", likelihood="categorical", **common), JOINT, aims),
        ("EKFAC", _member("EKFAC", scaling="batch", **common), JOINT, aims),
        ("EKFAC running", _member("EKFAC", scaling="running", **common), JOINT, aims),
        ("FOOF", _member("FOOF", **common), JOINT, foof),
        ("Shampoo", _member("Shampoo", **common), SEPARATE, aims),
        ("SOAP", _member("SOAP", **common), SEPARATE, aims),
    ]
    half: dict[str, Any] = {**common, "precision": "half"}
    if every == EVERY:
        rows += [
            ("KFAC learning", _member("KFAC", lr=SMALL, **common), JOINT, ()),
            ("KFAC half", _member("KFAC", **half), JOINT, aims),
            ("EKFAC running half", _member("EKFAC", scaling="running", **half), JOINT, aims),
            ("FOOF half", _member("FOOF", **half), JOINT, foof),
            ("SOAP half", _member("SOAP", **half), SEPARATE, aims),
        ]
    return [Row(f"{n} {every}", make, tail, a, every, "sampled" in n, own=True) for n, make, tail, a in rows]


TAILS = {
    JOINT: Row(JOINT, _tail(False), own=True),
    SEPARATE: Row(SEPARATE, _tail(True), own=True),
    TORCH: Row(TORCH, lambda model: Made([_adamw(without(model, hidden(model)))])),
}
OURS = [
    *_kronecker(EVERY),
    *_kronecker(1),
    Row("Muon", _member("Muon"), SEPARATE, (6.0, 4.5), own=True),
]
ADAMW = Row("torch fused AdamW, whole model", lambda model: Made([_adamw(list(model.parameters()))]))
TORCH_MUON = Row("torch Muon", _beside(lambda m, lr: torch.optim.Muon(m, lr=lr, weight_decay=DECAY)), TORCH)
PEERS = [
    TORCH_MUON,
    Row("Meta Shampoo", _beside(meta(False)), TORCH, package="distributed_shampoo"),
    Row("Meta SOAP", _beside(meta(True)), TORCH, package="distributed_shampoo"),
    Row("pytorch-optimizer SOAP", _beside(pytorch_optimizer_soap), TORCH, package="pytorch_optimizer", steps=EVERY),
    Row("heavyball SOAP", _beside(heavyball("SOAP", precondition_frequency=EVERY)), TORCH, package="heavyball"),
    Row("heavyball Muon", _beside(heavyball("Muon")), TORCH, package="heavyball"),
]


def rows(chosen: list[str] | None, peers: bool) -> list[Row]:
    """The rows to measure, tails first: "KFAC" means all rows whose name begins so and goes on with a number."""
    known = [*OURS, ADAMW, *(PEERS if peers else [])]
    names = {name for row in known for name in (row.name, row.name.rpartition(" ")[0]) if name}
    if unknown := sorted(set(chosen or ()) - names):
        raise SystemExit(f"Unknown --members {', '.join(unknown)}. Available: {', '.join(r.name for r in known)}.")
    if chosen is not None:
        known = [row for row in known if row.name in chosen or row.name.rpartition(" ")[0] in chosen]
    tails = [tail for name, tail in TAILS.items() if any(row.tail == name for row in known)]
    return [*tails, *known]
