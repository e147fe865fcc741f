"""Options of a run, and what is wrong with them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from layerwise.bounds.pac_bayes.bases import METHODS
from layerwise.bounds.pac_bayes.prior import PriorGrid, check_confidence
from layerwise.foundations.errors import InputError, NameLookupError, describe, not_one_of, unknown

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What decides a run, beside model, init and data."""

    method: str
    delta: float | int
    delta_draws: float | int
    cap: float | int
    precision: float | int
    epochs: int
    batch_size: int
    lr: float | int
    decay: float | int
    milestones: tuple[float | int, ...]
    interval: int
    initial: str | None = None
    bias: str | None = None
    optimizer: str = "rmsprop"
    loss_scale: float | int = 1 / math.log(2)
    seed: int = 0
    draws: int = 2000
    per_draw: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise NameLookupError(unknown("method", self.method, METHODS))
        self._check_types()
        check_confidence(delta=self.delta, delta_draws=self.delta_draws)
        if not self.delta + self.delta_draws < 1:
            given = f"delta={self.delta} and delta_draws={self.delta_draws}"
            raise InputError(describe(given, "a sum below 1: the bound may fail that often", "take smaller ones"))
        PriorGrid(self.cap, self.precision)
        self._check_names()
        self._check_numbers()

    @property
    def variances(self) -> str:
        """`initial`, or its default."""
        return self.initial or ("curvature" if self.method == "ekfac" else "weights")

    @property
    def biases(self) -> str:
        """`bias`, or its default."""
        return self.bias or ("joint" if self.method == "ekfac" else "rotate")

    def _check_names(self) -> None:
        names = {
            "initial": (self.variances, ("weights", "rotated", "curvature")),
            "bias": (self.biases, ("rotate", "leave", "joint")),
            "optimizer": (self.optimizer, tuple(OPTIMIZERS)),
        }
        for name, (value, known) in names.items():
            if value not in known:
                raise InputError(not_one_of(name, value, known))
        if self.method == "ekfac" and self.biases != "joint":
            given = f'method="ekfac" and bias={self.bias!r}'
            raise InputError(describe(given, '"joint": EKFAC counts biases as columns', 'leave it out, or take "iter"'))

    def _check_types(self) -> None:
        for name in ("epochs", "batch_size", "interval", "draws", "per_draw", "seed"):
            value: Any = getattr(self, name)
            if not (isinstance(value, Integral) or (value is None and name == "per_draw")):
                raise InputError(describe(f"{name}={value!r}", "a whole number", "pass an int"))
        for name in ("delta", "delta_draws", "cap", "precision", "lr", "decay", "loss_scale"):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise InputError(describe(f"{name}={value!r}", "a number", "pass a float"))

    def _check_numbers(self) -> None:
        for name in ("epochs", "batch_size", "interval", "draws", "per_draw"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(describe(f"{name}={value}", "a number ≥ 1", "take a larger one"))
        for name in ("lr", "decay", "loss_scale"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise InputError(describe(f"{name}={value}", "a positive number", "take another"))
        if any(not 0 <= share <= 1 for share in self.milestones):
            given = f"milestones={self.milestones}"
            raise InputError(describe(given, "shares of all epochs", "take e.g. (0.5, 0.75)"))

    def optimizer_of(self, theta: nn.Parameter) -> torch.optim.Optimizer:
        """Of the one tensor, for which kernels of many tensors at once (`foreach`) are the slower ones."""
        return OPTIMIZERS[self.optimizer]([theta], lr=self.lr, foreach=False)

    def rate(self, epoch: int) -> float:
        """The learning rate, divided at milestones."""
        return self.lr * self.decay ** self._passed(epoch)

    def _passed(self, epoch: int) -> int:
        return sum(epoch >= round(share * self.epochs) for share in self.milestones)

    def due(self, epoch: int, last: int) -> bool:
        """Whether bases are computed anew before this epoch; they were at epoch `last`."""
        if self.method in ("base", "appr"):
            return False
        slower = 1 / max(self.decay ** self._passed(epoch), 1e-30) if self.method == "iter-d" else 1.0
        return epoch - last >= round(self.interval * slower)
