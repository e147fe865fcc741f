"""The optimizers of the comparison on the single-index problem: who they are, and how λ enters each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerwise import optim

if TYPE_CHECKING:  # the table is read by commands that compute nothing
    from torch import nn
    from torch.optim import Optimizer

BARE: dict[str, Any] = {"lr": 1.0, "momentum": 0.0}
BATCH: dict[str, Any] = BARE | {"factor_decay": 0.0, "refresh_every": 1}
"""Statistics of this batch alone."""
FISHER: dict[str, Any] = BATCH | {"clip": None, "likelihood": "gaussian", "estimator": "exact"}
ABSOLUTE: dict[str, Any] = FISHER | {"damping_scale": "absolute", "damping_split": "equal"}
"""With damping λ²: P + λI and Sx + λI, so that λ is the theory's. P, whose trace is below 1/dh, hardly counts."""


@dataclass(frozen=True, kw_only=True)
class IndexMember:
    """One optimizer of this comparison."""

    label: str
    make: Callable[[nn.Module, float], Optimizer]
    """From a model and a damping λ to the optimizer. The rate is one: it only scales the first step."""
    damped: bool = False
    """Whether λ matters."""


INDEX_MEMBERS: dict[str, IndexMember] = {
    "sgd": IndexMember(label="SGD", make=lambda model, _: optim.SGD(model, **BARE)),
    "adam": IndexMember(label="Adam", make=lambda model, _: optim.Adam(model, lr=1.0)),
    "sign": IndexMember(label="Sign", make=lambda model, _: optim.Sign(model, **BARE)),
    "muon": IndexMember(
        label="Muon",
        make=lambda model, _: optim.Muon(model, **BARE, weight_decay=0.0, orthogonalize="polar", scale="formula"),
    ),
    "shampoo": IndexMember(label="Shampoo", make=lambda model, _: optim.Shampoo(model, **BATCH, scale="formula")),
    "soap": IndexMember(
        label="SOAP", make=lambda model, _: optim.SOAP(model, lr=1.0, skip_first=False, scale="formula")
    ),
    "locoprop": IndexMember(label="LocoProp", make=lambda model, d: optim.LocoProp(model, lr=1 / d), damped=True),
    "foof": IndexMember(
        label="FOOF",
        make=lambda model, d: optim.FOOF(model, damping=d, damping_scale="absolute", **BATCH, scale="formula"),
        damped=True,
    ),
    "kfac": IndexMember(
        label="KFAC (λ absolute)",
        make=lambda model, d: optim.KFAC(model, damping=d**2, **ABSOLUTE, scale="formula"),
        damped=True,
    ),
    "ekfac": IndexMember(
        label="EKFAC (λ absolute)",
        make=lambda model, d: optim.EKFAC(model, damping=d**2, **ABSOLUTE, scale="formula"),
        damped=True,
    ),
    "kfac-relative": IndexMember(
        label="KFAC (λ relative)",
        make=lambda model, d: optim.KFAC(model, damping=d**2, **FISHER, scale="formula"),
        damped=True,
    ),
    "ekfac-relative": IndexMember(
        label="EKFAC (λ relative)",
        make=lambda model, d: optim.EKFAC(model, damping=d**2, **FISHER, scale="formula"),
        damped=True,
    ),
    "mahalanobis": IndexMember(
        label="Mahalanobis-spectral",
        make=lambda model, d: optim.MahalanobisSpectral(model, damping=d**2, **FISHER, scale="formula"),
        damped=True,
    ),
    "ngd": IndexMember(
        label="NGD",
        make=lambda model, d: optim.NGD(
            model, lr=1.0, damping=d, clip=None, likelihood="gaussian", estimator="exact", method="woodbury"
        ),
        damped=True,
    ),
}
"""From a short name to the member. With "relative", λ is a multiple of each factor's mean eigenvalue, the library's
default: then P is inverted in earnest, and λ of Sx is the theory's too, since the mean eigenvalue of Σ is one."""
