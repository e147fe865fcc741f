"""`search`: the options of an optimizer, chosen by as many trials as every other method gets."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream
from layerwise.training.loop import seeded
from layerwise.training.problem import Budget, Problem
from layerwise.training.stacked import StackedTrainer
from layerwise.training.trial_file import TrialFile
from layerwise.training.trials import Options, Run, Trainer, Trial


@dataclass(frozen=True, kw_only=True)
class Method:
    """An optimizer and what is searched over."""

    name: str
    make: Callable[..., Optimizer]
    """Called with the model and, by name, one value of each entry of `grid` and all of `fixed`."""
    grid: Mapping[str, Sequence[float | int]]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in self.grid.items():
            numbers = all(isinstance(value, int | float) and math.isfinite(value) for value in values)
            if not values or not numbers or len(set(values)) < len(values):
                given = f"grid of {self.name!r} with {name}={tuple(values)}"
                raise InputError(describe(given, "finite numbers, each once", "give others in `fixed`, or to `make`"))
        if not self.grid:
            raise InputError(
                describe(
                    f"an empty grid of {self.name!r}",
                    'options and their values, such as {"lr": (0.1, 0.01)}',
                    "give one",
                )
            )

    def points(self) -> list[dict[str, float | int]]:
        """Every combination of the grid's values."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]

    def near(self, point: Options, generator: torch.Generator) -> dict[str, float | int]:
        """A random draw within half a step of the grid on either side of one of its points, never outside the grid.

        Steps are ratios where all values are positive, else differences; whole numbers stay whole, and True and False
        as they are.
        """
        return {name: _near(value, sorted(self.grid[name]), generator) for name, value in point.items()}

    def draws(self, point: Options, count: int, seed: int, stacked: str | None = None) -> list[dict[str, float | int]]:
        """Random draws around a point; with a rate that is `stacked`, several rates for each draw of the others."""
        together = 1 if stacked is None else len(self.grid[stacked])
        found = []
        for k in range(count):
            drawn = self.near(point, stream(seed, "draw", self.name, k))
            alike = self.near(point, stream(seed, "draw", self.name, k - k % together))
            found.append(drawn if stacked is None else {**alike, stacked: drawn[stacked]})
        return found

    def at_edge(self, point: Options) -> tuple[str, ...]:
        """Options whose value is the smallest or largest of several: the grid may be too small there."""
        several = {name: values for name, values in self.grid.items() if len(values) > 1}
        return tuple(name for name, values in several.items() if point[name] in (min(values), max(values)))


def _near(value: float | int, values: Sequence[float | int], generator: torch.Generator) -> float | int:
    u = float(torch.rand((), generator=generator, dtype=torch.float64))
    if isinstance(value, bool):
        return value
    place = values.index(value)
    below, above = values[max(place - 1, 0)], values[min(place + 1, len(values) - 1)]
    if values[0] > 0:
        low, high = math.sqrt(below * value), math.sqrt(above * value)
        drawn = low * (high / low) ** u
    else:
        low, high = (below + value) / 2, (above + value) / 2
        drawn = low + (high - low) * u
    return round(drawn) if all(isinstance(v, int) for v in values) else drawn


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a search found; `trials` is everything that was tried."""

    method: str
    trials: tuple[Trial, ...]
    options: Options | None
    """Those of the least mean score over seeds; None where a seed diverged for all options."""
    at_edge: tuple[str, ...]
    """Options whose best value on the grid is its smallest or largest."""
    reported: tuple[Trial, ...] = ()
    """The chosen options on seeds that had no part in the choice."""

    def require(self) -> Choice:
        """Itself; an error where no options trained."""
        if self.options is None:
            reasons = sorted({trial.diverged for trial in self.trials})
            raise InputError(
                describe(
                    f"a search for {self.method!r} in which a run of every one of "
                    f"{len(self.tried())} options diverged ({'; '.join(reasons)[:200]})",
                    "options with finite runs",
                    "search over smaller rates, or larger damping",
                )
            )
        return self

    def tried(self) -> list[Options]:
        """All options, in the order of their trials."""
        return [dict(key) for key in dict.fromkeys(tuple(trial.options.items()) for trial in self.trials)]

    def score_of(self, options: Options) -> float:
        """The mean over seeds; infinite where one of them diverged."""
        return statistics.fmean(trial.score for trial in self.trials if trial.options == options)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record: the choice, and options, scores and reasons of every trial."""
        tried = [
            {"options": dict(t.options), "seed": t.seed, "score": t.score, "diverged": t.diverged} for t in self.trials
        ]
        chosen = None if self.options is None else dict(self.options)
        return {"method": self.method, "options": chosen, "at_edge": list(self.at_edge), "trials": tried}


