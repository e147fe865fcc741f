"""Convolutional classifiers of small images, and the optimizers that are compared on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from layerwise import data
from layerwise.foundations.errors import InputError, NameLookupError, NumericalError, describe, unknown
from layerwise.studies.fisher_geometry import autoencoder
from layerwise.studies.fisher_geometry.convolutional import InBfloat16, network, standardized
from layerwise.training import Budget, Every, Method, Problem, State, accuracy, search, tensor_batches, train
from layerwise.training.loop import BUDGET
from layerwise.training.metrics import Evaluation

TRAINING = {"digits": 1500, "cifar10": 50_000}
"""Images to train on. The last 297 of the digits are for the test: they come from other hands than the first."""
CURVATURE = ("kfac", "ekfac", "ekfac-ra")
METHODS = (
    *CURVATURE,
    *(name + autoencoder.SAMPLED for name in CURVATURE),
    *("sgd", "sgd-bn", "adam", "adam-bn", "adamw", "shampoo", "soap", "muon"),
)
AGE = 0.2
"""Share of the steps between refreshes by which factors may be older than the step that inverts them."""
Splits = Mapping[str, tuple[Tensor, Tensor]]


def check_present(images: str) -> None:
    """Read one image of each split: what is missing is said before anything is trained."""
    if images not in TRAINING:
        raise NameLookupError(unknown("images", images, TRAINING))
    if images == "digits":
        data.digits(limit=1)
    else:
        for split in ("train", "test"):
            data.cifar10(split, limit=1, verify=False, progress=False)


@lru_cache(maxsize=1)  # decoding takes half a minute, and every cell of an experiment asks for the same
def splits(images: str, examples: int | None, device: str) -> Splits:
    """The first `examples` images to train on (None: all) and those of the test, both standardized by the former."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise InputError(describe(f"device={device!r}", "a device of this machine", 'pass device="cpu"'))
    if images == "digits":
        x, y = data.digits()
        end = TRAINING[images]
        train, test = data.Images(x[:end], y[:end]).first(examples or end), data.Images(x[end:], y[end:])
    else:
        train, test = data.cifar10("train", limit=examples), data.cifar10("test")
    found = {"train": (standardized(train.x), train.y), "test": (standardized(test.x, like=train.x), test.y)}
    layout = torch.channels_last if torch.device(device).type == "cuda" else torch.contiguous_format
    return {split: (x.to(device).contiguous(memory_format=layout), y.to(device)) for split, (x, y) in found.items()}


def error(f: Tensor, y: Tensor) -> Tensor:
    """Share of examples that are given another label than their own."""
    return 1 - accuracy(f, y)


def problem(
    name: str,
    given: Splits,
    batch: int,
    epochs: int,
    batch_norm: bool = False,
    width: int = 64,
    bfloat16: bool = False,
) -> Problem:
    """Cross-entropy of a network by its name, on images that are already where it is trained.

    On a GPU channels are last in memory, in which convolutions there are fastest.
    """

    def model(seed: int) -> nn.Module:
        found = network(name, batch_norm, width)
        if given["train"][0].is_cuda:
            found = found.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        return InBfloat16(found) if bfloat16 else found

    return Problem(
        name=name,
        model=model,
        batches=tensor_batches(given, batch),
        metrics={"error": error},
        budget=Budget(epochs=epochs),
    )


