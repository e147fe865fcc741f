"""Write one checkpoint a member, with the parameters that the next steps lead to: ``python .../write.py 0.1``.

Written once for a version and never again: what an earlier version saved, later ones must load.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import layerwise as lw

HERE = Path(__file__).parent
BEFORE, AFTER = 7, 6
"""Steps before and after; neither is a multiple of the refreshes, so that something is under way."""
CATEGORICAL = {"likelihood": "categorical", "refresh_every": 3, "factor_every": 2}
MEMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {}),
    "sign": ("Sign", {}),
    "muon": ("Muon", {}),
    "mahalanobis": ("MahalanobisSpectral", {}),
    "shampoo": ("Shampoo", {"refresh_every": 3}),
    "soap": ("SOAP", {"refresh_every": 3}),
    "foof": ("FOOF", {"refresh_every": 3, "factor_every": 2}),
    "kfac": ("KFAC", CATEGORICAL),
    "kfac-sampled": ("KFAC", {**CATEGORICAL, "estimator": "sampled"}),
    "ekfac": ("EKFAC", CATEGORICAL),
    "ekfac-running": ("EKFAC", {**CATEGORICAL, "scaling": "running"}),
    "locoprop": ("LocoProp", {"likelihood": "categorical"}),
    "ngd": ("NGD", {"likelihood": "categorical"}),
}


def network() -> nn.Module:
    """Convolution, norm, dense layers with and without a bias, in double precision."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 5), nn.LayerNorm(5), nn.Tanh(),
        nn.Linear(5, 3, bias=False),
    ).double()  # fmt: skip


def batch(number: int) -> tuple[Tensor, Tensor]:
    """From a formula, so that no version of a generator matters."""
    at = torch.arange(8 * 16, dtype=torch.float64).view(8, 1, 4, 4)
    return torch.sin(0.37 * at * (number + 1) + number), (torch.arange(8) * (number + 2)) % 3


def build(member: str, model: nn.Module) -> Any:
    """Its optimizer."""
    name, options = MEMBERS[member]
    return getattr(lw.optim, name)(model, lr=1e-2, **options)


def go_on(model: nn.Module, opt: Any, first: int, steps: int) -> None:
    """Train on these batches."""
    for number in range(first, first + steps):
        x, y = batch(number)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()


def write(member: str, to: Path) -> None:
    """A checkpoint after some steps, and where the next ones lead."""
    torch.manual_seed(0)
    model = network()
    opt = build(member, model)
    go_on(model, opt, 0, BEFORE)
    saved = {"model": model.state_dict(), "optimizer": opt.state_dict()}
    torch.save(saved, to)  # before it goes on: a state may share its tensors with the optimizer
    go_on(model, opt, BEFORE, AFTER)
    found = torch.load(to, weights_only=True)
    torch.save({**found, "then": model.state_dict()}, to)


if __name__ == "__main__":
    folder = HERE / sys.argv[1]
    folder.mkdir(exist_ok=False)
    for name in MEMBERS:
        write(name, folder / f"{name}.pt")
