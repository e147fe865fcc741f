"""Deep auto-encoders of images, and the optimizers that are compared on them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from layerwise import data
from layerwise.foundations.errors import NameLookupError, unknown
from layerwise.optim.members.ekfac import EKFAC
from layerwise.optim.members.kfac import KFAC
from layerwise.optim.members.muon import Muon
from layerwise.optim.members.sgd import SGD
from layerwise.optim.members.shampoo import Shampoo
from layerwise.optim.members.soap import SOAP
from layerwise.training import Budget, Method, Problem, tensor_batches

WIDTHS = {"digits": (64, 48, 24, 12), "mnist": (784, 1000, 500, 250, 30)}
"""Of the encoder; the decoder is its mirror image."""


CURVATURE: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "kfac": (KFAC, {}),
    "ekfac": (EKFAC, {"scaling": "batch"}),
    "ekfac-ra": (EKFAC, {"scaling": "running"}),
}
SAMPLED = "-sampled"
FACTORS = 10
"""Steps between factors where only a refresh reads them; layers take turns, so that theirs may be that much older."""


def squared_error(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of the pixels, summed over an image and averaged over images."""
    return (f.sigmoid() - y).square().sum(-1).mean()


def autoencoder(widths: Sequence[int], batch_norm: bool = False) -> nn.Sequential:
    """Sigmoids between all layers, logits at the end; weights N(0, 4 / fan_in), biases zero; weights are not tied."""
    sizes = (*widths, *reversed(widths[:-1]))
    modules: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layer = nn.Linear(fan_in, fan_out)
        nn.init.normal_(layer.weight, 0, 2 / fan_in**0.5)
        nn.init.zeros_(layer.bias)
        modules += [layer, *([nn.BatchNorm1d(fan_out)] if batch_norm else []), nn.Sigmoid()]
    return nn.Sequential(*modules[: -2 if batch_norm else -1])


@dataclass(frozen=True)
class NewAutoencoder:
    """`Problem.model` of an auto-encoder; an object, so that another process can be given it."""

    widths: Sequence[int]
    batch_norm: bool

    def __call__(self, seed: int) -> nn.Sequential:
        """Drawn from torch's own random state, which the loop has seeded."""
        return autoencoder(self.widths, self.batch_norm)


def problem(images: str, batch: int, epochs: int, batch_norm: bool = False, device: str = "cpu") -> Problem:
    """Binary cross-entropy summed over pixels, of the images themselves; splits "train" and "test", on the device."""
    if images not in WIDTHS:
        raise NameLookupError(unknown("images", images, WIDTHS))
    if images == "digits":
        train = test = data.digits().flat()
    else:
        train, test = data.mnist("train").flat(), data.mnist("test").flat()
    train, test = train.to(device), test.to(device)
    return Problem(
        name=f"{images} auto-encoder",
        model=NewAutoencoder(WIDTHS[images], batch_norm),
        batches=tensor_batches({"train": (train, train), "test": (test, test)}, batch),
        likelihood="bernoulli",
        metrics={"squared_error": squared_error},
        budget=Budget(epochs=epochs),
    )


def method(name: str, rates: Sequence[float], dampings: Sequence[float], refresh: int) -> Method:
    """A method by its name, with five or so rates and three values of another option.

    Muon and Shampoo have a third of `rates`, Adam and SOAP a tenth. All are as their papers have them (no updates of
    AdamW's size), so that runs of several rates can be one tensor program (`training.stacked`). K-FAC
    and EKFAC with `SAMPLED` after their name draw the labels of their statistics from the model.
    """
    if name.removesuffix(SAMPLED) in CURVATURE:
        labels = {"estimator": "sampled", "likelihood": "bernoulli"} if name.endswith(SAMPLED) else {}
        found = curvature_method(name.removesuffix(SAMPLED), rates, dampings, refresh, **labels)
        return replace(found, name=name)
    small = [rate / 3 for rate in rates]
    momenta, eps = (0.9, 0.5, 0.98, 0.99)[: len(dampings)], (1e-8, 1e-5, 1e-3, 1e-2)[: len(dampings)]
    made: Mapping[str, tuple[Any, Mapping[str, Sequence[float]], Mapping[str, Any]]] = {
        "sgd": (SGD, {"lr": rates, "momentum": momenta}, {}),
        "adam": (_adam, {"lr": [rate / 10 for rate in rates], "eps": eps}, {}),
        "shampoo": (
            Shampoo,
            {"lr": small, "damping": (1e-4, 1e-2, 1e-6, 1e-1)[: len(dampings)]},
            {"refresh_every": refresh, "scale": "formula"},
        ),
        "soap": (SOAP, {"lr": [rate / 10 for rate in rates], "eps": eps}, {"scale": "formula"}),
        "muon": (
            Muon,
            {"lr": small, "momentum": (0.95, 0.9, 0.8, 0.98)[: len(dampings)]},
            {"weight_decay": 0.0, "scale": "formula"},
        ),
    }
    kind = name.removesuffix("-bn")  # of the network: see `problem`
    if kind not in made:
        raise NameLookupError(unknown("method", name, (*CURVATURE, *made)))
    make, grid, fixed = made[kind]
    return Method(name=name, make=make, grid=grid, fixed=fixed)


def curvature_method(
    name: str, rates: Sequence[float], dampings: Sequence[float], refresh: int, **changed: Any
) -> Method:
    """K-FAC or EKFAC as in the thesis, but for options that are `changed`.

    Theirs are factors of the current batch, gradients of the loss itself, no momentum, no clip, √ε on both factors.
    """
    fixed = {
        "scale": "formula",
        "damping_split": "equal",
        "damping_scale": "absolute",
        "refresh_every": refresh,
        "factor_decay": 0.0,
        "momentum": 0.0,
        "clip": None,
        **CURVATURE[name][1],
    }
    if name != "ekfac":  # whose scalings are those of the current batch, and come with its factors
        fixed["factor_every"] = min(FACTORS, refresh)
    return Method(name=name, make=CURVATURE[name][0], grid={"lr": rates, "damping": dampings}, fixed=fixed | changed)


def _adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), **options)
