"""Lemma 3.7 of Zhang et al. (2025): what a representation costs on another task, against the bound's two terms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.over_seeds import band, bound
from layerwise.experiments.zhang2025_head_to_head import PAPER
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream
from layerwise.studies import feature_learning as fl

if TYPE_CHECKING:
    import torch

    from layerwise.studies.feature_learning.problem import Problem, Task

DIRECTIONS = {"random": "turned anywhere", "top": "turned to the inputs' largest directions"}
CONSTANT = 2
"""The bound's C, as the proof's splitting gives it before concentration."""

SMALL = 0.1
"""Further out the refitted head makes up for part of what a representation is off in the inputs' largest directions."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The target task of Appendix F.1, with representations at known distances."""

    seeds: int = 2
    """Independent problems."""
    dist: tuple[float, ...] = (0.0, 0.01, 0.03, 0.1, 0.3)
    samples: tuple[int, ...] = (64, 256, 1024, 4096)
    """n, for the head's refit."""
    repeats: int = 10
    """Independent samples a point; the mean and the largest are recorded."""
    failure: float = 0.01
    """δ."""
    dx: int = 100
    dy: int = 15
    k: int = 8

    def problem(self, seed: int) -> Problem:
        """G⋆ and the tasks; the target's noise has standard deviation one."""
        from layerwise.studies.feature_learning.problem import draw_problem

        setting = fl.Setting(scale="trace", data="gaussian", dx=self.dx, dy=self.dy, k=self.k)
        return draw_problem(setting, stream(seed, "problem"))


def cells(config: Config) -> list[Cell]:
    """One a direction in which the representation is off."""
    return [Cell(key=name, options={"direction": name}) for name in DIRECTIONS]


def representation(problem: Problem, dist: float, direction: str, seed: int) -> torch.Tensor:
    """Rows cos θ G⋆ + sin θ V with sin θ = `dist` and V ⟂ G⋆: random, or from the largest eigenvectors of Σ."""
    import torch

    from layerwise.studies.feature_learning.population import tilted
    from layerwise.studies.feature_learning.two_layer import orthonormal_rows

    k = len(problem.G)
    if direction == "random":
        return tilted(problem.G, torch.full((k,), dist, dtype=torch.float64), stream(seed, "direction"))
    V = torch.linalg.eigh(problem.test.Sigma)[1][:, -k:].mT
    V = orthonormal_rows(V - (V @ problem.G.mT) @ problem.G)
    return math.sqrt(1 - dist**2) * problem.G + dist * V


def bound_terms(task: Task, dist: float, n: int, k: int, failure: float) -> tuple[float, float]:
    """Lemma 3.7's two terms: ‖F⋆‖²_F λ_max(Σ) dist² and σ² (dy k + log 1/δ) / n."""
    import torch

    dy = task.map.shape[0]
    # ‖F⋆G⋆‖_F = ‖F⋆‖_F, as G⋆ has orthonormal rows
    misfit = float(task.map.square().sum() * torch.linalg.eigvalsh(task.Sigma)[-1]) * dist**2
    return misfit, task.deviation**2 * (dy * k + math.log(1 / failure)) / n


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """For every distance and n the mean and largest excess over the repeats, beside the two terms."""
    from layerwise.studies.feature_learning.batch import draw_batch
    from layerwise.studies.feature_learning.measures import transfer_excess

    for seed in seeds:
        problem, columns = config.problem(seed), {name: [] for name in COLUMNS}
        for dist in config.dist:
            G = representation(problem, dist, cell.options["direction"], seed)
            for n in config.samples:
                excess = [
                    float(transfer_excess(G, draw_batch(problem.test, n, stream(seed, "refit", n, i)), problem.test))
                    for i in range(config.repeats)
                ]
                misfit, noise = bound_terms(problem.test, dist, n, config.k, config.failure)
                point = (dist, n, statistics.fmean(excess), max(excess), misfit, noise, max(excess) / (misfit + noise))
                for name, value in zip(COLUMNS, point, strict=True):
                    columns[name].append(value)
        yield Row(seed=seed, values={"worst": max(columns["over"])}, series=columns)


COLUMNS = ("dist", "n", "mean", "largest", "misfit", "noise", "over")
"""What is known of each point; "over" is the largest excess over the sum of the two terms."""


# --- Claims -------------------------------------------------------------------------------------------------


def claims(config: Config) -> list[Claim]:
    """The bound at every point, and that each of its terms is seen to scale as it says (which takes some repeats)."""
    return [*_bounds(config), *(_scalings(config) if config.repeats >= 10 else [])]


def _bounds(config: Config) -> list[Claim]:
    return [
        bound(
            cell,
            "worst",
            "<=",
            CONSTANT,
            f"The excess, {words}, is below {CONSTANT} times the two terms for every n and distance.",
            seeds=config.seeds,
            source="Lemma 3.7",
        )
        for cell, words in DIRECTIONS.items()
    ]


