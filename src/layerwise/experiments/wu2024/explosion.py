"""Theorem 5.3.1 of Wu (2023): the naive meta-gradient explodes or vanishes, exponentially in the number of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.over_seeds import POSITIVE, band, bound, distinct
from layerwise.experiments.wu2024 import PAPER
from layerwise.foundations.errors import InputError, describe

CELL = "naive objective"
ROUNDING = 1 - 1e-9
"""Bounds are met with equality where one eigenvalue decides; they are compared to this relative tolerance."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Random quadratics, and the step sizes at which derivatives are taken."""

    seeds: int = 3
    """Sets of problems."""
    problems: int = 20
    """Of one seed."""
    dim: int = 20
    steps: tuple[int, ...] = (10, 20, 40, 80)
    exploding: float | int = 0.1
    """A step size above 2/L."""
    vanishing: float | int = 0.6
    """A step size below 2/L for eigenvalues between 1 and 2."""
    bounded_steps: tuple[int, ...] = (5, 10, 40)
    etas: int = 60
    """Step sizes at which the bounds are checked."""


def check(config: Config) -> None:
    """What has no slope, or is no step size of its kind."""
    if len(set(config.steps)) < 2:
        raise InputError(describe(f"steps={config.steps}", "two or more numbers of steps", "pass e.g. --steps 10 20"))
    if config.vanishing >= 1:
        raise InputError(describe(f"vanishing={config.vanishing}", "a step size below 2/L = 1", "take e.g. 0.6"))


def cells(config: Config) -> list[Cell]:
    """One."""
    return [Cell(key=CELL)]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Slopes of all problems, and margins of the bounds."""
    import math

    from layerwise.studies.learning_to_learn import quadratic as study

    for seed in seeds:
        problem = study.problems([seed], config.problems, config.dim)
        mild = study.well_conditioned([seed], config.problems, config.dim)
        values: dict[str, float] = {}
        series: dict[str, list] = {"steps": list(config.steps)}
        for name, of, eta in (("exploding", problem, config.exploding), ("vanishing", mild, config.vanishing)):
            ratio = study.slope_in_steps(of, eta, config.steps) / study.predicted_slope(of, eta)
            values[f"{name}/slope"] = (ratio - 1).abs().max().item()
            logs = [of.naive_log_gradient(eta, t).logabs / math.log(10) for t in config.steps]
            series[name] = [log.median().item() for log in logs]
            series[f"{name}/log"] = [of.gradient(eta, t).abs().log10().median().item() for t in config.steps]
        values |= study.margins(problem, config.bounded_steps, config.etas)._asdict()
        values["first"] = problem.naive_log_gradient(config.exploding, 10).logabs[0].item()
        yield Row(seed=seed, values=values, series=series)


def claims(config: Config) -> list[Claim]:
    """Slopes, and the bounds of section 5.3."""
    common: dict[str, Any] = {"seeds": config.seeds, "origin": "paper", "span": POSITIVE}
    slope = (
        "log₁₀ of the derivative {} linearly in t, with the slope 2 log₁₀ max|1 − ηλ| (largest relative difference)."
    )
    bounds = {
        "vanishing": ("Theorem 5.3.1", "|F'| ≤ tL² max(|1 − ηα|, |1 − ηL|)^(2t−1) for η < 2/L"),
        "explosion": ("Theorem 5.3.1", "|F'| ≥ c₁²L²t(ηL − 1)^(2t−1) − L²t for η > 2/L"),
        "log": ("Claim 5.3.5", "The log objective has |F'| ≤ 4L³/(c_min² α(L − α)) for every η"),
        "log_floor": ("Claim 5.3.6", "The log objective has |F'| ≥ 2ε c_min² min(α³/L, 1/M²) outside of η* ± ε"),
    }
    return [
        bound(
            CELL,
            "exploding/slope",
            "<=",
            0.05,
            f"At η = {config.exploding:g} {slope.format('grows')}",
            source="Theorem 5.3.1",
            note="Stated beforehand; seeds 100 to 102: at most .032.",
            **common,
        ),
        bound(
            CELL,
            "vanishing/slope",
            "<=",
            0.05,
            f"At η = {config.vanishing:g} and eigenvalues from 1 to 2 {slope.format('falls')}",
            source="Theorem 5.3.1",
            note="The random problems have so small an α that their derivative hardly vanishes; hence these.",
            **common,
        ),
        *(
            bound(CELL, name, ">=", ROUNDING, f"{text} (least margin, a factor).", source=source, **common)
            for name, (source, text) in bounds.items()
        ),
        distinct(CELL, "first", "Seeds have problems of their own.", seeds=1),
    ]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Magnitudes of both derivatives over the number of steps."""
    panels = [
        Panel(
            title=title,
            x_label="inner steps t",
            y_label="log₁₀ |F'|",
            curves=[
                band(records, CELL, "steps", name, "f(w_t)"),
                band(records, CELL, "steps", f"{name}/log", "log f(w_t) / t"),
            ],
        )
        for name, title in (
            ("exploding", f"random problems, η = {config.exploding:g}"),
            ("vanishing", f"eigenvalues from 1 to 2, η = {config.vanishing:g}"),
        )
    ]
    caption = f"Median over {config.problems} problems; over seeds the median, and a band that spans all."
    return [Figure(name="explosion", title="Derivatives of two meta-objectives", caption=caption, panels=panels)]


EXPERIMENT = Experiment(
    name="explosion",
    title="The naive meta-gradient explodes or vanishes; that of the logarithm does not",
    paper=PAPER,
    figure="Theorems 5.3.1 and 5.3.2, Claims 5.3.5 and 5.3.6",
    summary=(
        "The derivative in η of f(w_t) and of log f(w_t)/t, after t steps of gradient descent on quadratics. Above 2/L "
        "the first grows exponentially in t, below it falls exponentially; the second is bounded. All four bounds of "
        "section 5.3 are compared with the derivative itself."
    ),
    presets={
        "smoke": Config(seeds=2, problems=4, etas=20),
        "laptop": Config(),
        "paper": Config(seeds=10, etas=100),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop five seconds, paper twenty",
    check=check,
)