def method(
    name: str,
    rates: Sequence[float],
    dampings: Sequence[float],
    refresh: int,
    sua: bool = True,
    halve_every: int | None = None,
) -> Method:
    """A method by its name, with the grid it has for the auto-encoder.

    K-FAC and EKFAC are the thesis', renewed every `refresh` steps; Shampoo and SOAP keep to their own ten steps.

    Args:
        name: one of `METHODS`; "-bn" is said of the network.
        rates: learning rates; a third of them for updates of Adam's size, a tenth for Adam.
        dampings: of K-FAC and EKFAC; the others have as many values of another option.
        refresh: steps between new bases or inverses.
        sua: whether K-FAC and EKFAC take activations at different offsets of a kernel to be uncorrelated.
        halve_every: steps after which the rate is halved, again and again; None keeps it.
    """
    if name not in METHODS:
        raise NameLookupError(unknown("method", name, METHODS))
    found = autoencoder.method("adam" if name == "adamw" else name, rates, dampings, refresh)
    make: Callable[..., Optimizer] = _adamw if name == "adamw" else found.make
    curvature = name.removesuffix(autoencoder.SAMPLED) in CURVATURE
    own = ("refresh_every", "scale")  # of K-FAC and EKFAC; the others have their defaults
    fixed = {option: value for option, value in found.fixed.items() if curvature or option not in own}
    if name == "soap":  # whose default has updates of AdamW's size, as Muon's and Shampoo's have
        found = replace(found, grid={**found.grid, "lr": [rate / 3 for rate in rates]})
    if "likelihood" in fixed:
        fixed["likelihood"] = "categorical"
    if curvature:
        fixed["sua"] = sua
        fixed["factor_every"] = max(1, min(fixed.get("factor_every", 1), int(AGE * refresh)))
    if halve_every is not None:
        make = Halved(make, halve_every)
    return replace(found, name=name, make=make, fixed=fixed)


def _adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **options)


class Halved:
    """Makes an optimizer whose rate is halved after every so many of its steps."""

    def __init__(self, make: Callable[..., Optimizer], every: int) -> None:
        self.make, self.every = make, every

    def __call__(self, model: nn.Module, **options: Any) -> Optimizer:
        """The optimizer that `make` makes."""
        steps = 0

        def after_a_step(optimizer: Optimizer, *given: Any) -> None:
            nonlocal steps
            steps += 1
            if steps % self.every == 0:
                for group in optimizer.param_groups:
                    group["lr"] /= 2

        made = self.make(model, **options)
        made.register_step_post_hook(after_a_step)
        return made


def compared(
    given: Problem,
    chosen: Method,
    *,
    trials: int,
    seed: int,
    fresh: int,
    device: str = "cpu",
    keep: Path | None = None,
    map: Callable[[Callable, Iterable], Iterable] = map,
) -> tuple[dict[str, float | str], dict[str, list[float]]]:
    """Values and curves for a record: options chosen on one seed by the training loss at the end, curves of another.

    All training images are evaluated before and after a trial; only the run on the fresh seed, which is the one that is
    shown, is evaluated after every epoch, on the test too.
    """
    steps = len(list(given.batches("train", 0)))
    last = steps * (given.budget.epochs or 1)
    found = search(given, chosen, trials=trials, seeds=(seed,), every=last, device=device, keep=keep, map=map)
    tried = [[*t.options.values(), None if math.isinf(t.score) else round(t.score, 5)] for t in found.trials]
    values: dict[str, float | str] = {
        "diverged": float(sum(bool(t.diverged) for t in found.trials)),
        "at_edge": ", ".join(found.at_edge),
        "options": ", ".join(chosen.grid),
        "trials": json.dumps(tried),
    }
    if found.options is None:
        return values | {"best": math.inf}, {}
    values["best"] = found.score_of(found.options)
    values |= {f"chosen/{name}": float(value) for name, value in found.options.items()}
    series = curves(given, chosen, found.options, fresh, steps, device)
    values["final"] = series["train/loss"][-1] if series else math.inf
    if series:
        values |= {"test/error": series["test/error"][-1], "seconds": series["seconds"][-1]}
    return values, series


def curves(
    given: Problem, chosen: Method, options: Mapping[str, float | int], seed: int, steps: int, device: str
) -> dict[str, list[float]]:
    """Losses and errors after every epoch of a training, by epoch and by second; nothing if it diverged."""

    def when(state: State) -> dict[str, float]:
        return {"epoch": state.step / steps, "seconds": state.seconds}

    measures = [(Every(steps), measure) for measure in (when, Evaluation("train"), Evaluation("test"))]
    try:
        trained = train(
            given,
            lambda model: chosen.make(model, **options, **chosen.fixed),
            seed=seed,
            measures=measures,
            device=device,
        )
    except (NumericalError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
        return {}
    found = trained.recorder.series()
    loss = found["train/loss"]
    if trained.stopped != BUDGET or not loss[-1] <= loss[0]:  # NaN too
        return {}
    return {name: found[name] for name in ("epoch", "seconds", "train/loss", "train/error", "test/loss", "test/error")}