def search(
    problem: Problem,
    method: Method,
    *,
    trials: int,
    seeds: Sequence[int] = (0, 1),
    fresh: Sequence[int] = (),
    score: str = "train/loss",
    every: int = 100,
    budget: Budget | None = None,
    device: torch.device | str = "cpu",
    draws_seed: int = 0,
    stacked: str | None = None,
    keep: Path | str | None = None,
    map: Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]] = map,
) -> Choice:
    """Try the grid, then random draws around its best point, and train the best options on fresh seeds.

    Options are ranked by the mean of the score over `seeds`; options with a seed that diverged come last. Give every
    method of a comparison the same `trials`: a method with a smaller grid gets more draws.

    Args:
        problem: what is trained.
        method: the optimizer and its grid.
        trials: options that are tried, those of the grid included.
        seeds: by which options are chosen.
        fresh: seeds that the chosen options are trained on for the report; none of `seeds` may be among them.
        score: a split and a metric of the problem, such as "train/loss" or "test/error"; less is better.
        every: steps between two entries of a trial's series.
        budget: instead of the problem's.
        device: where to train.
        draws_seed: of the random draws.
        stacked: the name of the rate, such as "lr", where runs that differ only in it and in their seed are to be
            trained as one tensor program (`training.stacked`: fully connected networks). Random draws then
            share the other options, as many rates to each draw of them as the grid has. Fresh seeds are trained alone.
        keep: a file for finished trials; called again with the same file, the search goes on where it stopped.
        map: as Python's; runs trials elsewhere, such as ``ProcessPoolExecutor().map`` (problem and
            method must then be picklable: no lambdas).

    >>> from layerwise.training import tensor_batches
    >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    >>> data = {"train": (x, x.sum(1, keepdim=True))}
    >>> problem = Problem(name="line", model=lambda seed: torch.nn.Linear(3, 1), likelihood="gaussian",
    ...                   batches=tensor_batches(data, batch_size=16), budget=Budget(epochs=3))
    >>> sgd = Method(name="SGD", grid={"lr": (1e-3, 1e-2, 0.1, 10.0)},
    ...              make=lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr))
    >>> found = search(problem, sgd, trials=6, seeds=(0,), fresh=(7,))
    >>> len(found.tried()), 0.02 < found.options["lr"] < 1, found.at_edge, len(found.reported)
    (6, True, (), 1)
    """
    points = method.points()
    if trials < len(points):
        given = f"trials={trials} for {method.name!r}, whose grid has {len(points)} points"
        raise InputError(describe(given, "at least one trial a point", "give more trials or a smaller grid"))
    if trials > len(points) and all(len(values) == 1 for values in method.grid.values()):
        given = f"trials={trials} for {method.name!r}, whose grid has a single point"
        raise InputError(describe(given, "two values of an option, between which to draw", "give a larger grid"))
    every_seed = [*seeds, *fresh]
    if not seeds or len(set(every_seed)) < len(every_seed):
        given = f"seeds={tuple(seeds)} and fresh={tuple(fresh)}"
        raise InputError(describe(given, "some seeds, and fresh ones that are not among them, each once", "change one"))
    if stacked is not None and stacked not in method.grid:
        given = f"stacked={stacked!r} for {method.name!r}"
        raise InputError(describe(given, f"an option of its grid: {', '.join(method.grid)}", "name its rate"))
    make = functools.partial(method.make, **method.fixed)
    alone = Trainer(problem=problem, make=make, score=score, every=every, budget=budget, device=device)

    kept = None if keep is None else TrialFile(keep, _about(alone, method, seeds[0]))

    def trained(some: Sequence[Options], on: Sequence[int], stacked: str | None) -> tuple[Trial, ...]:
        runs = [(options, seed) for options in some for seed in on]
        found = {k: trial for k, run in enumerate(runs) if kept is not None and (trial := kept.get(run)) is not None}
        missing = [k for k in range(len(runs)) if k not in found]
        for k, trial in _results(alone, stacked, runs, missing, map):
            found[k] = trial if kept is None else kept.add(trial)
        return tuple(found[k] for k in range(len(runs)))

    def tried(some: Sequence[Options]) -> tuple[Trial, ...]:
        return trained(some, seeds, stacked)

    found = Choice(method=method.name, trials=tried(points), options=None, at_edge=())
    best = min(points, key=found.score_of)  # where all diverge: the first
    draws = method.draws(best, trials - len(points), draws_seed, stacked)
    found = Choice(method=method.name, trials=found.trials + tried(draws), options=None, at_edge=())
    chosen = min([*points, *draws], key=found.score_of)
    if not math.isfinite(found.score_of(chosen)):
        return found
    return Choice(
        method=method.name,
        trials=found.trials,
        options=chosen,
        at_edge=method.at_edge(best),
        reported=trained([chosen], fresh, None),
    )


def _about(trainer: Trainer, method: Method, seed: int) -> dict[str, str]:
    """What tells one search from another: options, and digests of a first batch and of a fresh model's weights."""
    with seeded(seed, torch.device("cpu")):
        model = trainer.problem.model(seed)
    x, y = next(iter(trainer.problem.batches("train", seed)))
    tensors = [*model.state_dict().values(), *(part for part in (x, y) if isinstance(part, torch.Tensor))]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().double().numpy().tobytes())
    fixed = {name: getattr(value, "__qualname__", repr(value)) for name, value in method.fixed.items()}
    make = getattr(method.make, "__qualname__", type(method.make).__qualname__)
    return {
        "problem": trainer.problem.name,
        "likelihood": str(trainer.problem.likelihood),
        "data": digest.hexdigest()[:16],
        "method": f"{method.name}: {make} of {', '.join(method.grid)}, {fixed}",
        "score": f"{trainer.score} every {trainer.every} steps",
        "budget": repr(trainer.budget or trainer.problem.budget),
        "device": str(trainer.device),
    }


def _results(
    alone: Trainer, stacked: str | None, runs: Sequence[Run], places: Sequence[int], map: Callable
) -> Iterator[tuple[int, Trial]]:
    """The trials of runs at some places, as they come."""
    if stacked is None:
        yield from zip(places, map(alone, [runs[k] for k in places]), strict=True)
        return
    groups: dict[tuple, list[int]] = {}
    for k in places:
        groups.setdefault(tuple((n, v) for n, v in runs[k][0].items() if n != stacked), []).append(k)
    trainer = StackedTrainer(one=alone, rate=stacked)
    found = map(trainer, [[runs[k] for k in group] for group in groups.values()])
    for group, trials in zip(groups.values(), found, strict=True):
        yield from zip(group, trials, strict=True)
