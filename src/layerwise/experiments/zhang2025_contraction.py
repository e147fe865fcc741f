"""Theorem 3.6 of Zhang et al. (2025): KFAC contracts by 1 − η a step whatever the conditioning; the others do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.over_seeds import band, bound
from layerwise.experiments.zhang2025_head_to_head import PAPER
from layerwise.foundations.errors import InputError, describe, unknown
from layerwise.foundations.random import stream
from layerwise.studies import feature_learning as fl

if TYPE_CHECKING:
    import torch

    from layerwise.studies.feature_learning.problem import Task

LABELS = {"kfac": "KFAC", "dfw": "DFW", "amgd": "AMGD", "sgd": "SGD"}
INPUTS = {
    "isotropic": None,
    "low": {"anisotropy": "low", "repair": "scaled", "scale": "trace"},
    "high": {"anisotropy": "high", "scale": "trace"},
}
"""Readings of Σ; None is the identity."""
START = 1e-5
"""Distance at the start: near G⋆, though outside the basin that the proof needs for large κ(F⋆)κ(Σ)."""
RESOLVED = 5e-9
"""Ratios of smaller distances would be of rounding errors, which κ(F⋆)κ(Σ) magnifies up to 1e7-fold."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Labels without noise, fresh samples at every step, heads with singular values from 1 down to 1/κ."""

    seeds: int = 1
    """Independent problems."""
    inputs: tuple[str, ...] = ("isotropic", "high")
    conditions: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0)
    """κ(F⋆)."""
    kfac_rates: tuple[float, ...] = (0.1, 0.5, 0.9)
    fractions: tuple[float, ...] = (0.03, 0.1, 0.25, 0.5, 1.0, 1.5)
    """Step sizes of the others, in units of one over the largest eigenvalue that limits them; the best one counts."""
    steps: int = 100
    dx: int = 60
    dy: int = 15
    k: int = 8
    batch: int = 600


def cells(config: Config) -> list[Cell]:
    """One a covariance."""
    return [Cell(key=name, options={"inputs": name}) for name in config.inputs]


def problem(config: Config, inputs: str, condition: float, seed: int) -> tuple[torch.Tensor, Task]:
    """G⋆ Haar, F⋆ with singular values 1 … 1/κ evenly spaced on a logarithmic scale, Σ as named."""
    import torch

    from layerwise.studies.feature_learning.covariance import covariance, haar, power
    from layerwise.studies.feature_learning.problem import Task

    random, reading = stream(seed, "problem"), INPUTS[inputs]
    G = haar(config.k, config.dx, random)
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), config.k, dtype=torch.float64)
    F = (haar(config.k, config.dy, random).mT * values) @ haar(config.k, config.k, random)
    Sigma = torch.eye(config.dx, dtype=torch.float64) if reading is None else covariance(config.dx, random, **reading)
    return G, Task(Sigma=Sigma, root=power(Sigma, 0.5), map=F @ G, deviation=0.0, uniform=False)


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """For every κ the contraction a step of each algorithm, KFAC's also as its largest deviation from 1 − η."""
    for seed in seeds:
        values: dict[str, float] = {}
        names = [*(f"kfac@{eta:g}" for eta in config.kfac_rates), "dfw", "amgd", "sgd"]
        columns: dict[str, list[float | int]] = {"condition": list(config.conditions)} | {n: [] for n in names}
        for condition in config.conditions:
            found = contractions(config, cell.options["inputs"], condition, seed)
            values |= {f"condition={condition:g}/{name}": value for name, value in found.items()}
            for name in names:
                columns[name].append(found[name])
        yield Row(seed=seed, values=values, series=columns)


def contractions(config: Config, inputs: str, condition: float, seed: int) -> dict[str, float]:
    """KFAC's mean ratio and (as "kfac-deviation@η") its largest |dist⁺/dist − (1 − η)|; of the others the best."""
    import torch

    from layerwise.studies.feature_learning.batch import draw_batch
    from layerwise.studies.feature_learning.population import distances, tilted

    G, task = problem(config, inputs, condition, seed)
    start = tilted(G, torch.full((config.k,), START, dtype=torch.float64), stream(seed, "start"))
    largest = float(torch.linalg.eigvalsh(task.Sigma)[-1])

    def curve(algorithm: fl.Algorithm, steps: int) -> torch.Tensor:
        random = stream(seed, "train")
        return distances(algorithm, start, G, lambda: draw_batch(task, config.batch, random), steps)

    found: dict[str, float] = {}
    kfac = curve(fl.KFAC(lr=list(config.kfac_rates)), min(config.steps, 20))
    for eta, dist in zip(config.kfac_rates, kfac, strict=True):
        ratio = (dist[1:] / dist[:-1])[dist[1:] > RESOLVED]
        found[f"kfac@{eta:g}"] = float(ratio.mean())
        found[f"kfac-deviation@{eta:g}"] = float((ratio - (1 - eta)).abs().max())
    gradient = [fraction / largest for fraction in config.fractions]
    others = {"dfw": fl.DFW(lr=config.fractions), "amgd": fl.AMGD(lr=gradient), "sgd": fl.SGD(lr=gradient)}
    for name, algorithm in others.items():
        found[name] = late_rate(curve(algorithm, config.steps))
    return found


