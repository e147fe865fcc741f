"""The methods that train the autoencoder, and the grid of each: five learning rates and three values of another option.

K-FAC and its kin follow the card they reproduce: factors of the current batch alone, the loss's own gradients, no
momentum, no clipping, damping √λ on both factors, decomposed every 50 steps. All others keep their usual momentum.
Layers take turns, so the batch whose factors a layer decomposes must be recent: factors are taken every 10 steps.
"KFAC, defaults" and "EKFAC, defaults" are the library's own: running factors, momentum, relative damping, clipping.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import layerwise as lw

REFRESH = 50
FACTORS = 10
RATES = (3.0, 1.0, 0.3, 0.1, 0.03)
CARD = {
    "damping_split": "equal",
    "damping_scale": "absolute",
    "refresh_every": REFRESH,
    "factor_decay": 0.0,
    "momentum": 0.0,
    "clip": None,
}


@dataclass(frozen=True)
class Method:
    """A member of `lw.optim` and what is searched over; `on_digits` replaces rates for the small images."""

    title: str
    member: Callable[..., lw.optim.Layerwise]
    grid: Mapping[str, tuple[Any, ...]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    on_digits: tuple[float, ...] = ()
    batch_norm: bool = False

    def cells(self, data: str) -> list[dict[str, Any]]:
        grid = dict(self.grid)
        if data == "digits" and self.on_digits:
            grid["lr"] = self.on_digits
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]

    def edges(self, data: str, setting: Mapping[str, Any]) -> list[str]:
        """Options whose best value is the first or last of its grid: the grid may be too small there."""
        columns = {name: {cell[name] for cell in self.cells(data)} for name in setting}
        return [name for name, value in setting.items() if value in (min(columns[name]), max(columns[name]))]

    def build(self, model: nn.Module, setting: Mapping[str, Any], estimator: str) -> lw.optim.Layerwise:
        """With labels drawn from the model, where that is asked for and the method has output gradients."""
        options = {"scale": "formula", **self.fixed, **setting}
        if estimator == "sampled" and self.member in (lw.optim.KFAC, lw.optim.EKFAC):
            options |= {"estimator": "sampled", "likelihood": "bernoulli"}
        return self.member(model, **options)


SGD_GRID = {"lr": (0.1, 0.03, 0.01, 0.003, 0.001), "momentum": (0.5, 0.9, 0.98)}
SGD_DIGITS = (1.0, 0.3, 0.1, 0.03, 0.01)
ADAM_GRID = {"lr": (1e-2, 3e-3, 1e-3, 3e-4, 1e-4), "eps": (1e-8, 1e-5, 1e-3)}
ADAM_DIGITS = (0.3, 0.1, 0.03, 0.01, 0.003)
CURVATURE = {"lr": RATES, "damping": (1.0, 0.1, 0.01)}
OWN = {"lr": (0.3, 0.1, 0.03, 0.01, 0.003), "damping": (1.0, 0.1, 0.01)}

METHODS: Mapping[str, Method] = {
    "sgd": Method("SGD + momentum", lw.optim.SGD, SGD_GRID, on_digits=SGD_DIGITS),
    "adam": Method("Adam", lw.optim.Adam, ADAM_GRID, on_digits=ADAM_DIGITS),
    "muon": Method(
        "Muon",
        lw.optim.Muon,
        {"lr": (0.1, 0.03, 0.01, 0.003, 0.001), "momentum": (0.8, 0.9, 0.95)},
        {"weight_decay": 0.0, "fallback_lr": 1e-3},
        on_digits=(1.0, 0.3, 0.1, 0.03, 0.01),
    ),
    "shampoo": Method(
        "Shampoo",
        lw.optim.Shampoo,
        {"lr": (1e-2, 3e-3, 1e-3, 3e-4, 1e-4), "damping": (1e-2, 1e-4, 1e-6)},
        {"graft": "adam", "refresh_every": REFRESH},
        on_digits=(0.1, 0.03, 0.01, 0.003, 0.001),
    ),
    "soap": Method(
        "SOAP",
        lw.optim.SOAP,
        {"lr": (3e-2, 1e-2, 3e-3, 1e-3, 3e-4), "eps": (1e-8, 1e-5, 1e-3)},
        on_digits=ADAM_DIGITS,
    ),
    "foof": Method(
        "FOOF",
        lw.optim.FOOF,
        {"lr": (0.1, 0.03, 0.01, 0.003, 0.001), "damping": (0.1, 0.01, 0.001)},
        {"damping_scale": "absolute", "refresh_every": REFRESH, "factor_every": FACTORS},
        on_digits=(0.3, 0.1, 0.03, 0.01, 0.003),
    ),
    "kfac": Method(
        "KFAC", lw.optim.KFAC, {"lr": RATES, "damping": (10.0, 1.0, 0.1)}, {**CARD, "factor_every": FACTORS}
    ),
    "ekfac": Method("EKFAC", lw.optim.EKFAC, CURVATURE, {**CARD, "scaling": "batch"}),
    "ekfac-ra": Method("EKFAC-ra", lw.optim.EKFAC, CURVATURE, {**CARD, "factor_every": FACTORS, "scaling": "running"}),
    "kfac-own": Method("KFAC, defaults", lw.optim.KFAC, OWN, {"factor_every": FACTORS}),
    "ekfac-own": Method("EKFAC, defaults", lw.optim.EKFAC, OWN, {"factor_every": FACTORS, "scaling": "running"}),
    "sgd-bn": Method("SGD + momentum, BN", lw.optim.SGD, SGD_GRID, on_digits=SGD_DIGITS, batch_norm=True),
    "adam-bn": Method("Adam, BN", lw.optim.Adam, ADAM_GRID, on_digits=ADAM_DIGITS, batch_norm=True),
}
DEFAULT = tuple(name for name, method in METHODS.items() if not method.batch_norm)
