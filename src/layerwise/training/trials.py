"""`Trial`: one training with some options on a seed, and whether it counts as diverged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from layerwise.foundations.errors import InputError, NumericalError, describe
from layerwise.training.loop import BUDGET, train
from layerwise.training.metrics import Evaluation, Measure, State
from layerwise.training.problem import Budget, Problem
from layerwise.training.schedule import Every, Schedule

ABOVE = "training loss above that before training"
Options = Mapping[str, float | int]
Run = tuple[Options, int]
"""Options and a seed."""
NUMERICAL = (NumericalError, torch.linalg.LinAlgError)  # pyright: ignore[reportPrivateImportUsage]
"""Errors that count as a divergence."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training."""

    options: Options
    seed: int
    score: float | int
    """What is to be small, at the end; infinite where the run diverged."""
    diverged: str = ""
    """Why it counts as diverged: the training loss was not finite, or ended above where it began, or an error."""
    series: Mapping[str, Sequence[float | int]] = field(default_factory=dict)
    """The score by "step" and by "seconds" of training."""

    @classmethod
    def failed(cls, run: Run, error: Exception) -> Trial:
        """A run that ended with an error of the numbers."""
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return cls(options=run[0], seed=run[1], score=math.inf, diverged=why)

    @classmethod
    def judged(cls, run: Run, stopped: str, score: str, found: Mapping[str, Sequence[float | int]]) -> Trial:
        """From why the training stopped, and series of "step", "seconds", "train/loss" and the score."""
        loss, last = found["train/loss"], found[score][-1]
        why = "" if stopped == BUDGET else stopped
        if not why and not loss[-1] <= loss[0]:  # NaN too
            why = ABOVE
        elif not why and math.isnan(last):
            why = f"{score} is NaN"
        series = {name: found[name] for name in ("step", "seconds", score)}
        options, seed = run
        return cls(options=options, seed=seed, score=math.inf if why else last, diverged=why, series=series)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Trains with some options on a seed; an object, so that another process can be given it."""

    problem: Problem
    make: Callable[..., Optimizer]
    """From the model and options by name."""
    score: str
    """A split and a metric, such as "train/loss"."""
    every: int
    budget: Budget | None = None
    device: torch.device | str = "cpu"

    def splits(self) -> tuple[str, ...]:
        """Those that are evaluated: the score's, and "train", which tells divergence."""
        split, _, metric = self.score.partition("/")
        known = ("loss", *self.problem.metrics)
        if metric not in known:
            names = ", ".join(f"{split or 'train'}/{name}" for name in known)
            raise InputError(describe(f"score={self.score!r}", f"a split and a metric, such as {names}", "name one"))
        return tuple(dict.fromkeys((split, "train")))

    def __call__(self, run: Run) -> Trial:
        """One training."""
        options, seed = run
        when = Every(self.every)
        measures: list[tuple[Schedule, Measure]] = [(when, Evaluation(name)) for name in self.splits()]
        measures.append((when, _seconds))
        try:
            trained = train(
                self.problem,
                lambda model: self.make(model, **options),
                seed=seed,
                budget=self.budget,
                measures=measures,
                device=self.device,
            )
        except NUMERICAL as error:
            return Trial.failed(run, error)
        return Trial.judged(run, trained.stopped, self.score, trained.recorder.series())


def _seconds(state: State) -> dict[str, Any]:
    return {"seconds": state.seconds}