def late_rate(dist: torch.Tensor) -> float:
    """The best rate's mean contraction a step, over the second half of the steps that end above `RESOLVED`.

    A rate that is below after its first step counts with that step alone.
    """
    found = []
    for curve in dist.tolist():
        below = [t for t, value in enumerate(curve) if value <= RESOLVED]
        end = max(1, below[0] - 1 if below else len(curve) - 1)
        found.append((max(curve[end], RESOLVED) / curve[end // 2]) ** (1 / (end - end // 2)))
    return min(found)


# --- Claims -------------------------------------------------------------------------------------------------


def claims(config: Config) -> list[Claim]:
    """KFAC's ratio is 1 − η for every κ and Σ; the number of steps of the others grows with κ."""
    found = []
    for inputs in config.inputs:
        for eta in config.kfac_rates:
            found.append(
                Claim(
                    name=f"{inputs}/kfac@{eta:g}",
                    statement=f"KFAC at rate {eta:g} contracts by 1 − η a step for every κ(F⋆): the largest deviation.",
                    quantity=_largest(config, inputs, f"kfac-deviation@{eta:g}"),
                    relation="<=",
                    target=1e-3,
                    seeds=config.seeds,
                    source="Theorem 3.6",
                )
            )
        found += [_slower(config, inputs, name) for name in ("dfw", "amgd", "sgd")]
        worst = f"condition={max(config.conditions):g}"
        found += [
            bound(
                inputs,
                f"{worst}/{name}",
                ">=",
                0.97,
                f"With the worst head {LABELS[name]} hardly contracts at any rate.",
                seeds=config.seeds,
                source="Theorem 3.6 and Proposition 3.5",
            )
            for name in ("dfw", "amgd", "sgd")
        ]
    return found


def _largest(config: Config, cell: str, name: str) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """Over κ, from records to seeds."""

    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        columns = [by_seed(records, cell, f"condition={c:g}/{name}") for c in config.conditions]
        return {seed: max(column[seed] for column in columns) for seed in columns[0]}

    return quantity


def _slower(config: Config, cell: str, name: str) -> Claim:
    """What κ leaves of the contraction: 1 − ratio with the worst head over that with the best."""

    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        best, worst = (by_seed(records, cell, f"condition={edge(config.conditions):g}/{name}") for edge in (min, max))
        return {
            seed: (1 - worst[seed]) / (1 - best[seed]) if best[seed] < 1 else math.inf
            for seed in sorted(set(best) & set(worst))
        }

    return Claim(
        name=f"{cell}/{name}-degrades",
        statement=f"With the worst head {LABELS[name]} keeps at most a third of its contraction with the best.",
        quantity=quantity,
        relation="<=",
        target=1 / 3,
        seeds=config.seeds,
        source="Theorem 3.6 and Proposition 3.5",
    )


# --- Figures ------------------------------------------------------------------------------------------------


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Contraction a step by κ(F⋆), one panel a covariance."""
    shown = [(f"kfac@{eta:g}", f"KFAC, η = {eta:g}") for eta in config.kfac_rates]
    shown += [(name, f"{LABELS[name]}, best rate") for name in ("dfw", "amgd", "sgd")]
    return [
        Figure(
            name="contraction",
            title="Contraction a step near the true representation",
            caption="Labels without noise. KFAC: mean ratio of distances; the others: late in a run, at the best rate.",
            panels=[
                Panel(
                    title=f"inputs: {inputs}",
                    x_label="κ(F⋆)",
                    y_label="dist⁺ / dist",
                    x_scale="log",
                    curves=[band(records, inputs, "condition", name, label) for name, label in shown],
                )
                for inputs in config.inputs
            ],
        )
    ]


def _goes_together(config: Config) -> None:
    """Refuses sizes and names that are no problem."""
    for name in config.inputs:
        if name not in INPUTS:
            raise InputError(unknown("covariance", name, INPUTS))
    fl.Setting(dx=config.dx, dy=config.dy, k=config.k, batch=config.batch)
    if config.dx < 2 * config.k or min(config.conditions) < 1:
        given = f"dx={config.dx}, k={config.k}, conditions={config.conditions}"
        raise InputError(describe(given, "dx ≥ 2k, and condition numbers ≥ 1", "change them"))


EXPERIMENT = Experiment(
    name="contraction",
    title="KFAC contracts whatever the conditioning",
    paper=PAPER,
    figure="Theorem 3.6",
    summary=(
        "Labels without noise, starts at distance 1e-5 from G⋆, fresh samples at every step. The theorem promises "
        "dist⁺ ≤ (1 − 0.9η) dist in a basin that shrinks with κ(F⋆)κ(Σ); measured, the ratio is 1 − η for every κ, "
        "also outside the basin. AMGD, SGD and DFW are given the best of several rates: DFW's contraction degrades "
        "with the head, that of AMGD and SGD with the head and Σ. With noise a term η σ̄ √(dx/n) is added (eq. 16 has "
        "it without η)."
    ),
    presets={
        "smoke": Config(
            inputs=("isotropic",), conditions=(1.0, 30.0), fractions=(0.5, 1.0), steps=30, dx=16, dy=6, k=3, batch=100
        ),
        "laptop": Config(),
        "paper": Config(seeds=3, inputs=("isotropic", "low", "high"), steps=300, dx=100, batch=1024),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop half a minute, paper five minutes",
    check=_goes_together,
)
