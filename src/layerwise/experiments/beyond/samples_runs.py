"""The runs of experiment `samples`: configuration, cells, and one row a seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from layerwise.experiments.experiment import Cell, Row
from layerwise.experiments.progress import within_cell
from layerwise.foundations.errors import InputError, describe
from layerwise.studies import feature_learning as fl
from layerwise.studies.feature_learning.members import member
from layerwise.studies.feature_learning.sample_budget import FIRST, Recovery
from layerwise.theory.sample_complexity import best_damping, samples_needed
from layerwise.theory.single_index import HermiteConstants, two_level_spectrum

STEPS, LIMITS, BOUNDARY = "steps", "limits", "boundary"
DAMPINGS: dict[str, float | None] = {"sgd": math.inf, "kfac": 1e-6, "damped": 0.3, "best": None}
"""Methods of one step, by their λ; None is the best λ at each n."""
SIMULATED = ("sgd", "kfac", "best")
LINK = HermiteConstants(c1=1.0, cs2=2.0, cperp2=1.0, variance=1.0)
"""Of the single-index problem's σ⋆, the sum of the first two Hermite polynomials, at mean eigenvalue one."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Many steps on a linear representation, and one step on a single-index problem."""

    seeds: int = 2
    """Independent problems."""
    conditions: tuple[float, ...] = (1.0, 10.0, 1e2, 1e3, 1e4)
    """Condition numbers κ of the inputs' covariance, rising from one."""
    members: tuple[str, ...] = tuple(FIRST)
    rates: int = 5
    """Rates for each member, over two decades."""
    steps: int = 300
    """The budget of a run."""
    distance: float = 0.3
    """δ."""
    dx: int = 24
    batch: int = 128
    batches: tuple[int, ...] = (128, 512)
    """Batches at which KFAC is run at the largest κ with each of the dampings."""
    dampings: tuple[float, ...] = (1e-4, 1e-6, 1e-8)
    rate: float = 0.3162
    """KFAC's rate there."""
    correlation: float = 0.8
    """The target of one step."""
    anisotropies: tuple[float, ...] = (0.0, 0.3, 0.6, 0.9)
    """e of eq. (14)."""
    factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Numbers of samples simulated, over the predicted boundary."""
    many: float = 50.0
    """n/dx simulated (times the factors) where the boundary is ∞."""
    trials: int = 10
    """Single-index trials averaged for each seed."""
    index_dx: int = 100
    dh: int = 100

    def __post_init__(self) -> None:
        for name in self.members:
            member(name)  # refuses a name that is none
        if self.conditions[:1] != (1,) or not _rising(self.conditions):
            raise InputError(describe(f"conditions={self.conditions}", "1 and larger ones, rising", "pass 1 100 10000"))
        for name in ("batches", "dampings", "factors"):
            if len(set(getattr(self, name))) < 2:
                given = f"{name}={getattr(self, name)}"
                raise InputError(describe(given, "at least two, to be compared", "see the defaults of Config"))
        if min(self.rates, self.trials, len(self.members), len(self.anisotropies)) < 1:
            given = f"{self.rates} rates, {self.trials} trials, members {self.members}, e of {self.anisotropies}"
            raise InputError(describe(given, "at least one of each", "see the defaults of Config"))
        self.recovery(self.conditions[-1])  # refuses what is no problem

    @property
    def beyond(self) -> int:
        """Samples that a member needs at least where it is recorded to need ∞."""
        return self.recovery(1.0).beyond

    def recovery(self, condition: float, batch: int | None = None) -> Recovery:
        """The linear problem at a condition number."""
        sizes = {"dx": self.dx, "batch": batch or self.batch, "steps": self.steps, "distance": self.distance}
        return Recovery(condition=condition, **sizes)

    def boundary(self, method: str, e: float) -> float:
        """The predicted n/dx of a method of one step."""
        return _boundary_of(self.correlation, method, e)


@cache
def _boundary_of(correlation: float, method: str, e: float) -> float:
    """Kept, since every preset has claims about the same boundaries, and each takes a search."""
    levels, weights = two_level_spectrum(e)
    common = {"noise": 1.0, "eigenvalues": levels, "weights": weights}
    return samples_needed(correlation, LINK, damping=DAMPINGS[method], **common)


def _rising(values: Sequence[float]) -> bool:
    return len(values) > 1 and all(a < b for a, b in pairwise(values))


def ratio(above: float | int, below: float | int) -> float:
    """above/below of two needs; NaN where it says nothing: ∞/∞, or a need of no samples at all.

    >>> ratio(6.0, 3.0), ratio(math.inf, 3.0), ratio(3.0, 0.0)
    (2.0, inf, nan)
    """
    return above / below if below else math.nan


def cells(config: Config) -> list[Cell]:
    """Many steps by member; what limits KFAC; one step."""
    return [Cell(key=STEPS), Cell(key=LIMITS), Cell(key=BOUNDARY)]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed."""
    one = {STEPS: _steps, LIMITS: _limits, BOUNDARY: _boundary}[cell.key]
    for seed in seeds:
        yield one(config, seed)


