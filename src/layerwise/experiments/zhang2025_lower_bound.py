"""Proposition 3.5 of Zhang et al. (2025): alternating SGD contracts no faster than the head's conditioning allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    from layerwise.studies.feature_learning.problem import Task

CELL = "grid"
RESOLVED = 1e-9
"""Distances below this are not compared: their ratios would be of rounding errors."""
BEYOND = 4.2
"""The step size, times 1 − l, at which instability is shown; the proposition says above 4."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """F⋆ᵀF⋆ = diag((1 − l) I, l), Σ = I, population gradients."""

    seeds: int = 2
    """Starts: distances ε₀ drawn from [0.05, 0.8]."""
    smallest: tuple[float, ...] = (0.01, 0.03, 0.1, 0.15, 0.19, 0.3, 0.5)
    """l, the least eigenvalue of F⋆ᵀF⋆."""
    rates: int = 40
    """Step sizes, evenly spaced up to 4 / (1 − l)."""
    steps: int = 100
    dx: int = 24
    dy: int = 6
    k: int = 4


def cells(config: Config) -> list[Cell]:
    """One: it is all small."""
    return [Cell(key=CELL)]


def problem(config: Config, least: float) -> tuple[torch.Tensor, Task]:
    """G⋆ = [I 0] and the task with F⋆ = diag((1 − l)^½, …, l^½).

    Coordinates are the proposition's, so that zeros stay zeros: between 2/(1 − l) and 4/(1 − l) the rows that are not
    turned are unstable, and in another basis rounding errors would grow until they are the distance.
    """
    import torch

    from layerwise.studies.feature_learning.problem import Task

    roots = torch.tensor([1 - least] * (config.k - 1) + [least], dtype=torch.float64).sqrt()
    F = torch.eye(config.dy, config.k, dtype=torch.float64) * roots
    I = torch.eye(config.dx, dtype=torch.float64)
    G = I[: config.k]
    return G, Task(Sigma=I, root=I, map=F @ G, deviation=0.0, uniform=False)


def start_distance(seed: int) -> float:
    """ε₀ of a seed."""
    import torch

    return 0.05 + 0.75 * float(torch.rand((), generator=stream(seed, "tilt"), dtype=torch.float64))


def curves(config: Config, least: float, seed: int, algorithm: fl.Algorithm, row: int) -> torch.Tensor:
    """Distances `[rate, step]` of an algorithm that starts with one row of G⋆ turned by ε₀."""
    import torch

    from layerwise.studies.feature_learning.population import distances, population_batch, tilted

    G, task = problem(config, least)
    by = torch.zeros(config.k, dtype=torch.float64)
    by[row] = start_distance(seed)
    batch = population_batch(task)
    start = tilted(G, by, stream(seed, "direction"), aligned=True)
    return distances(algorithm, start, G, lambda: batch, config.steps)


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """For every l: the slack of each inequality, the fastest contraction over step sizes, and the unstable form."""
    for seed in seeds:
        values: dict[str, float] = {}
        columns: dict[str, list[float | int]] = {name: [] for name in ("l", "condition", *SERIES)}
        for least in config.smallest:
            found = measured(config, least, seed)
            values |= {f"l={least:g}/{name}": value for name, value in found.items()}
            for name in SERIES:
                columns[name].append(found[name])
            columns["l"].append(least)
            columns["condition"].append((1 - least) / least)
        yield Row(seed=seed, values=values, series=columns)


SERIES = ("fastest", "bound", "kfac", "left", "left-kfac", "limsup")


def measured(config: Config, least: float, seed: int) -> dict[str, float]:
    """What is recorded of one l.

    - "slack": least over rates and steps of dist⁺/dist − (1 − 4l/(1 − l)); "step-slack": of dist⁺/dist − (1 − ηl);
    - "intermediate": least of c₂⁺ − c₂ (1 − ηl c₁²), the proof's step, with c₂ = dist and c₁² = 1 − c₂²;
    - "fastest" and "kfac": smallest ratio of one step; "left": what is left after all steps at the best rate;
    - "limsup": largest distance in the last quarter, from the first form at a step size beyond 4/(1 − l).
    """
    import torch

    top = 4 / (1 - least)
    rates = [top * (i + 1) / config.rates for i in range(config.rates)]
    slow = curves(config, least, seed, fl.AMGD(lr=rates), row=config.k - 1)
    before, after = slow[:, :-1], slow[:, 1:]
    eta = torch.tensor(rates, dtype=torch.float64)[:, None]
    resolved = before > RESOLVED
    ratio = torch.where(resolved, after / before.clamp(min=RESOLVED), torch.inf)
    claimed = before * (1 - eta * least * (1 - before.square()))
    unstable = curves(config, least, seed, fl.AMGD(lr=[BEYOND / (1 - least)]), row=0)[0]
    kfac = curves(config, least, seed, fl.KFAC(lr=[0.5]), row=config.k - 1)[0]
    limit = 1 - 4 * least / (1 - least)
    return {
        "slack": float(ratio.min()) - limit,
        "step-slack": float((ratio - (1 - eta * least)).min()),
        "intermediate": float((after - claimed)[resolved].min()),
        "fastest": float(ratio.min()),
        "bound": limit,
        "left": float(slow[:, -1].min() / slow[0, 0]),
        "kfac": float(kfac[1] / kfac[0]),
        "left-kfac": float(kfac[-1] / kfac[0]),
        "limsup": float(unstable[-max(1, config.steps // 4) :].max()),
    }


def claims(config: Config) -> list[Claim]:
    """The proposition for every l, the proof's intermediate step (reversed), and KFAC on the same instances."""
    common = {"seeds": config.seeds, "source": "Proposition 3.5"}
    found = []
    for least in config.smallest:
        key = f"l={least:g}"
        found += [
            bound(
                CELL,
                f"{key}/slack",
                ">=",
                -1e-9,
                "No step up to 4/(1 − l) contracts below 1 − 4 λ_min/λ_max of F⋆ᵀF⋆: what is above that.",
                **common,
            ),
            bound(CELL, f"{key}/step-slack", ">=", -1e-9, "Each step obeys dist⁺ ≥ (1 − ηl) dist.", **common),
            bound(CELL, f"{key}/limsup", ">=", 0.5, "Beyond 4/(1 − l) the distance does not settle below ½.", **common),
            bound(
                CELL,
                f"{key}/kfac",
                "<=",
                0.51,
                "KFAC at rate ½ halves the distance in a step, whatever l.",
                seeds=config.seeds,
                source="Theorem 3.6",
            ),
        ]
    worst = f"l={max(config.smallest):g}/intermediate"
    reversed_step = (
        "The proof divides by a norm above one, which shrinks the left side; the conclusion holds all the same."
    )
    statement = "Each step obeys c₂⁺ ≥ c₂ (1 − ηl c₁²), as the proof says on its way."
    found.append(bound(CELL, worst, ">=", -1e-9, statement, expected="fails", why=reversed_step, **common))
    return found


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """One step's contraction against the bound, and what is left after all steps, by condition number."""

    def panel(title: str, y_label: str, curves: list[Curve], y_scale: str = "linear") -> Panel:
        label = "(1 − l) / l = κ(F⋆)²"
        return Panel(title=title, x_label=label, y_label=y_label, x_scale="log", y_scale=y_scale, curves=curves)

    def of(name: str, label: str, style: str = "line") -> Curve:
        return band(records, CELL, "condition", name, label, style)

    one_step = [of("fastest", "AMGD", "points"), of("kfac", "KFAC", "points"), of("bound", "lower bound", "dashed")]
    return [
        Figure(
            name="lower-bound",
            title="Alternating SGD against its lower bound",
            caption=(
                "AMGD with population gradients and the best of all step sizes up to 4/(1 − l); KFAC at rate ½. Right: "
                f"the first form at step size {BEYOND}/(1 − l)."
            ),
            panels=[
                panel("smallest ratio of distances in a step", "dist⁺ / dist", one_step),
                panel(
                    f"left after {config.steps} steps",
                    "dist / ε₀",
                    [of("left", "AMGD", "points"), of("left-kfac", "KFAC", "points")],
                    "log",
                ),
                panel("largest late distance beyond 4/(1 − l)", "dist", [of("limsup", "AMGD", "points")]),
            ],
        )
    ]


