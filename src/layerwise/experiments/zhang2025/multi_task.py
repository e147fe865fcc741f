"""Appendix B.3 of Zhang et al. (2025): many tasks, two stages of preconditioning, and noise that falls with n·T."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.over_seeds import band, bound, combined, distinct
from layerwise.experiments.zhang2025 import PAPER
from layerwise.foundations.random import stream

if TYPE_CHECKING:
    import torch

    from layerwise.studies.feature_learning.multi_task import Tasks
    from layerwise.studies.feature_learning.problem import Task

START = 1e-3
"""Distance from G⋆ at which the runs without noise begin."""
NEAR = 3e-3
"""Distance at which the runs with noise begin: about where it will keep them."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tasks with fewer labels than the representation has rows, so that no head alone can be inverted."""

    seeds: int = 2
    """Independent problems."""
    tasks: tuple[int, ...] = (4, 8, 16)
    """T."""
    samples: tuple[int, ...] = (128, 512, 2048)
    """n, of each task."""
    lr: float = 0.2
    steps: int = 40
    dx: int = 20
    dy: int = 2
    k: int = 4
    starts: int = 3
    """Random representations that a run begins from."""

    def setting(self, tasks: int, samples: int, **others) -> Tasks:
        """T tasks with n samples each."""
        from layerwise.studies.feature_learning.multi_task import Tasks

        return Tasks(tasks=tasks, batch=samples, dx=self.dx, dy=self.dy, k=self.k, **others)


