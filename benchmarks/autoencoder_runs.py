"""One run of the autoencoder: a model, a method at one setting, an epoch at a time."""

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from autoencoder_methods import Method
from measure import reason, synchronize
from torch import Tensor, nn

from layerwise import data
from layerwise.data.folder import MissingDataError
from layerwise.data.optional import MissingPackageError

WIDTHS = {"mnist": (784, 1000, 500, 250, 30), "digits": (64, 48, 24, 12)}
PIECE = 5000
"""Examples at a time where the loss of all is measured."""


@dataclass(frozen=True)
class Task:
    """Images, and how long is trained on them."""

    data: str
    train: Tensor
    test: Tensor
    epochs: int
    batch: int
    seed: int
    device: str
    estimator: str = "empirical"

    def model(self, batch_norm: bool) -> nn.Sequential:
        """Sigmoids between all layers, logits at the end; weights N(0, 4 / fan-in), biases zero."""
        sizes = (*WIDTHS[self.data], *WIDTHS[self.data][-2::-1])
        generator = torch.Generator().manual_seed(self.seed)
        modules: list[nn.Module] = []
        for n_in, n_out in itertools.pairwise(sizes):
            layer = nn.Linear(n_in, n_out)
            nn.init.normal_(layer.weight, 0, 2 / n_in**0.5, generator=generator)
            nn.init.zeros_(layer.bias)
            modules += [layer, *([nn.BatchNorm1d(n_out)] if batch_norm else []), nn.Sigmoid()]
        return nn.Sequential(*modules[: -2 if batch_norm else -1]).to(self.device)


@dataclass
class Run:
    """What one setting gave. Entry 0 of `losses` and `seconds` is before training; measuring is not timed."""

    setting: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    mse: float = float("nan")
    test_loss: float = float("nan")
    note: str = ""

    @property
    def final(self) -> float:
        return float("inf") if self.note.startswith("fails") or not self.losses else self.losses[-1]


def load(name: str, images: str | None, limit: int | None) -> tuple[str, Tensor, Tensor]:
    """(data set, train, test), a row an image: an .npz file, MNIST, or digits where MNIST cannot be had."""
    if images is not None:
        with np.load(images) as file:
            train, test = (torch.from_numpy(file[part]).flatten(1).float() / 255 for part in ("train", "test"))
        return "mnist", train[:limit], test
    if name == "mnist":
        try:
            return "mnist", data.mnist("train", limit=limit).flat(), data.mnist("test").flat()
        except (MissingDataError, MissingPackageError) as error:
            print(f"digits in place of MNIST: {error}")
    x = data.digits().flat()
    return "digits", x, x


def bce(f: Tensor, x: Tensor) -> Tensor:
    """Mean over examples of the cross-entropy summed over pixels."""
    return F.binary_cross_entropy_with_logits(f, x, reduction="sum") / len(x)


@torch.no_grad()
def measure(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Cross-entropy and squared error, both summed over pixels and averaged over examples."""
    model.eval()
    loss = error = 0.0
    for part in x.split(PIECE):
        f = model(part)
        loss += float(bce(f, part)) * len(part) / len(x)
        error += float((f.sigmoid() - part).square().sum()) / len(x)
    model.train()
    return loss, error


def train_epoch(model: nn.Module, opt: torch.optim.Optimizer, task: Task, generator: torch.Generator) -> None:
    order = torch.randperm(len(task.train), generator=generator).to(task.device)
    for chosen in order.split(task.batch):
        if len(chosen) < task.batch:
            return
        x = task.train[chosen]
        opt.zero_grad()
        bce(model(x), x).backward()
        opt.step()


def run(method: Method, setting: Mapping[str, Any], task: Task, seconds: float) -> Run:
    """Train until the epochs are done, the loss is past hope, or `seconds` of training have passed."""
    model = task.model(method.batch_norm)
    generator = torch.Generator().manual_seed(task.seed + 1)
    loss, _ = measure(model, task.train)
    found = Run(dict(setting), [loss], [0.0])
    try:
        opt = method.build(model, setting, task.estimator)
        for _ in range(task.epochs):
            synchronize(task.device)
            start = time.perf_counter()
            train_epoch(model, opt, task, generator)
            synchronize(task.device)
            found.seconds.append(found.seconds[-1] + time.perf_counter() - start)
            loss, found.mse = measure(model, task.train)
            found.losses.append(loss)
            if not loss < 4 * found.losses[0]:
                found.note = "fails: diverges"
                return found
            if found.seconds[-1] > seconds and len(found.losses) <= task.epochs:
                found.note = "out of time"
                break
    except (ArithmeticError, RuntimeError, ValueError) as error:
        found.note = f"fails: {reason(error)}"
        return found
    found.test_loss, _ = measure(model, task.test)
    return found
