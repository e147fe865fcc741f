"""K-FAC's damping and rate for a kind of image task, chosen by validation loss over a grid.

A grid and not a meta-gradient: there are two numbers to learn, a grid shows how flat their surface is and cannot
overflow, and it runs `lw.optim.KFAC` itself. To differentiate, K-FAC would have to be written a second time, with
averaged factors, inverses and updates of AdamW's size as functions, and would be another optimizer than the one whose
default is in question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from layerwise.foundations.progress import Progress, Silent
from layerwise.foundations.random import stream
from layerwise.optim.members.kfac import KFAC
from layerwise.studies.learning_to_learn.image_tasks import CLASSES, Tasks, batch_order

DAMPING, RATE = 1e-1, 1e-3
"""The library's defaults."""


class Pair(NamedTuple):
    """Damping and rate."""

    damping: float
    rate: float


class Outcome(NamedTuple):
    """Of one training."""

    train: float
    """Loss on what was trained on."""
    valid: float
    """Loss on held-out examples, with labels as noisy; NaN where none are held out."""
    test: float
    """Loss on test images, whose labels are right."""
    accuracy: float
    """On test images."""


@dataclass(frozen=True, kw_only=True)
class DampedKFAC:
    """How networks are trained."""

    tasks: Tasks
    hidden: tuple[int, ...] = (32,)
    batch: int = 32
    steps: int = 120

    def trained(self, seed: int, name: str, pair: Pair, kept: int) -> Outcome:
        """One network, on the first so many examples of its task."""
        drawn = self.tasks.draw([seed], name)
        x, y = drawn.x[0], drawn.y[0]
        model = self._network(seed, name)
        opt = KFAC(model, lr=pair.rate, damping=pair.damping, likelihood="categorical", seed=seed)
        for index in batch_order([seed], kept, self.steps, self.batch, name)[0]:
            opt.zero_grad()
            cross_entropy(model(x[index]), y[index]).backward()
            opt.step()
        with torch.no_grad():
            train = cross_entropy(model(x[:kept]), y[:kept]).item()
            valid = cross_entropy(model(x[kept:]), y[kept:]).item() if kept < len(y) else float("nan")
            outputs = model(drawn.test_x)
            test = cross_entropy(outputs, drawn.test_y[0]).item()
            return Outcome(train, valid, test, (outputs.argmax(1) == drawn.test_y[0]).double().mean().item())

    def objective(
        self, dampings: Sequence[float], rates: Sequence[float], seeds: Sequence[int], progress: Progress | None = None
    ) -> Float[Tensor, "D R"]:
        """The mean validation loss after training on half of the examples; ∞ where it is no number."""
        found = torch.zeros(len(dampings), len(rates), dtype=torch.float64)
        runs = [(i, j, seed) for i in range(len(dampings)) for j in range(len(rates)) for seed in seeds]
        for i, j, seed in (progress or Silent()).track(runs, "runs", len(runs)):
            pair = Pair(dampings[i], rates[j])
            found[i, j] += self.trained(seed, "meta", pair, self.tasks.examples // 2).valid / len(seeds)
        return torch.where(torch.isfinite(found), found, torch.inf)

    def on_new_tasks(self, pair: Pair, seeds: Sequence[int]) -> Outcome:
        """Means over new tasks, trained on all of their examples."""
        found = [self.trained(seed, "test", pair, self.tasks.examples) for seed in seeds]
        return Outcome(*(sum(column) / len(seeds) for column in zip(*found, strict=True)))

    def _network(self, seed: int, name: str) -> nn.Sequential:
        sizes = (self.tasks.pixels, *self.hidden, CLASSES)
        layers: list[nn.Module] = []
        g = stream(seed, name, "network")
        for fan_in, fan_out in pairwise(sizes):
            linear = nn.Linear(fan_in, fan_out)
            with torch.no_grad():
                linear.weight.copy_(torch.randn(fan_out, fan_in, generator=g) * (2 / fan_in) ** 0.5)
                linear.bias.zero_()
            layers += [linear, nn.ReLU()]
        return nn.Sequential(*layers[:-1])
