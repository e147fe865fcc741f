"""Step sizes for least squares by training loss and by validation loss, and what they do on new tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise import theory
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream
from layerwise.meta.least_squares import LeastSquares

AT_ONCE = 20_000_000
"""Numbers of inputs that are drawn together; more tasks are drawn in parts."""


class OnNewTasks(NamedTuple):
    """What a learned step size does on tasks that it was not learned from: means over them."""

    eta: float
    train_rmse: float
    test_rmse: float
    """√(‖w − w*‖² + σ²), exact for Gaussian inputs: no test set is drawn."""
    error: float
    """‖w − w*‖²."""
    predicted: float
    """Its closed form for these inputs, over signal and noise; without truncation."""


@dataclass(frozen=True, kw_only=True)
class ProblemSizes:
    """Tasks, and how their step size is learned."""

    dim: int = 200
    examples: int = 100
    """Of a task; train-by-validation trains on half of them."""
    tasks: int = 300
    """To learn the step size from."""
    tests: int = 100
    """To try it on."""
    steps: int = 40
    grid: int = 25
    least: float | int = 1e-6
    largest: float | int = 1.0

    def __post_init__(self) -> None:
        if self.examples < 2:
            given = f"examples={self.examples}"
            raise InputError(describe(given, "at least two, to hold one out", "pass e.g. --examples 100"))
        if self.grid < 2 or not self.least < self.largest:
            given = f"a grid of {self.grid} from {self.least} to {self.largest}"
            raise InputError(describe(given, "two or more that ascend", "pass e.g. --grid 25 --least 1e-6"))

    @property
    def etas(self) -> Float[Tensor, "E"]:
        """Step sizes, evenly in their logarithm."""
        ends = torch.tensor([self.least, self.largest], dtype=torch.float64).log10()
        return torch.logspace(float(ends[0]), float(ends[1]), self.grid, dtype=torch.float64)

    def drawn(self, seed: int, name: str, count: int) -> Iterator[LeastSquares]:
        """Tasks with noise 1, in parts that fit in memory."""
        part = max(1, AT_ONCE // (self.examples * self.dim))
        sizes = {"n": self.examples, "d": self.dim, "noise": 1.0}
        for number, first in enumerate(range(0, count, part)):
            generator = stream(seed, name, number)
            yield LeastSquares.draw(tasks=min(part, count - first), generator=generator, **sizes)


class Objectives(NamedTuple):
    """Mean meta-objectives over tasks, for each step size."""

    train: Float[Tensor, "E"]
    validation: Float[Tensor, "E"]


def objectives(
    sizes: ProblemSizes, seed: int, noises: Sequence[float], steps: Sequence[int]
) -> dict[tuple[float, int], Objectives]:
    """Both meta-objectives for every noise and number of steps; each task is drawn and decomposed once."""
    total: dict[tuple[float, int], Objectives] = {}
    for tasks in sizes.drawn(seed, "tasks", sizes.tasks):
        halves = tasks.split(sizes.examples // 2)
        for noise in noises:
            louder, split = tasks.with_noise_times(noise), halves.with_noise_times(noise)
            for t in steps:
                share = len(tasks.y) / sizes.tasks
                found = Objectives(
                    share * louder.objective(sizes.etas, t, "train"),
                    share * split.objective(sizes.etas, t, "validation"),
                )
                before = total.get((noise, t), Objectives(0 * found.train, 0 * found.validation))
                total[noise, t] = Objectives(before.train + found.train, before.validation + found.validation)
    return total


def on_new_tasks(sizes: ProblemSizes, seed: int, noise: float, steps: int, eta: float, trained_on: int) -> OnNewTasks:
    """A step size on tasks of its own kind, trained on the first so many of their examples."""
    parts: list[Tensor] = []
    for tasks in sizes.drawn(seed, "tests", sizes.tests):
        here = tasks if trained_on == sizes.examples else tasks.split(trained_on)
        here = here.with_noise_times(noise)
        found = here.descend(eta, steps)
        error = here.error(found.weights)[:, 0]
        closed = [
            theory.descent_error(lam.numpy(), eta, steps, n=trained_on, d=sizes.dim, noise=noise)
            for lam in here.eigenvalues
        ]
        rmse = (2 * found.train_loss[:, 0]).sqrt(), (error + noise**2).sqrt()
        parts.append(torch.stack([*rmse, error, torch.tensor(closed, dtype=error.dtype)]))
    return OnNewTasks(eta, *torch.cat(parts, 1).mean(1).tolist())


def best_expected_step(
    sizes: ProblemSizes, seed: int, noise: float, steps: int, trained_on: int, tasks: int = 20
) -> float:
    """The step size of the grid with the least closed-form error on some tasks' inputs: no labels enter."""
    total: Tensor | None = None
    for part in sizes.drawn(seed, "tasks", tasks):
        for lam in part.split(trained_on).eigenvalues:
            options = {"n": trained_on, "d": sizes.dim, "noise": noise}
            errors = [theory.descent_error(lam.numpy(), float(eta), steps, **options) for eta in sizes.etas]
            found = torch.tensor(errors, dtype=torch.float64)
            total = found if total is None else total + found
    assert total is not None, "there is a task"
    return float(sizes.etas[total.argmin()])


class Compared(NamedTuple):
    """Both ways of learning, and train-by-validation's step size on all examples of a new task."""

    train: OnNewTasks
    validation: OnNewTasks
    retrained: OnNewTasks


def compared(sizes: ProblemSizes, seed: int, noise: float, steps: int, found: Objectives) -> Compared:
    """The step sizes that both meta-objectives prefer, on new tasks."""
    by_train, by_validation = (float(sizes.etas[f.argmin()]) for f in found)
    n = sizes.examples
    return Compared(
        on_new_tasks(sizes, seed, noise, steps, by_train, n),
        on_new_tasks(sizes, seed, noise, steps, by_validation, n // 2),
        on_new_tasks(sizes, seed, noise, steps, by_validation, n),
    )
