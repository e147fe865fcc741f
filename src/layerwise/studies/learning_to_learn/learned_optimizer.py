"""The MLP optimizer of Wu (2023), D.6, learned on image tasks by training or validation loss and tried on new ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.progress import Progress, Silent
from layerwise.foundations.random import stream
from layerwise.meta.learn import RATE, Episode, Learned, learn
from layerwise.meta.mlp_optimizer import mlp_memory, mlp_parameters, mlp_update
from layerwise.meta.unroll import inner_step
from layerwise.studies.learning_to_learn.image_tasks import (
    CLASSES,
    Tasks,
    accuracies,
    batch_order,
    losses,
    networks,
    taken,
)

WAYS = ("train", "validation")


class Curve(NamedTuple):
    """Accuracies along training on new tasks: means over them."""

    steps: list[int]
    train: list[float]
    """On the labels that were trained on, random ones included."""
    test: list[float]


@dataclass(frozen=True, kw_only=True)
class LearnedOptimizer:
    """How the optimizer is learned and tried."""

    tasks: Tasks
    hidden: tuple[int, ...] = (100, 20)
    batch: int = 32
    judged: int = 128
    """Examples of each evaluation of the meta-objective."""
    together: int = 10
    """Tasks of an episode, run at once; each meta-gradient is their mean."""
    episodes: int = 30
    segments: tuple[float | int, float | int] = (10, 30)
    """Of an episode: the least number, and the mean of an exponential that is added."""
    length: tuple[float | int, float | int] = (50, 100)
    """Steps of a segment, likewise."""
    clip: float | int | None = 1.0
    """Of the meta-gradient's norm: a safeguard of ours."""
    slowing: float | int = 0.5
    """RMSProp's rate at update k is 0.01/k^slowing; 0 is the thesis' constant rate, for its 12000 updates."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        if min(self.segments[0], self.length[0]) < 1:
            given = f"segments={self.segments}, length={self.length}"
            raise InputError(describe(given, "at least one of each", "pass e.g. --length 50 100"))

    def learned(self, seed: int, by: str, progress: Progress | None = None) -> Learned:
        """An optimizer that was learned by the loss on the training examples, or on a held-out half."""
        meta = {n: p.to(self.device) for n, p in mlp_parameters(generator=stream(seed, "optimizer")).items()}
        return learn(
            inner_step(_total, mlp_update),  # tasks are a first axis that all operations have: faster than vmap
            meta,
            _Counted(self._episodes(seed, by), self.episodes),
            lambda state, batch: losses(state["params"], *batch).mean(),
            lr=lambda k: RATE / k**self.slowing,
            clip=self.clip,
            tasks=False,
            progress=progress,
        )

    def _episodes(self, seed: int, by: str) -> Iterator[Episode]:
        sizes = (self.tasks.pixels, *self.hidden, CLASSES)
        for number in range(self.episodes):
            seeds = [(seed * 1_000 + number) * 1_000 + i for i in range(self.together)]
            drawn = self.tasks.draw(seeds, "meta", self.device)
            kept = self.tasks.examples if by == "train" else self.tasks.examples // 2
            g = stream(seed, "segments", number)
            lengths = [_drawn(self.length, g) for _ in range(_drawn(self.segments, g))]
            params = networks(seeds, sizes, "meta", self.device)
            total, judged = sum(lengths), self.tasks.examples - (0 if by == "train" else kept)
            order = batch_order(seeds, kept, total, self.batch, "meta").to(self.device)
            others = batch_order(seeds, judged, total, self.judged, "judged").to(self.device)
            offset = 0 if by == "train" else kept
            yield Episode(
                state={"params": params, "memory": mlp_memory(params, tasks=True)},
                segments=lengths,
                batches=_batches(drawn.x, drawn.y, order, 0),
                judged=_batches(drawn.x, drawn.y, others, offset),
            )

    def on_new_tasks(
        self, meta: dict[str, Tensor], seeds: Sequence[int], steps: int, logged: int, progress: Progress | None = None
    ) -> Curve:
        """The learned optimizer on new tasks, trained on all of their examples."""
        drawn = self.tasks.draw(seeds, "test", self.device)
        params = networks(seeds, (self.tasks.pixels, *self.hidden, CLASSES), "test", self.device)
        state: Any = {"params": params, "memory": mlp_memory(params, tasks=True)}
        order = batch_order(seeds, self.tasks.examples, steps, self.batch, "test").to(self.device)
        batches, found = _batches(drawn.x, drawn.y, order, 0), Curve([], [], [])
        step = inner_step(_total, mlp_update)
        every = max(1, steps // logged)
        with torch.no_grad():
            for k in (progress or Silent()).track(range(1, steps + 1), "steps", steps):
                state = step(state, meta, batches(k - 1))
                if k % every == 0 or k == steps:
                    test_x = drawn.test_x.expand(len(seeds), -1, -1)
                    found.steps.append(k)
                    found.train.append(accuracies(state["params"], drawn.x, drawn.y).mean().item())
                    found.test.append(accuracies(state["params"], test_x, drawn.test_y).mean().item())
        return found


class _Counted:
    """Episodes made one at a time, whose number is known."""

    def __init__(self, items: Iterator[Episode], count: int) -> None:
        self.items, self.count = items, count

    def __iter__(self) -> Iterator[Episode]:
        return self.items

    def __len__(self) -> int:
        return self.count


def _total(params: dict[str, Tensor], batch: Any) -> Tensor:
    """The sum over tasks, whose gradient is that of each."""
    return losses(params, *batch).sum()


def _batches(x: Tensor, y: Tensor, order: Tensor, offset: int) -> Any:
    def batch(k: int) -> tuple[Tensor, Tensor]:
        index = order[:, k] + offset
        return taken(x, index), y.gather(1, index)

    return batch


def _drawn(spread: tuple[float | int, float | int], generator: torch.Generator) -> int:
    """The least number plus an exponential of the given mean, rounded down."""
    return int(spread[0] - spread[1] * math.log(1 - torch.rand((), generator=generator).item()))
