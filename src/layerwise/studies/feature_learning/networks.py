"""Beyond the paper: non-linear networks, two layers or more, trained for many steps by the library's own optimizers.

The features of a student of any depth are the top k eigenvectors of its average gradient outer product E[JᵀJ],
J = ∂f/∂x: the directions of the input on which its outputs depend. They are compared with the rows of the teacher's G⋆.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.features import feature_distance
from layerwise.studies.feature_learning.members import Member
from layerwise.studies.feature_learning.teacher import Network, Task, draw_task, other_task
from layerwise.training import Budget, Every, Problem, State, train

TEST = 4000
"""Inputs on which the population is estimated."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """One training."""

    steps: list[int]
    dist: list[float]
    """Of the features, by step."""
    loss: list[float]
    """½ E|f(x) − F⋆tanh(G⋆x)|², without noise, by step."""
    transfer: float
    """After a least-squares head on another task: E|f(x) − y|² / E|y|², without noise."""

    @property
    def score(self) -> float:
        """By which a rate is chosen: the last loss, infinite for a training that broke off."""
        return self.loss[-1] if math.isfinite(self.loss[-1]) else math.inf


def learn(network: Network, member: Member, lr: float, *, steps: int, seed: int, every: int = 100) -> Learned:
    """Train a student on fresh batches by a member, and measure what it learned on the way.

    >>> from layerwise.studies.feature_learning.members import member
    >>> small = Network(dx=8, k=2, dy=3, dh=8, condition=10, batch=64)
    >>> learned = learn(small, member("kfac"), 0.1, steps=60, seed=0, every=30)
    >>> learned.dist[-1] < learned.dist[0]
    True
    """
    task = draw_task(network, seed)
    x = task.inputs(TEST, stream(seed, "networks", "test"))
    y = task.clean(x)

    def measure(state: State) -> dict[str, float]:
        with torch.no_grad():
            loss = float((state.model(x) - y).square().sum(1).mean()) / 2
        return {"loss": loss, "dist": feature_distance(state.model, x[: TEST // 4], task.G)}

    problem = Problem(
        name="teacher",
        model=network.student,
        batches=lambda split, order: _fresh(task, order),
        likelihood="gaussian",
        budget=Budget(steps=steps),
    )
    done = train(problem, lambda model: member.make(model, lr), seed=seed, measures=[(Every(every), measure)])
    series = done.recorder.series()
    found = [
        (step, dist, loss)
        for step, dist, loss in zip(series["step"], series["dist"], series["loss"], strict=True)
        if not math.isnan(dist)
    ]
    broken = done.stopped != "budget" or not math.isfinite(found[-1][2])
    if broken:
        found = [entry for entry in found if math.isfinite(entry[2])] + [(steps, 1.0, math.inf)]
    columns = list(zip(*found, strict=True))
    return Learned(
        steps=list(columns[0]),
        dist=list(columns[1]),
        loss=list(columns[2]),
        transfer=math.inf if broken else transfer(done.model, other_task(task, seed), seed),
    )


def _fresh(task: Task, order: int) -> Iterator[tuple[Tensor, Tensor]]:
    random = stream(order, "networks", "batches")
    while True:
        yield task.sample(task.network.batch, random)


def transfer(model: nn.Module, task: Task, seed: int, n: int = 1024, ridge: float = 1e-8) -> float:
    """Fit the last layer to n noisy samples of a task, and give the share of the labels' energy left unexplained.

    >>> small = Network(dx=6, k=2, dy=3, dh=8)
    >>> 0 < transfer(small.student(0), draw_task(small, 1), seed=0)
    True
    """
    assert isinstance(model, nn.Sequential)
    hidden = model[:-1]
    random = stream(seed, "networks", "transfer")
    with torch.no_grad():
        x, y = task.sample(n, random)
        Z = hidden(x)
        gram = Z.mT @ Z / n
        unit = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        head = torch.linalg.solve(gram + unit, Z.mT @ y / n)
        x = task.inputs(TEST, random)
        clean = task.clean(x)
        return float((hidden(x) @ head - clean).square().sum() / clean.square().sum())