def _goes_together(config: Config) -> None:
    """Refuses sizes that are no problem."""
    if not 2 <= config.k <= min(config.dy, config.dx // 2):
        given = f"k={config.k}, dx={config.dx}, dy={config.dy}"
        raise InputError(describe(given, "2 ≤ k ≤ dy and 2k ≤ dx", "choose another k"))


EXPERIMENT = Experiment(
    name="lower-bound",
    title="Without the head's preconditioner the rate depends on conditioning",
    paper=PAPER,
    figure="Proposition 3.5",
    summary=(
        "Isotropic inputs, exact gradients, and a head with F⋆ᵀF⋆ = diag((1 − l) I, l). Alternating SGD either takes a "
        "step above 4/(1 − l), and an instance exists on which its distance does not settle below one half, or "
        "contracts no faster than 1 − 4l/(1 − l) a step. The bound says something for l < 1/5. The limit in the "
        "paper's text reads 1 in places; ½ is what follows from the proof and what is checked."
    ),
    presets={
        "smoke": Config(seeds=1, smallest=(0.01, 0.1, 0.5), rates=8, steps=20, dx=10, dy=4, k=2),
        "laptop": Config(),
        "paper": Config(seeds=5, smallest=(0.001, 0.003, 0.01, 0.03, 0.1, 0.15, 0.19, 0.3, 0.5), rates=160, steps=300),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke and laptop some seconds, paper a minute",
    ranges={"smallest": (1e-6, 0.5)},
    check=_goes_together,
)
