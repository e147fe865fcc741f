"""Deep auto-encoders of images, and the optimizers that are compared on them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from layerwise import data
from layerwise.foundations.errors import NameLookupError, unknown
from layerwise.optim.ekfac import EKFAC
from layerwise.optim.kfac import KFAC
from layerwise.optim.muon import Muon
from layerwise.optim.reference import SGD
from layerwise.optim.shampoo import SOAP, Shampoo
from layerwise.training import Budget, Method, Problem, tensor_batches

WIDTHS = {"digits": (64, 48, 24, 12), "mnist": (784, 1000, 500, 250, 30)}
"""Of the encoder; the decoder is its mirror image."""


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


def problem(images: str, batch: int, epochs: int, batch_norm: bool = False) -> Problem:
    """Binary cross-entropy summed over pixels, of the images themselves; splits "train" and "test"."""
    if images not in WIDTHS:
        raise NameLookupError(unknown("images", images, WIDTHS))
    if images == "digits":
        train = test = data.digits().flat()
    else:
        train, test = data.mnist("train").flat(), data.mnist("test").flat()
    return Problem(
        name=f"{images} auto-encoder",
        model=lambda seed: autoencoder(WIDTHS[images], batch_norm),
        batches=tensor_batches({"train": (train, train), "test": (test, test)}, batch),
        likelihood="bernoulli",
        metrics={"squared_error": squared_error},
        budget=Budget(epochs=epochs),
    )


def method(name: str, rates: Sequence[float], dampings: Sequence[float], refresh: int) -> Method:
    """A method by its name, with five or so rates and three values of another option.

    K-FAC and EKFAC are the thesis': factors of the current batch, gradients of the loss itself, no momentum, no clip,
    √ε on both factors. Those whose update has Adam's size have a third of `rates`, Adam a tenth.
    """
    curvature = {
        "scale": "formula",
        "damping_split": "equal",
        "damping_scale": "absolute",
        "refresh_every": refresh,
        "factor_decay": 0.0,
        "momentum": 0.0,
        "clip": None,
    }
    seldom = {**curvature, "factor_every": min(FACTORS, refresh)}
    small = [rate / 3 for rate in rates]
    momenta, eps = (0.9, 0.5, 0.98)[: len(dampings)], (1e-8, 1e-5, 1e-3)[: len(dampings)]
    made: Mapping[str, tuple[Any, Mapping[str, Sequence[float]], Mapping[str, Any]]] = {
        "sgd": (SGD, {"lr": rates, "momentum": momenta}, {}),
        "adam": (_adam, {"lr": [rate / 10 for rate in rates], "eps": eps}, {}),
        "kfac": (KFAC, {"lr": rates, "damping": dampings}, seldom),
        "ekfac": (EKFAC, {"lr": rates, "damping": dampings}, {**curvature, "scaling": "batch"}),
        "ekfac-ra": (EKFAC, {"lr": rates, "damping": dampings}, {**seldom, "scaling": "running"}),
        "shampoo": (Shampoo, {"lr": small, "damping": (1e-4, 1e-2, 1e-6)[: len(dampings)]}, {"refresh_every": refresh}),
        "soap": (SOAP, {"lr": small, "eps": eps}, {}),
        "muon": (Muon, {"lr": small, "momentum": (0.95, 0.9, 0.8)[: len(dampings)]}, {"weight_decay": 0.0}),
    }
    kind = name.removesuffix("-bn")  # of the network: see `problem`
    if kind not in made:
        raise NameLookupError(unknown("method", name, made))
    make, grid, fixed = made[kind]
    return Method(name=name, make=make, grid=grid, fixed=fixed)


def _adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), **options)
