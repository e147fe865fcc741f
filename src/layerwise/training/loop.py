"""The one loop: a problem, any optimizer, a budget; measurements on schedules of their own."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream
from layerwise.training.metrics import Evaluation, Measure, State, moved
from layerwise.training.problem import Budget, Problem
from layerwise.training.recorder import Recorder
from layerwise.training.schedule import Every, Schedule

BUDGET, NOT_FINITE = "budget", "loss not finite"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came out of a training."""

    model: nn.Module
    optimizer: Optimizer
    recorder: Recorder
    steps: int
    epochs: int
    """Passes over the data that were finished before the last step."""
    seconds: float
    """Spent on training, measuring not counted."""
    stopped: str
    """"budget", or "loss not finite": then no step was made from that loss, and the model is as before it."""


class _NotFiniteError(Exception):
    """The loss before a step is NaN or infinite."""


def train(
    problem: Problem,
    optimizer: Callable[[nn.Module], Optimizer],
    *,
    seed: int = 0,
    budget: Budget | None = None,
    measures: Sequence[tuple[Schedule, Measure]] | None = None,
    recorder: Recorder | None = None,
    scheduler: Callable[[Optimizer], Any] | None = None,
    device: torch.device | str = "cpu",
) -> Trained:
    """Train a problem with an optimizer until its budget is spent.

    Every step is ``optimizer.step(closure)``, so that optimizers which ask for the loss again (L-BFGS, adaptive
    damping) need nothing else. The loss of the batch before each measured step is recorded as "train/batch_loss".

    Args:
        problem: model, data, likelihood.
        optimizer: from a model to its optimizer, such as ``lambda model: lw.optim.KFAC(model, lr=1e-2)``.
        seed: of the model, the order of the data and dropout; the same seed gives the same training on one machine.
        budget: instead of the problem's.
        measures: what is measured when; None evaluates the split "test" every 100 steps. Step 0 is before the first
            update; the last step is always measured.
        recorder: where numbers go; give one with sinks, such as `TensorBoard`.
        scheduler: from an optimizer to a learning-rate scheduler, stepped after every step.
        device: where to train.

    >>> x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    >>> from layerwise.training import accuracy, tensor_batches
    >>> data = {"train": (x, (x[:, 0] > 0).long()), "test": (x, (x[:, 0] > 0).long())}
    >>> problem = Problem(name="sign", model=lambda seed: nn.Linear(5, 2), metrics={"accuracy": accuracy},
    ...                   batches=tensor_batches(data, batch_size=16), budget=Budget(epochs=20))
    >>> done = train(problem, lambda model: torch.optim.SGD(model.parameters(), lr=0.5))
    >>> done.steps, done.recorder.last()["test/accuracy"] > 0.9
    (80, True)
    """
    budget = problem.budget if budget is None else budget
    recorder = Recorder() if recorder is None else recorder
    measures = ((Every(100), Evaluation("test")),) if measures is None else measures
    place = torch.device(device)
    with seeded(seed, place):
        model = problem.model(seed).to(place)
        run = _Run(problem, model, optimizer(model), seed, place, measures, recorder)
        run.measure(last=budget.spent(steps=0, epochs=0, seconds=0.0))
        steps = None if scheduler is None else scheduler(run.optimizer)
        stopped = run.until_spent(budget, steps)
        run.measure(last=True)
    return Trained(
        model=model,
        optimizer=run.optimizer,
        recorder=recorder,
        steps=run.step,
        epochs=run.epoch,
        seconds=run.seconds,
        stopped=stopped,
    )


class _Run:
    """A training under way."""

    def __init__(
        self,
        problem: Problem,
        model: nn.Module,
        optimizer: Optimizer,
        seed: int,
        device: torch.device,
        measures: Sequence[tuple[Schedule, Measure]],
        recorder: Recorder,
    ) -> None:
        self.problem, self.model, self.optimizer, self.seed, self.device = problem, model, optimizer, seed, device
        self.measures, self.recorder = measures, recorder
        self.step = self.epoch = 0
        self.seconds = 0.0
        self._measured: tuple[int, set[int]] = (-1, set())
        self._loss = math.nan

    def until_spent(self, budget: Budget, scheduler: Any) -> str:
        """Step until the budget is spent or the loss is not finite; which of them."""
        self.model.train()
        while not self._spent(budget):
            before = self.step
            passes = self.problem.batches("train", order_seed(self.seed, self.epoch))
            start = time.perf_counter()
            for x, y in passes:
                try:
                    self._update(moved(x, self.device), moved(y, self.device))
                except _NotFiniteError:
                    self.recorder.add(self.step, {"train/batch_loss": self._loss})
                    return NOT_FINITE
                if scheduler is not None:
                    scheduler.step()
                self.step += 1
                self.seconds += time.perf_counter() - start
                if self._spent(budget):
                    break
                self.measure()
                start = time.perf_counter()
            else:
                self.epoch += 1
            if self.step == before:
                raise InputError(
                    describe(
                        f"problem {self.problem.name!r}, whose split 'train' gave no batch in pass {self.epoch}",
                        "at least one batch a pass",
                        "make `batches` return a fresh iterable at every call",
                    )
                )
        return BUDGET

    def _spent(self, budget: Budget) -> bool:
        return budget.spent(steps=self.step, epochs=self.epoch, seconds=self.seconds)

    def _update(self, x: Any, y: Any) -> None:
        calls = 0

        def closure() -> Any:
            nonlocal calls
            self.optimizer.zero_grad()
            loss = self.problem.loss(self.model(x), y)
            if calls == 0:  # a line search may try points where the loss is not finite
                self._loss = float(loss.detach())
                if not math.isfinite(self._loss):
                    raise _NotFiniteError
            calls += 1
            loss.backward()
            return loss

        self.optimizer.step(closure)

    def measure(self, last: bool = False) -> None:
        """Measure what is due at this step (at the last step: everything), nothing twice."""
        if self._measured[0] != self.step:
            self._measured = (self.step, set())
        done = self._measured[1]
        due = [
            k for k, (schedule, _) in enumerate(self.measures) if k not in done and (last or schedule.due(self.step))
        ]
        if not due:
            return
        done.update(due)
        state = State(
            step=self.step,
            epoch=self.epoch,
            seconds=self.seconds,
            model=self.model,
            optimizer=self.optimizer,
            problem=self.problem,
            seed=self.seed,
            device=self.device,
        )
        values: dict[str, float] = {} if self.step == 0 else {"train/batch_loss": self._loss}
        with _random_state_kept(self.device):
            for k in due:
                values |= self.measures[k][1](state)
        self.recorder.add(self.step, values)


def order_seed(seed: int, epoch: int) -> int:
    """What `Problem.batches` is given for a pass over the training data."""
    return stream(seed, "pass", epoch).initial_seed()


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's own random state set from the seed; afterwards it is what it was."""
    with _random_state_kept(device):
        drawn = stream(seed, "training").initial_seed()
        torch.default_generator.manual_seed(drawn)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(drawn)
        yield