def _scalings(config: Config) -> list[Claim]:
    common = {"seeds": config.seeds, "source": "Lemma 3.7"}
    squares = [
        Claim(
            name=f"{cell}/square-of-distance",
            statement=f"The excess beyond noise, {words}, grows with the square of the distance: its exponent.",
            quantity=of_each(cell, lambda s: exponent(s, max(config.samples))),
            relation="within",
            target=(1.8, 2.2),
            **common,
        )
        for cell, words in DIRECTIONS.items()
    ]
    return [
        *squares,
        Claim(
            name="random/noise",
            statement="At distance 0 the excess is σ² dy k / (n − k − 1), the noise term: the worst ratio.",
            quantity=of_each("random", lambda s: noise_ratio(s, config)),
            relation="within",
            target=(0.7, 1.3),
            **common,
        ),
        Claim(
            name="top-over-random",
            statement="The factor λ_max(Σ) is needed: off in the largest directions costs three times off anywhere.",
            quantity=lambda records: _ratio(records, max(config.dist), max(config.samples)),
            relation=">=",
            target=3,
            **common,
        ),
    ]


def of_each(cell: str, function: Callable[[Mapping], float]) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """A claim's quantity: a function of the series of a cell."""
    return lambda records: {r["seed"]: function(r["series"]) for r in records if r["cell"] == cell}


def where(series: Mapping, column: str, **fixed: float | int) -> list[float]:
    """A column at the points that have the given values.

    >>> where({"dist": [0.0, 0.1], "n": [8, 8], "mean": [1.0, 2.0]}, "mean", dist=0.1)
    [2.0]
    """
    rows = range(len(series[column]))
    return [series[column][i] for i in rows if all(series[name][i] == value for name, value in fixed.items())]


def exponent(series: Mapping, n: int) -> float:
    """The exponent in the distance of the mean excess less that at distance 0, between the two largest up to SMALL.

    >>> round(exponent({"dist": [0.0, 0.05, 0.1], "n": [8, 8, 8], "mean": [1.0, 2.0, 5.0]}, 8), 6)
    2.0
    """
    mean = dict(zip(where(series, "dist", n=n), where(series, "mean", n=n), strict=True))
    low, high = sorted(dist for dist in mean if 0 < dist <= SMALL)[-2:]
    return math.log((mean[high] - mean[0.0]) / (mean[low] - mean[0.0])) / math.log(high / low)


def noise_ratio(series: Mapping, config: Config) -> float:
    """Mean excess at distance 0 over σ² dy k / (n − k − 1), exact for Gaussian inputs: the one furthest from 1."""
    pairs = zip(where(series, "n", dist=0.0), where(series, "mean", dist=0.0), strict=True)
    ratios = [mean * (n - config.k - 1) / (config.dy * config.k) for n, mean in pairs]
    return max(ratios, key=lambda ratio: abs(math.log(ratio)))


def _ratio(records: Sequence[Mapping], dist: float, n: int) -> dict[int, float]:
    top, random = (of_each(cell, lambda s: where(s, "mean", dist=dist, n=n)[0])(records) for cell in ("top", "random"))
    return {seed: top[seed] / random[seed] for seed in sorted(set(top) & set(random))}


# --- Figures ------------------------------------------------------------------------------------------------


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Excess by n, one line a distance, with the sum of the two terms dashed; one panel a direction."""
    panels = []
    for cell, words in DIRECTIONS.items():
        curves: list[Curve] = []
        for dist in config.dist:
            part = [_at(record, dist) for record in records if record["cell"] == cell]
            curves += [
                band(part, cell, "n", "mean", f"distance {dist:g}", "points"),
                band(part, cell, "n", "terms", f"bound, distance {dist:g}", "dashed"),
            ]
        panels.append(Panel(title=words, x_label="n", y_label="excess", x_scale="log", y_scale="log", curves=curves))
    return [
        Figure(
            name="transfer",
            title="Excess after the head's refit on another task",
            caption="Points: mean over repeats, median over seeds. Dashed: the sum of Lemma 3.7's two terms.",
            panels=panels,
        )
    ]


def _at(record: Record, dist: float) -> dict:
    """A record with the points of one distance, and the sum of the two terms."""
    columns = {name: where(record["series"], name, dist=dist) for name in COLUMNS}
    terms = [misfit + noise for misfit, noise in zip(columns["misfit"], columns["noise"], strict=True)]
    return {**record, "series": {**columns, "terms": terms}}


def _goes_together(config: Config) -> None:
    """Refuses sizes that are no problem."""
    fl.Setting(dx=config.dx, dy=config.dy, k=config.k)
    if config.dx < 2 * config.k or min(config.samples) < config.k:
        given = f"dx={config.dx}, k={config.k}, samples={config.samples}"
        raise InputError(describe(given, "dx ≥ 2k, and at least k samples for a head", "change them"))


EXPERIMENT = Experiment(
    name="transfer",
    title="Distance and samples decide the loss on another task",
    paper=PAPER,
    figure="Lemma 3.7",
    summary=(
        "The head is refitted to n samples of the target task with the representation as it is, at a known distance "
        "from G⋆. The expected excess is below C (‖F⋆‖² λ_max(Σ) dist² + σ² (dy k + log 1/δ)/n). The lemma states the "
        "raw squared error, its proof bounds this excess; the excess is measured. Representations are off in random "
        "directions, or in those where the inputs are largest, which shows that λ_max belongs into the bound."
    ),
    presets={
        "smoke": Config(seeds=1, dist=(0.0, 0.03, 0.1), samples=(64, 1024), repeats=3, dx=20, dy=6, k=3),
        "laptop": Config(),
        "paper": Config(seeds=5, samples=(64, 128, 256, 512, 1024, 2048, 4096, 16384), repeats=50),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop some ten seconds, paper six minutes",
    ranges={"dist": (0, 1), "failure": (1e-300, 1)},
    check=_goes_together,
)
