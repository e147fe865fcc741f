"""The alignment of tangent kernels by who trains: several optimizers on one task, compared at equal training loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from layerwise import optim
from layerwise.foundations.errors import NameLookupError, unknown
from layerwise.regimes.tracker import Tracker
from layerwise.studies.tangent_alignment.classification import LOSS_OF, Split, Task, probes
from layerwise.training import Choice, Method, accuracy, search
from layerwise.training.loop import order_seed, seeded
from layerwise.training.trials import NUMERICAL

METHODS = {"sgd": "SGD", "adam": "Adam", "muon": "Muon", "soap": "SOAP", "kfac": "KFAC", "ekfac": "EKFAC"}
"""By the names of experiments, those of figures. SGD has momentum 0.9; all but SGD and Adam are this library's, with
nothing set but the rate: updates of AdamW's size."""
LARGER = {"sgd": 10.0}
"""By what the rates of a method are multiplied: those of the others are of Adam's size."""


def make(name: str) -> Callable[..., Optimizer]:
    """From a model and a rate to the optimizer."""
    if name == "sgd":
        return lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if name == "adam":
        return lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr)
    if name not in METHODS:
        raise NameLookupError(unknown("method", name, METHODS))
    kind = getattr(optim, METHODS[name])
    return lambda model, lr: kind(model, lr=lr)


def chosen(
    task: Task,
    name: str,
    rates: Sequence[float],
    trials: int,
    seeds: Sequence[int],
    keep: Path | None = None,
    map: Callable = map,
) -> Choice:
    """The rate of a method by its training loss at the end, as many trials for each method; see `training.search`."""
    grid = {"lr": [rate * LARGER.get(name, 1.0) for rate in rates]}
    problem = task.problem(task.split(seeds[0]))
    method = Method(name=name, make=make(name), grid=grid)
    return search(
        problem,
        method,
        trials=trials,
        seeds=seeds,
        score="fit/loss",
        every=task.steps,
        device=task.device,
        keep=keep,
        map=map,
    )


class Run(NamedTuple):
    """Measures before training, and where each of some training losses is first reached."""

    series: dict[str, list[float | int]]
    """"loss" (the one asked for; the first entry is that before training), "step", "fit/loss", "test/accuracy", "cka",
    "effective_rank", …"""
    stopped: str
    """Why the training ended before the last loss was reached; empty if it was."""


def at_losses(task: Task, name: str, lr: float, losses: Sequence[float], seed: int, examples: int = 100) -> Run:
    """Train, and look at the kernel of held-out images where the training loss first is at most each of `losses`.

    The loss is that of (the beginning of) the training data, after every step. Where one step passes several losses,
    its snapshot counts for all. The training ends at the last of them, or after the task's steps.
    """
    split = task.split(seed)
    problem, device = task.problem(split), torch.device(task.device)
    series: dict[str, list[float | int]] = {}
    with seeded(seed, device):
        model = problem.model(seed).to(device)
        optimizer = make(name)(model, lr=lr)
        tracker = Tracker(model, probes(split, ("test",), examples)["test"], examples=examples)

        def note(loss: float, step: int, found: float) -> None:
            values = {"loss": loss, "step": step, "fit/loss": found}
            values |= {"test/accuracy": _accuracy(model, split)} | tracker.record(step)
            for key, value in values.items():
                series.setdefault(key, []).append(value)

        start = _loss(model, split)
        note(start, 0, start)
        left, step = sorted((loss for loss in losses), reverse=True), 0
        for epoch in count():
            for x, y in problem.batches("train", order_seed(seed, epoch)):
                optimizer.zero_grad()
                problem.loss(model(x), y).backward()
                try:
                    optimizer.step()
                except NUMERICAL as error:
                    return Run(series, str(error))
                step += 1
                found = _loss(model, split)
                if not math.isfinite(found):
                    return Run(series, f"a loss of {found} after {step} steps")
                while left and found <= left[0]:
                    note(left.pop(0), step, found)
                if not left or step == task.steps:
                    return Run(series, f"a loss of {found:.3g} after {step} steps" if left else "")
    raise AssertionError("not reached")


@torch.no_grad()
def _loss(model: nn.Module, split: Split) -> float:
    return float(nn.functional.cross_entropy(model(split.x[:LOSS_OF]), split.y[:LOSS_OF]))


@torch.no_grad()
def _accuracy(model: nn.Module, split: Split) -> float:
    return float(accuracy(model(split.held_x), split.held_y))
