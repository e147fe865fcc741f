"""Seeds that run as one tensor program, and the runs of one algorithm on them."""

import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.algorithms import Algorithm, Weights
from layerwise.studies.feature_learning.batch import Batch, Numbers, draw_batch, draw_numbers, stack
from layerwise.studies.feature_learning.batches import batches_of
from layerwise.studies.feature_learning.covariance import haar
from layerwise.studies.feature_learning.measures import excess, subspace_distance, transfer_excess
from layerwise.studies.feature_learning.normalise import normalised, normaliser
from layerwise.studies.feature_learning.problem import Setting, Task, draw_problem
from layerwise.studies.feature_learning.two_layer import least_squares_head, loss

MEASURES = ("loss", "population_loss", "dist", "transfer")


class Group:
    """The problems of some seeds, stacked: tensors `[seed, 1, …]` with a place for rates; of one seed, as they are.

    Streams are named by purpose: problem, initial weights, training batches (by iteration), test batch. Test samples
    are drawn once a seed, so that curves of the transfer loss move only with the representation.
    """

    def __init__(self, setting: Setting, seeds: Sequence[int], device: torch.device | str, dtype: torch.dtype) -> None:
        self.setting, self.seeds, self.device, self.dtype = setting, tuple(seeds), torch.device(device), dtype
        together = together_on(device, len(self.seeds))
        with drawers(len(self.seeds)) as pool:  # a problem takes some milliseconds of eigenvectors
            draw = functools.partial(draw_problem, setting)
            each = pool.map if together else map
            problems = list(each(draw, [stream(seed, "problem") for seed in seeds]))
        self.tasks = [p.train if together else _on(p.train, device) for p in problems]
        self.train = _on(_stacked([p.train for p in problems], dtype), device)
        self.many = _on(_stacked(self.tasks, torch.float64), device) if together else None
        """The tasks of all seeds as one, where they share copies and products."""
        self.test = _on(_stacked([p.test for p in problems], dtype), device)
        self.G = _together([p.G for p in problems]).to(device, dtype)
        start = [haar(setting.k, setting.dx, stream(seed, "init")) for seed in seeds]
        self.start = _together(start).to(device, dtype)
        self.test_batch = self._test_batch([p.test for p in problems], together)

    def _test_batch(self, tasks: Sequence[Task], together: bool) -> Batch:
        n, streams = self.setting.test_batch, [stream(seed, "test") for seed in self.seeds]
        if together:
            numbers = [draw_numbers(task, n, generator) for task, generator in zip(tasks, streams, strict=True)]
            return batches_of(numbers, _on(_stacked(tasks, torch.float64), self.device), n, self.dtype)
        placed = zip([_on(task, self.device) for task in tasks], streams, strict=True)
        return stack([draw_batch(task, n, generator, dtype=self.dtype) for task, generator in placed])

    def batch(self, *names: str | int) -> Batch:
        """A training batch of every seed, a function of the seed and the name alone."""
        return self.collect(*self.ask(None, *names))

    def ask(self, pool: Executor | None, *names: str | int) -> list[Callable[[], Batch | Numbers]]:
        """Have it drawn by a pool of threads, if there is one, while other work goes on."""
        pieces = [self._piece(seed, task, names) for seed, task in zip(self.seeds, self.tasks, strict=True)]
        return list(pieces) if pool is None else [pool.submit(piece).result for piece in pieces]

    def _piece(self, seed: int, task: Task, names: tuple[str | int, ...]) -> Callable[[], Batch | Numbers]:
        generator = stream(seed, "train", *names)
        if self.many is not None:
            return functools.partial(draw_numbers, task, self.setting.batch, generator)
        return functools.partial(draw_batch, task, self.setting.batch, generator, dtype=self.dtype)

    def collect(self, *asked: Callable[[], Batch | Numbers]) -> Batch:
        """What was asked for."""
        drawn = [piece() for piece in asked]
        if self.many is not None:
            numbers = [one for one in drawn if isinstance(one, Numbers)]
            return batches_of(numbers, self.many, self.setting.batch, self.dtype)
        return stack([one for one in drawn if isinstance(one, Batch)])


def drawers(seeds: int) -> ThreadPoolExecutor:
    """Threads that draw what seeds need meanwhile; each computes alone, since its matrices are small."""
    return ThreadPoolExecutor(min(seeds, os.cpu_count() or 1), initializer=torch.set_num_threads, initargs=(1,))


def together_on(device: torch.device | str, seeds: int) -> bool:
    """Whether seeds share copies and products: not on a CPU, where a seed's result must not depend on the others."""
    return seeds > 1 and torch.device(device).type != "cpu"


@dataclass(frozen=True)
class Point:
    """What was measured of all runs at one iteration, `[seed, rate]` each, or `[rate]` for one seed."""

    iteration: int
    values: dict[str, Float[Tensor, "*r"]]