def _steps(config: Config, seed: int) -> Row:
    """Samples needed by member and κ, how they grow, and distances by samples at the largest κ."""
    from layerwise.studies.feature_learning import samples
    from layerwise.studies.feature_learning.reduced_rank import least_squares_needed

    values: dict[str, float | int] = {}
    used = [config.batch * step for step in range(config.steps + 1)]
    series: dict[str, list[float | int]] = {"samples": list(used)}
    pairs = [(name, condition) for name in config.members for condition in config.conditions]
    for name, condition in within_cell().track(pairs, "members and condition numbers", len(pairs)):
        tried = samples.rates(name, config.rates)
        found = samples.search(config.recovery(condition), member(name), seed, tried)
        key = f"{name}@{condition:g}"
        values |= {key: found.best.needed, f"{key}/rate": found.rate, f"{key}/place": found.place}
        if condition == config.conditions[-1]:
            missing = len(used) - len(found.best.dist)
            series[f"{name}/dist"] = [*found.best.dist, *[math.nan] * missing]
    for condition in config.conditions:
        values[f"least-squares@{condition:g}"] = least_squares_needed(config.recovery(condition), seed)
    for name in (*config.members, "least-squares"):
        needed = [values[f"{name}@{condition:g}"] for condition in config.conditions]
        late = [i for i, condition in enumerate(config.conditions) if condition >= 100]
        values[f"{name}/growth"] = samples.growth(config.conditions, needed)
        values[f"{name}/late"] = samples.growth([config.conditions[i] for i in late], [needed[i] for i in late])
        values[f"{name}/factor"] = ratio(needed[-1], needed[0])
    return Row(seed=seed, values=values, series=series)


def _limits(config: Config, seed: int) -> Row:
    """Steps that KFAC needs at the largest κ, by batch and damping."""
    from layerwise.studies.feature_learning import samples

    values: dict[str, float] = {}
    series: dict[str, list[float | int]] = {"damping": list(config.dampings)}
    for batch in config.batches:
        setting = config.recovery(config.conditions[-1], batch)
        runs = [samples.descend(setting, samples.damped_kfac(d), config.rate, seed) for d in config.dampings]
        series[f"steps@{batch}"] = [run.needed / batch for run in runs]
        values |= {f"steps@{batch}/{d:g}": run.needed / batch for d, run in zip(config.dampings, runs, strict=True)}
    return Row(seed=seed, values=values, series=series)


def _boundary(config: Config, seed: int) -> Row:
    """Correlations around the predicted boundary: for each e and factor, the mean over trials, and the theory."""
    points = [(e, factor) for e in config.anisotropies for factor in config.factors]
    series: dict[str, list[float | int]] = {"e": [e for e, _ in points], "factor": [f for _, f in points]}
    for method in SIMULATED:
        predicted = {e: config.boundary(method, e) for e in config.anisotropies}
        rows = []
        for e, factor in within_cell().track(points, f"one step, {method}", len(points)):
            per = factor * (predicted[e] if math.isfinite(predicted[e]) else config.many)
            rows.append((predicted[e], *_one_step(config, method, e, round(per * config.index_dx), seed)))
        names = ("boundary", "n", "found", "learned", "theory")
        series |= {
            f"{method}/{name}": list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)
        }
    return Row(seed=seed, values={}, series=series)


def _one_step(config: Config, method: str, e: float, n: int, seed: int) -> tuple[float, float, float, float]:
    """n/dx, and the correlation of the estimator, of the learned direction (means over trials) and of the lemma."""
    setting = fl.SingleIndex(dx=config.index_dx, n=n, dh=config.dh, anisotropy=e, noise=1.0)
    damping = DAMPINGS[method]
    if damping is None:
        damping = best_damping(LINK, noise=1.0, ratio=config.index_dx / n)
    dampings = [] if math.isinf(damping) else [damping]
    trials = [fl.correlations(setting, seed * config.trials + trial, dampings) for trial in range(config.trials)]
    estimator = sum(float(found.estimator[-1]) for found in trials) / config.trials
    learned = sum(float(found.learned[-1]) for found in trials) / config.trials
    return n / config.index_dx, estimator, learned, float(fl.predicted_correlations(setting, dampings)[-1])
