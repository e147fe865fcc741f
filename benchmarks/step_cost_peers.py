"""Optimizers whose step is timed: members of `lw.optim`, torch's own, and those of other packages where installed."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from models import Problem
from torch import nn

import layerwise as lw

EVERY = 10
"""Steps between refreshes, for every optimizer that has such a number."""
SMALL = 1e-5
"""Learning rate where the batch is run again and again: a model that diverges would have its steps skipped."""
Make = Callable[[Problem, nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class System:
    """An optimizer and how it is timed."""

    make: Make
    hooks: bool = False
    """Whether it works inside forward and backward too: then what it adds to them is timed."""
    cycle: int = EVERY
    """Steps after which its cost repeats."""
    package: str = "layerwise"
    distribution: str = ""
    """Name on the package index, for a peer."""
    aim: float | None = None
    """At most this fraction of forward+backward, on the GPT."""
    hooks_aim: float | None = None
    """The same of what hooks add to forward and backward."""

    def available(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def _average(p: Problem) -> str:
    return "tokens" if p.terms() != p.examples() else "examples"


def _hooked(member: type[lw.optim.Layerwise], factor_every: int = EVERY, **options) -> Make:
    def make(p: Problem, model: nn.Module) -> torch.optim.Optimizer:
        every = {"factor_every": factor_every, "refresh_every": EVERY}
        given = {"loss_average": _average(p)} if options.get("scale") == "formula" else {}
        return member(model, lr=SMALL, **every, **given, **options)

    return make


def _plain(member: type[lw.optim.Layerwise], **options) -> Make:
    return lambda p, model: member(model, **options)


# --- peers -------------------------------------------------------------------------------------------------


def _matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights of linear layers and convolutions, and all other parameters."""
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in chosen]


class Pair(torch.optim.Optimizer):
    """Two optimizers, one for each part of the parameters."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.pair = first, second

    def step(self, closure=None) -> None:
        for opt in self.pair:
            opt.step()


def _torch_muon(p: Problem, model: nn.Module) -> torch.optim.Optimizer:
    matrices, rest = _matrices(model)
    return Pair(torch.optim.Muon(matrices), torch.optim.AdamW(rest))


def _pytorch_optimizer_muon(p: Problem, model: nn.Module) -> torch.optim.Optimizer:
    from pytorch_optimizer import Muon

    matrices, rest = _matrices(model)
    return Muon([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}])


def _pytorch_optimizer_soap(p: Problem, model: nn.Module) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP

    return SOAP(model.parameters(), precondition_frequency=EVERY)


def _pytorch_optimizer_shampoo(p: Problem, model: nn.Module) -> torch.optim.Optimizer:
    from pytorch_optimizer import ScalableShampoo

    return ScalableShampoo(model.parameters(), start_preconditioning_step=1, preconditioning_compute_steps=EVERY)


def _heavyball(name: str, **options) -> Make:
    def make(p: Problem, model: nn.Module) -> torch.optim.Optimizer:
        import heavyball

        heavyball.utils.compile_mode = None
        return getattr(heavyball, name)(model.parameters(), **options)

    return make


def _singd(p: Problem, model: nn.Module) -> torch.optim.Optimizer:
    from singd.optim.optimizer import SINGD

    return SINGD(model, T=EVERY, lr=SMALL, loss_average="batch+sequence" if _average(p) == "tokens" else "batch")


SYSTEMS: dict[str, System] = {
    "SGD": System(_plain(lw.optim.SGD, momentum=0.9), cycle=1),
    "Adam": System(_plain(lw.optim.Adam), cycle=1),
    "KFAC": System(_hooked(lw.optim.KFAC), hooks=True, aim=0.5, hooks_aim=0.5),
    "KFAC, statistics each step": System(_hooked(lw.optim.KFAC, 1), hooks=True),
    "KFAC, formula": System(_hooked(lw.optim.KFAC, scale="formula"), hooks=True),
    "EKFAC": System(_hooked(lw.optim.EKFAC), hooks=True, aim=1.0),
    "EKFAC-ra": System(_hooked(lw.optim.EKFAC, scaling="running"), hooks=True),
    "FOOF": System(_hooked(lw.optim.FOOF), hooks=True),
    "Shampoo": System(_plain(lw.optim.Shampoo, refresh_every=EVERY), aim=0.8),
    "Shampoo, formula": System(_plain(lw.optim.Shampoo, refresh_every=EVERY, scale="formula")),
    "SOAP": System(_plain(lw.optim.SOAP, refresh_every=EVERY), aim=1.0),
    "SOAP, formula": System(_plain(lw.optim.SOAP, refresh_every=EVERY, scale="formula")),
    "Muon": System(_plain(lw.optim.Muon), cycle=1),
    "Muon, formula": System(_plain(lw.optim.Muon, scale="formula"), cycle=1),
    "torch AdamW": System(lambda p, model: torch.optim.AdamW(model.parameters()), cycle=1, package="torch"),
    "torch Muon + AdamW": System(_torch_muon, cycle=1, package="torch"),
    "pytorch-optimizer Muon": System(
        _pytorch_optimizer_muon, cycle=1, package="pytorch_optimizer", distribution="pytorch-optimizer"
    ),
    "pytorch-optimizer SOAP": System(
        _pytorch_optimizer_soap, package="pytorch_optimizer", distribution="pytorch-optimizer"
    ),
    "pytorch-optimizer ScalableShampoo": System(
        _pytorch_optimizer_shampoo, package="pytorch_optimizer", distribution="pytorch-optimizer"
    ),
    "heavyball SOAP": System(
        _heavyball("SOAP", precondition_frequency=EVERY), package="heavyball", distribution="heavyball"
    ),
    "heavyball Muon": System(_heavyball("Muon"), cycle=1, package="heavyball", distribution="heavyball"),
    "singd": System(_singd, hooks=True, package="singd", distribution="singd"),
}
PEERS = tuple(name for name, system in SYSTEMS.items() if system.package != "layerwise")