class Runs:
    """One algorithm at all its rates on a group of seeds.

    A run that is no longer finite stays where it last was finite, counts as diverged and does not touch the others.
    """

    def __init__(self, algorithm: Algorithm, group: Group, first: Batch) -> None:
        self.algorithm, self.group = algorithm, group
        shape = [*group.start.shape[:-3], len(algorithm.rates), *group.start.shape[-2:]]
        G = group.start.expand(shape).contiguous()
        self.weights = Weights(least_squares_head(G, self._seen(first)), G)
        self.lr = torch.tensor(algorithm.rates, dtype=G.dtype, device=G.device)[:, None, None]
        self.diverged_at = torch.full(G.shape[:-2], -1, device=G.device)
        self.any_diverged = False
        self.several = len(group.seeds) > 1
        """Whether tensors have an axis of seeds."""
        self.points: list[Point] = []

    def step(self, first: Batch, second: Batch, iteration: int | Int[Tensor, ""]) -> None:
        """One iteration; runs that left the finite numbers are frozen. Nobody looks if its number is a tensor."""
        old = self.weights
        new = self.algorithm.step(old, self.lr, self._seen(first), self._seen(second))
        # on a CPU a look at the numbers is free, and nearly always shows that all is well
        looks = isinstance(iteration, int) and not new.G.is_cuda
        if looks and not self.any_diverged and math.isfinite(float(new.G.sum() + new.F.sum())):
            self.weights = new
            return
        self.any_diverged = True
        finite = (new.G.sum((-2, -1)) + new.F.sum((-2, -1))).isfinite()
        self.diverged_at = torch.where(~finite & (self.diverged_at < 0), iteration, self.diverged_at)
        alive = (self.diverged_at < 0)[..., None, None]
        self.weights = replace(new, F=torch.where(alive, new.F, old.F), G=torch.where(alive, new.G, old.G))

    def measure(self, batch: Batch, iteration: int) -> None:
        """Loss on a batch, loss without noise, distance to G⋆, excess after transfer; ∞ (distance 1) if diverged."""
        F, G = self.weights.F, self.weights.G
        group, seen = self.group, self._seen(batch)
        # on raw inputs a normalised network is F (G N): this is what is transferred and has a loss without noise
        on_inputs = G if self.algorithm.norm is None else G @ self._normaliser(batch)[0]
        values = {
            "loss": loss(F, G, seen),
            "population_loss": excess(F @ on_inputs, group.train) / 2,
            "dist": subspace_distance(G, group.G),
            "transfer": transfer_excess(on_inputs, group.test_batch, group.test),
        }
        for name, value in values.items():
            worst = 1.0 if name == "dist" else torch.inf
            # a finite run may be so large that its loss is ∞ − ∞
            values[name] = value.masked_fill((self.diverged_at >= 0) | value.isnan(), worst)
        self.points.append(Point(iteration, values))

    def _seen(self, batch: Batch) -> Batch:
        return batch if self.algorithm.norm is None else normalised(batch, *self._normaliser(batch))

    def _normaliser(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        if self.algorithm.norm and self.algorithm.norm.endswith("pop"):
            return self._population_normaliser
        return normaliser(self.algorithm.norm or "", batch, self.group.train.Sigma)

    @functools.cached_property
    def _population_normaliser(self) -> tuple[Tensor, Tensor | None]:
        return normaliser(self.algorithm.norm or "", self.group.test_batch, self.group.train.Sigma)


def apart(
    runs: Sequence[Runs], group: Group, names: Sequence[str], steps: int, pool: Executor
) -> Callable[[int], Batch]:
    """What takes an iteration of all runs and returns the batch of the head; the next batches are drawn meanwhile."""

    def ask(t: int) -> list[list[Callable[[], Batch | Numbers]]]:
        return [group.ask(pool, t, name) for name in names] if t <= steps else []

    asked = ask(1)

    def step(t: int) -> Batch:
        nonlocal asked
        batches = [group.collect(*pieces) for pieces in asked]
        asked = ask(t + 1)
        for one in runs:
            one.step(batches[0], batches[-1], t)
        return batches[-1]

    return step


def _together(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).unsqueeze(1) if len(tensors) > 1 else tensors[0]


def _on(task: Task, device: torch.device | str) -> Task:
    return Task(
        Sigma=task.Sigma.to(device),
        root=task.root.to(device),
        map=task.map.to(device),
        deviation=task.deviation,
        uniform=task.uniform,
    )


def _stacked(tasks: Sequence[Task], dtype: torch.dtype) -> Task:
    def one(name: str) -> Tensor:
        return _together([getattr(task, name) for task in tasks]).to(dtype)

    first = tasks[0]
    return Task(Sigma=one("Sigma"), root=one("root"), map=one("map"), deviation=first.deviation, uniform=first.uniform)
