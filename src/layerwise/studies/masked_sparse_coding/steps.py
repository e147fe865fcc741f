"""Steps on a dictionary by other optimizers than Adam: it is the weight of a linear layer, its inputs are the codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from layerwise import optim
from layerwise.foundations.random import stream
from layerwise.selfsup.sparse_coding.data import start_dictionary
from layerwise.selfsup.sparse_coding.losses import heldout_masked_loss, hidden_count
from layerwise.selfsup.sparse_coding.omp import omp
from layerwise.selfsup.sparse_coding.recovery import recovery_error
from layerwise.studies.masked_sparse_coding.comparison import Curves, Setting, one_thread

Make = Callable[[nn.Module, float], torch.optim.Optimizer]
METHODS: dict[str, Make] = {
    "adam": lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr),
    "kfac": lambda model, lr: optim.KFAC(model, lr=lr, likelihood="gaussian", estimator="empirical"),
    "foof": lambda model, lr: optim.FOOF(model, lr=lr),
    "shampoo": lambda model, lr: optim.Shampoo(model, lr=lr),
    "soap": lambda model, lr: optim.SOAP(model, lr=lr),
    "muon": lambda model, lr: optim.Muon(model, lr=lr),
}


def trained(setting: Setting, method: str, lr: float | int, seed: int, *, every: int = 10) -> Curves:
    """The curves of one masked training; data, start and masks are those of every other method."""
    data = setting.data(seed)
    B = start_dictionary(setting.start, setting.atoms, data)
    layer = nn.Linear(setting.atoms, setting.d, bias=False, dtype=B.dtype)
    layer.weight.data.copy_(B)
    optimizer, masks, found = METHODS[method](layer, float(lr)), stream(seed, "masks"), Curves()
    others = data.held_out[setting.atoms :]
    with one_thread(setting.device):
        _look(found, 0, layer, data.A, others, setting)
        for epoch in range(1, setting.epochs + 1):
            for Y in data.Y.split(setting.batch):
                _step(Y, layer, optimizer, setting, masks)
            if epoch % every == 0 or epoch == setting.epochs:
                _look(found, epoch, layer, data.A, others, setting)
    return found


def _step(Y: torch.Tensor, layer: nn.Linear, optimizer: torch.optim.Optimizer, setting: Setting, masks) -> None:
    hidden = torch.randperm(setting.d, generator=masks)[: hidden_count(setting.d, setting.hidden_fraction)]
    visible = torch.ones(setting.d, dtype=torch.bool)
    visible[hidden] = False
    codes = omp(Y, layer.weight.detach(), setting.k, visible=visible).dense(setting.atoms)
    optimizer.zero_grad()
    (layer(codes) - Y)[:, hidden].square().sum(1).mean().backward()
    optimizer.step()
    with torch.no_grad():
        layer.weight /= layer.weight.norm(dim=0)


def _look(found: Curves, epoch: int, layer: nn.Linear, A: torch.Tensor, others: torch.Tensor, setting: Setting) -> None:
    B = layer.weight.detach()
    found.epoch.append(epoch)
    found.error.append(float(recovery_error(A, B)))
    found.masked.append(float(heldout_masked_loss(others, B, setting.k, setting.hidden_fraction)))


def chosen(curves: Sequence[Curves]) -> int:
    """Of several rates, the one with the least held-out loss anywhere along its training; no truth is needed.

    >>> chosen([Curves(masked=[3.0, 2.0]), Curves(masked=[3.0, 1.0, 5.0])])
    1
    """
    return min(range(len(curves)), key=lambda i: min(curves[i].masked))
