"""Beyond the paper: non-linear networks, two layers or more, trained for many steps by the library's own optimizers.

The features of a student of any depth are the top k eigenvectors of its average gradient outer product E[JᵀJ],
J = ∂f/∂x: the directions of the input on which its outputs depend. They are compared with the rows of the teacher's G⋆.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.modes import evaluating
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
    """Of the features, by step; 1 once the training has broken off."""
    loss: list[float]
    """½ E|f(x) − F⋆tanh(G⋆x)|², without noise, by step; infinite once the training has broken off."""
    score: float
    """By which a rate is chosen: the last loss on held-out samples with noise, other than those of `loss`."""
    transfer: float
    """After a least-squares head on another task: E|f(x) − y|² / E|y|², without noise."""


def learn(network: Network, member: Member, lr: float, *, steps: int, seed: int, every: int = 100) -> Learned:
    """Train a student on fresh batches by a member, and measure what it learned on the way.

    >>> from layerwise.studies.feature_learning.members import member
    >>> small = Network(dx=8, k=2, dy=3, dh=8, condition=10, batch=64)
    >>> learned = learn(small, member("kfac"), 0.1, steps=60, seed=0, every=30)
    >>> learned.dist[-1] < learned.dist[0]
    True
    """
    if steps < 1 or every < 1:
        raise InputError(describe(f"steps={steps}, every={every}", "numbers ≥ 1", "pass e.g. steps=200, every=50"))
    task = draw_task(network, seed)
    x = task.inputs(TEST, stream(seed, "networks", "test"))
    clean, held = task.clean(x), task.sample(TEST, stream(seed, "networks", "held out"))

    def measure(state: State) -> dict[str, float]:
        with torch.no_grad(), evaluating(state.model):
            loss, score = (_half_square(state.model(a), b) for a, b in ((x, clean), held))
        return {"loss": loss, "score": score, "dist": feature_distance(state.model, x[: TEST // 4], task.G)}

    problem = Problem(
        name="teacher",
        model=network.student,
        batches=lambda split, order: _fresh(task, order),
        likelihood="gaussian",
        budget=Budget(steps=steps),
    )
    done = train(problem, lambda model: member.make(model, lr), seed=seed, measures=[(Every(every), measure)])
    series = done.recorder.series()
    found = {step: tuple(numbers) for step, *numbers in zip(*(series[name] for name in SERIES), strict=True)}
    points = sorted({*range(0, steps, every), steps})
    rows = [found[step] if all(map(math.isfinite, found.get(step, LOST))) else LOST for step in points]
    broken = done.stopped != "budget" or rows[-1] is LOST
    dist, loss, score = zip(*rows[:-1], LOST if broken else rows[-1], strict=True)
    return Learned(
        steps=points,
        dist=list(dist),
        loss=list(loss),
        score=score[-1],
        transfer=math.inf if broken else transfer(done.model, other_task(task, seed), seed),
    )


SERIES = ("step", "dist", "loss", "score")
LOST = (1.0, math.inf, math.inf)
"""Distance, loss and score of a training that has broken off."""


def _half_square(f: Tensor, y: Tensor) -> float:
    return float((f - y).square().sum(1).mean()) / 2


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