def cells(config: Config) -> list[Cell]:
    """Labels without noise on very different inputs; labels with noise on mild ones, where it decides the distance."""
    return [Cell(key="noise-free"), Cell(key="noise")]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed."""
    for seed in seeds:
        yield _noise_free(config, seed) if cell.key == "noise-free" else _noise(config, seed)


def _noise_free(config: Config, seed: int) -> Row:
    """Curves with the covariances inverted task by task, and with their mean inverted; and from random starts."""
    from layerwise.studies.feature_learning.multi_task import learn, tasks_of

    setting = config.setting(max(config.tasks), max(config.samples), noise=0.0)
    steps = min(config.steps, 20)
    each, pooled = (
        learn(setting, lr=config.lr, steps=steps, seed=seed, start=START, pooled=pooled) for pooled in (False, True)
    )
    ratio = each[1:] / each[:-1]
    # seeds of the starts are shared by no other run; the problem is another for each
    far = [learn(setting, lr=0.5, steps=40, seed=seed * config.starts + i)[-1] for i in range(config.starts)]
    return Row(
        seed=seed,
        values={
            "deviation": float((ratio - (1 - config.lr)).abs().max()),
            "left": float(each[-1] / each[0]),
            "left-pooled": float(pooled[-1] / pooled[0]),
            "found": statistics.fmean(float(dist <= 1e-3) for dist in far),
            "entry": float(tasks_of(setting, seed)[1][0].map[0, 0]),
        },
        series={"iteration": list(range(steps + 1)), "each": each.tolist(), "pooled": pooled.tolist()},
    )


def _noise(config: Config, seed: int) -> Row:
    """For every T and n the mean distance over the second half of the steps, alone and over what is predicted."""
    from layerwise.studies.feature_learning.multi_task import learn, tasks_of
    from layerwise.studies.feature_learning.noise_floor import kfac_floor

    columns: dict[str, list[float | int]] = {name: [] for name in ("tasks", "n", "total", "dist", "scaled", "over")}
    for tasks in config.tasks:
        for n in config.samples:
            setting = config.setting(tasks, n, anisotropy="low", repair="scaled")
            curve = learn(setting, lr=config.lr, steps=config.steps, seed=seed, start=NEAR)
            dist = float(curve[len(curve) // 2 :].mean())
            G, drawn = tasks_of(setting, seed)
            floor = kfac_floor(G, drawn, n, config.lr, stream(seed, "prediction", tasks, n))
            scaled = dist * math.sqrt(least_of_heads(G, drawn))
            point = (tasks, n, n * tasks, dist, scaled, dist / floor)
            for name, value in zip(columns, point, strict=True):
                columns[name].append(value)
    values = {
        "exponent": slope(columns["total"], columns["scaled"]),
        "over": max(columns["over"], key=lambda ratio: abs(math.log(ratio))),
        "few-samples": _few(config, seed),
    }
    for name, other in (("tasks", "n"), ("n", "tasks")):
        values[f"exponent-{name}"] = statistics.fmean(
            slope(*(_where(columns, column, other, fixed) for column in (name, "scaled")))
            for fixed in sorted(set(columns[other]))
        )
    return Row(seed=seed, values=values, series=columns)


def _few(config: Config, seed: int) -> float:
    """What noise leaves with n = 1.5 dx samples of each task, over that with twice as many of half of the tasks.

    By the square root of n·T the two were equal.
    """
    from layerwise.studies.feature_learning.multi_task import learn, tasks_of

    T, n = max(config.tasks), round(1.5 * config.dx)

    def left(tasks: int, samples: int) -> float:
        setting = config.setting(tasks, samples, anisotropy="low", repair="scaled")
        curve = learn(setting, lr=config.lr, steps=config.steps, seed=seed, start=NEAR)
        heads = least_of_heads(*tasks_of(setting, seed))
        return float(curve[len(curve) // 2 :].mean()) * math.sqrt(heads)

    return left(T, n) / left(T // 2, 2 * n)


def least_of_heads(G: torch.Tensor, tasks: Sequence[Task]) -> float:
    """λ_min of P̄ = mean_t F_tᵀF_t: the noise of mean_t F_tᵀE_t has covariance P̄ σ²/(nT), and P̄⁻¹ is applied."""
    import torch

    P = torch.stack([G @ task.map.mT @ task.map @ G.mT for task in tasks]).mean(0)
    return float(torch.linalg.eigvalsh(P)[0])


def slope(x: Sequence[float | int], y: Sequence[float | int]) -> float:
    """The exponent of y in x: least squares of log y on log x.

    >>> round(slope([1, 4, 16], [1.0, 0.5, 0.25]), 9)
    -0.5
    """
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def _where(columns: Mapping[str, Sequence], name: str, other: str, value: float | int) -> list:
    return [v for v, at in zip(columns[name], columns[other], strict=True) if at == value]


# --- Claims -------------------------------------------------------------------------------------------------


def claims(config: Config) -> list[Claim]:
    """The contraction without noise, what noise leaves against its prediction, and its exponents in n, T and n·T."""
    common: dict[str, Any] = {"seeds": config.seeds}
    paper: dict[str, Any] = {"seeds": config.seeds, "origin": "paper", "source": "Appendix B.3"}
    found = [
        bound(
            "noise-free",
            "deviation",
            "<=",
            0.01,
            "Without noise G⁺P⊥ = (1 − η) G P⊥: the largest deviation of dist⁺/dist from 1 − η.",
            **paper | {"source": "Eq. (23)"},
        ),
        Claim(
            name="noise-free/pooled",
            statement="One preconditioner for all tasks' inputs is behind one for each: ratio of what is left.",
            quantity=combined("noise-free", ["left-pooled", "left"], lambda pooled, each: pooled / each),
            relation=">=",
            target=3,
            span=(0, math.inf),
            **common,
        ),
        bound(
            "noise-free",
            "found",
            ">=",
            0.5,
            "Without noise it comes within 1e-3 of G⋆ from most random starts in forty steps of ½: the share.",
            span=(0, 1),
            **common,
        ),
        distinct("noise-free", "entry", "Seeds are problems of their own: the first task differs.", **common),
        bound(
            "noise",
            "over",
            "within",
            (0.7, 1.45),
            "Noise leaves what D⁺ = (1 − η)D + η P̄⁻¹ mean_t F_tᵀN_t settles at: the distance over that, worst T and n.",
            span=(0, math.inf),
            **common,
        ),
        bound(
            "noise",
            "few-samples",
            ">=",
            1.05,
            "With n = 1.5 dx samples of each task noise leaves more than with twice as many of half of the tasks.",
            note="The root of n·T has them equal; it takes n well above dx.",
            span=(0, math.inf),
            **common,
        ),
    ]
    if min(len(config.tasks), len(config.samples)) < 3:
        return found
    for name, words in (("exponent", "n·T"), ("exponent-n", "n"), ("exponent-tasks", "T")):
        statement = f"The distance that noise leaves falls with the square root of {words}: its exponent."
        width = 0.15 if name == "exponent" else 0.2  # the others are fits to fewer points
        found.append(bound("noise", name, "within", (-0.5 - width, -0.5 + width), statement, **paper))
    return found


# --- Figures ------------------------------------------------------------------------------------------------


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Left the distance by iteration without noise; right what noise leaves by n·T, one line a T."""
    free = [
        band(records, "noise-free", "iteration", "each", "each task's covariance inverted"),
        band(records, "noise-free", "iteration", "pooled", "mean covariance inverted"),
    ]
    noisy: list[Curve] = []
    for tasks in config.tasks:
        part = [
            {**r, "series": {c: _where(r["series"], c, "tasks", tasks) for c in ("total", "scaled")}}
            for r in records
            if r["cell"] == "noise"
        ]
        noisy.append(band(part, "noise", "total", "scaled", f"T = {tasks}", "points"))
    return [
        Figure(
            name="multi-task",
            title="Many tasks",
            caption="Median over seeds; the band spans all seeds.",
            panels=[
                Panel(title="without noise", x_label="iteration", y_label="dist", y_scale="log", curves=free),
                Panel(
                    title="what noise leaves",
                    x_label="n·T",
                    y_label="dist · √λ_min(P̄)",
                    x_scale="log",
                    y_scale="log",
                    curves=noisy,
                ),
            ],
        )
    ]


EXPERIMENT = Experiment(
    name="multi-task",
    title="Tasks that share a representation",
    paper=PAPER,
    figure="Appendix B.3",
    summary=(
        "T tasks with inputs and heads of their own, and fewer labels than the representation has rows. Each task's "
        "covariance is inverted first, the directions are averaged, and only then the mean of the heads' Gram matrices "
        "is inverted, since a single one is singular. Without noise the distance shrinks by 1 − η a step, and random "
        "starts are no obstacle; with noise it ends where the recursion predicts, at a level that falls with √(nT) as "
        "long as n is well above dx. The paper's text calls the features' second moment a P; it is Q_F (the scanned "
        "text may be at fault)."
    ),
    presets={
        "smoke": Config(tasks=(4, 8), samples=(32, 128), lr=0.5, steps=40, dx=10, starts=2),
        "laptop": Config(),
        "paper": Config(seeds=5, tasks=(4, 8, 16, 32), samples=(128, 512, 2048), steps=100),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke some seconds, laptop half a minute, paper some ten minutes",
    check=lambda config: [config.setting(tasks, n) for tasks in config.tasks for n in config.samples],
)
