"""SGD with momentum on classifiers, several seeds, α and rates as one tensor program, logged on a geometric grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.progress import Progress
from layerwise.foundations.random import stream
from layerwise.studies.training_regimes.stack import Stack, cross_entropy_gradient, drawn
from layerwise.studies.training_regimes.task import Finished, Log, Run, Task, geometric


@dataclass(frozen=True, kw_only=True)
class Together:
    """Fully connected networks and their training."""

    hidden: tuple[int, ...] = (256, 256)
    momentum: float | int = 0.9
    batch: int = 125
    keep_initial: bool = True
    probe: int = 100
    """Training examples on which signs are compared with the start."""
    dtype: torch.dtype = torch.float32
    growth: float | int = 1.02
    """Factor between two steps that are logged."""

    def run(
        self,
        task: Task,
        runs: Sequence[Run],
        epochs: int,
        done: Callable[[Run, Log], bool],
        progress: Progress,
    ) -> list[Finished]:
        """All runs at once; a run ends when `done` says so of its log, or after so many epochs.

        Runs of one seed share weights at the start and the order of the data.
        """
        n, S = task.x.shape[1], len(task.seeds)
        if not 0 < self.batch <= n:
            raise InputError(describe(f"batch={self.batch} of {n} examples", "a part of them", "take a smaller one"))
        live = _Live.make(self, task, runs)
        finished: dict[int, Finished] = {}
        generators = [stream(seed, "order") for seed in task.seeds]
        a_epoch = n // self.batch
        total = epochs * a_epoch
        logged = geometric(total, self.growth)
        order = torch.empty(S, 0, dtype=torch.int64)
        for step in progress.track(range(total + 1), "steps", total):
            if step in logged:
                live.log(step)
                ended = [k for k, run in enumerate(live.runs) if step == total or done(run, live.logs[k])]
                finished |= {live.numbers[k]: live.finished(k) for k in ended}
                if len(ended) == len(live.runs):
                    break
                if ended:
                    live = live.kept([k for k in range(len(live.runs)) if k not in ended])
            place = step % a_epoch
            if place == 0:
                order = torch.stack([torch.randperm(n, generator=g) for g in generators])
            live.step(order[:, place * self.batch : (place + 1) * self.batch].to(task.x.device))
        return [finished[number] for number in range(len(runs))]


@dataclass
class _Live:
    """Runs that go on."""

    of: Together
    task: Task
    runs: list[Run]
    numbers: list[int]
    """Places among all runs."""
    seed: Int64[Tensor, "R"]
    """Places of their seeds."""
    stack: Stack
    start: Stack
    velocity: list[Tensor]
    """Like the parts of the stack."""
    logs: list[Log]

    @classmethod
    def make(cls, of: Together, task: Task, runs: Sequence[Run]) -> _Live:
        sizes = (task.x.shape[2], *of.hidden, task.classes)
        place = torch.tensor([task.seeds.index(run.seed) for run in runs], device=task.x.device)
        flat = drawn(sizes, task.seeds, of.dtype).to(task.x.device)[place]
        logs: list[Log] = [{} for _ in runs]
        every = list(range(len(runs)))
        still = Stack(sizes, flat * 0).parts
        return cls(of, task, list(runs), every, place, Stack(sizes, flat), Stack(sizes, flat), still, logs)

    def __post_init__(self) -> None:
        like = self.stack.parts[0]
        self.alpha = torch.tensor([float(run.alpha) for run in self.runs]).to(like)[:, None, None]
        rates = [run.lr / run.alpha**2 for run in self.runs]
        self.rate = torch.tensor(rates, dtype=torch.float64).to(like)
        self.inputs = {"train": self.task.x, **self.task.others}
        # Data are fixed, so that the outputs of the start are computed once.
        self.f0 = {name: self.start.forward(x[self.seed])[-1] for name, x in self.inputs.items()}
        self.signs0 = self.start.signs(self.start.forward(self._probe()))

    def _probe(self) -> Tensor:
        return self.task.x[self.seed, : self.of.probe]

    def outputs(self, f: Tensor, f0: Tensor) -> Tensor:
        moved = self.alpha * (f - f0)
        return f0 + moved if self.of.keep_initial else moved

    def step(self, batch: Int64[Tensor, "S B"]) -> None:
        """One step of every run."""
        index = batch[self.seed]
        rows = torch.arange(len(index), device=index.device)[:, None]
        x, y = self.task.x[self.seed[:, None], index], self.task.y[self.seed[:, None], index]
        seen = self.stack.forward(x)
        d = cross_entropy_gradient(self.outputs(seen[-1], self.f0["train"][rows, index]), y)
        for velocity, gradient in zip(self.velocity, self.stack.gradient(seen, d * self.alpha), strict=True):
            velocity.mul_(self.of.momentum).add_(gradient)
        self.stack.descend(self.rate, self.velocity)

    def log(self, step: int) -> None:
        """Measure all runs."""
        outputs = {
            name: self.outputs(self.stack.forward(x[self.seed])[-1], self.f0[name]) for name, x in self.inputs.items()
        }
        now = self.stack.signs(self.stack.forward(self._probe()))
        same = torch.stack([(a == b).sum((1, 2)) for a, b in zip(now, self.signs0, strict=True)]).sum(0)
        signs = same.double() / sum(a[0].numel() for a in now)
        measured = {"signs": signs, **self.task.measure(outputs, self.seed)}
        for k, log in enumerate(self.logs):
            log.setdefault("step", []).append(float(step))
            for name, column in measured.items():
                log.setdefault(name, []).append(float(column[k]))

    def kept(self, index: list[int]) -> _Live:
        """Some of them."""
        at = torch.tensor(index, device=self.seed.device)
        runs, numbers, logs = (
            [self.runs[k] for k in index],
            [self.numbers[k] for k in index],
            [self.logs[k] for k in index],
        )
        stacks = self.stack.of(at), self.start.of(at)
        return _Live(self.of, self.task, runs, numbers, self.seed[at], *stacks, [v[at] for v in self.velocity], logs)

    def finished(self, k: int) -> Finished:
        """One of them, as it is now."""
        models = self.stack.network(k), self.start.network(k)
        return Finished(self.runs[k], self.logs[k], *models, self._probe()[k])
