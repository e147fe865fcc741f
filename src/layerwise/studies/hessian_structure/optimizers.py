"""The same networks trained by several optimizers to one training loss, for a look at their layer Hessians."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from layerwise.studies.hessian_structure.measures import Layer, batches, measure
from layerwise.studies.hessian_structure.networks import Task
from layerwise.studies.tangent_alignment.optimizers import LARGER, make
from layerwise.training import Budget, Choice, Method, Problem, accuracy, search, tensor_batches
from layerwise.training.loop import order_seed, seeded
from layerwise.training.trials import NUMERICAL

EVERY = 5
"""Steps between looks at the training loss."""


def problem(task: Task, steps: int) -> Problem:
    """For `layerwise.training`; "fit" are the training images."""
    split = task.split()
    given = {"train": (split.x, split.y), "fit": (split.x, split.y), "test": (split.held_x, split.held_y)}
    return Problem(
        name=f"{task.network}-{task.images}",
        model=task.model,
        batches=tensor_batches(given, task.batch),
        metrics={"accuracy": accuracy},
        budget=Budget(steps=steps),
    )


def chosen(
    task: Task,
    name: str,
    rates: Sequence[float],
    trials: int,
    steps: int,
    seeds: Sequence[int],
    keep: Path | None = None,
    map: Callable = map,
) -> Choice:
    """The rate of a method by its training loss after some steps, as many trials for each method."""
    method = Method(name=name, make=make(name), grid={"lr": [rate * LARGER.get(name, 1.0) for rate in rates]})
    return search(
        problem(task, steps),
        method,
        trials=trials,
        seeds=seeds,
        score="fit/loss",
        every=steps,
        device=task.device,
        keep=keep,
        map=map,
    )


class Reached(NamedTuple):
    """A network at the loss that was asked for."""

    model: nn.Module
    steps: int
    loss: float
    stopped: str
    """Why the training ended before; empty if the loss was reached."""


def trained_to(task: Task, name: str, lr: float, loss: float, most: int, seed: int) -> Reached:
    """Train until the loss on all training images is at most `loss`, looked at every few steps."""
    device, split = torch.device(task.device), task.split(seed)
    passes = problem(task, most)
    with seeded(seed, device):
        model = task.model(seed)
        optimizer, found, step = make(name)(model, lr=lr), math.inf, 0
        for epoch in count():
            for x, y in passes.batches("train", order_seed(seed, epoch)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                try:
                    optimizer.step()
                except NUMERICAL as error:
                    return Reached(model.eval(), step, found, str(error))
                step += 1
                if step % EVERY and step < most:
                    continue
                with torch.no_grad():
                    found = float(nn.functional.cross_entropy(model(split.x), split.y))
                if not math.isfinite(found) or found <= loss or step >= most:
                    reason = "" if found <= loss else f"a loss of {found:.3g} after {step} steps"
                    return Reached(model.eval(), step, found, reason)
    raise AssertionError("not reached")


def layers(task: Task, reached: Reached, seed: int, leading: int) -> dict[str, Layer]:
    """Measures of all layers."""
    given = batches(task, seed)
    return {layer: measure(reached.model, given, layer, leading=leading, dtype=torch.float64) for layer in task.layers}
