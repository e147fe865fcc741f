"""Experiments with records made by formula: what the report is tried on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.runner import run

FINAL = {"KFAC": 0.03, "DFW": 0.1, "NGD 1e-2": 0.04, "NGD 1e-4": 0.98, "Adam": 0.7, "AMGD": 0.9, "SGD": math.nan}
ODD = '<script>alert("x")</script> & $\\alpha$ "quoted" ' + "verylongname" * 12
"""A name with everything in it that a page must not take for marks, and longer than any line."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the samples."""

    seeds: int = 2
    iterations: int = 400
    scales: tuple[str, ...] = ("trace",)
    fresh: bool = True


def _run(config: Config, cell: Cell, seeds: Sequence[int]):
    for seed in seeds:
        steps = list(range(0, config.iterations + 1, max(1, config.iterations // 100)))
        final = FINAL[cell.key] * (1 + 0.1 * math.sin(seed + len(cell.key)))
        rate = 8 / config.iterations
        dist = [final + (1 - final) * math.exp(-rate * step) for step in steps]
        loss = [0.075 + 30 * value**2 for value in dist]
        if cell.key == "SGD":
            dist = [1.0 if step < 20 else math.nan for step in steps]
            loss = [10.0**step if step < 20 else math.inf for step in steps]
        series = {"iteration": steps, "dist": dist, "loss": loss}
        yield Row(seed=seed, values={"dist": dist[-1], "loss": loss[-1]}, series=series)


def _claims(config: Config) -> list[Claim]:
    def final(name: str, value: str = "dist"):
        return lambda records: by_seed(records, name, value)

    return [
        Claim(
            name="kfac-dist",
            statement="KFAC finds the representation: its subspace distance ends at 0.12 or below.",
            quantity=final("KFAC"),
            relation="<=",
            target=0.12,
            seeds=2,
            source="Figure 1",
        ),
        Claim(
            name="kfac-loss",
            statement="KFAC’s training loss ends at the noise floor.",
            quantity=final("KFAC", "loss"),
            relation="within",
            target=(0.07, 0.2),
            seeds=2,
            source="Figure 1, left",
        ),
        Claim(
            name="ngd-loses",
            statement="NGD at the same rate stays far from the representation.",
            quantity=final("NGD 1e-2"),
            relation=">=",
            target=0.5,
            seeds=2,
            origin="paper",
            expected="fails",
            why="At the rate of KFAC, NGD with the exact Fisher matrix ties with it: both have one direction in G.",
            source="Caption of Figure 1",
        ),
        Claim(
            name="adam-dist",
            statement="Adam lowers the loss without finding the representation.",
            quantity=final("Adam"),
            relation=">=",
            target=0.8,
            seeds=2,
            test="mean",
            source="Figure 1",
        ),
        Claim(
            name="many",
            statement="KFAC is below DFW on thirty seeds.",
            quantity=final("KFAC"),
            relation="<",
            target=0.1,
            seeds=30,
            test="share",
            share=0.9,
            source="Section 4",
        ),
        Claim(
            name="sgd-diverges",
            statement="SGD cannot run at this rate.",
            quantity=final("SGD"),
            relation=">=",
            target=1.0,
            seeds=2,
        ),
    ]


def _figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    panels = []
    shown = (("loss", "training loss"), ("dist", "subspace distance"), ("dist", "transfer loss"))
    for value, label in shown if config.iterations == 400 else shown[:1]:
        curves = []
        for name in FINAL:
            runs = [record["series"] for record in records if record["cell"] == name]
            if not runs:
                continue
            columns = list(zip(*(run[value] for run in runs), strict=True))
            curves.append(
                Curve(
                    label=name,
                    x=runs[0]["iteration"],
                    y=[sum(column) / len(column) for column in columns],
                    low=[min(column) for column in columns],
                    high=[max(column) for column in columns],
                )
            )
        if value == "loss":
            curves.append(Curve(label="noise floor", x=[0, config.iterations], y=[0.075, 0.075], style="dashed"))
        panels.append(Panel(title=label.capitalize(), x_label="iteration", y_label=label, curves=curves, y_scale="log"))
    final = [
        Curve(label=record["cell"], x=[place], y=[record["values"]["dist"]], style="bars")
        for place, record in enumerate(record for record in records if record["seed"] == 0)
    ]
    figures = [
        Figure(
            name="head-to-head",
            title="Loss and subspace distance",
            caption="Mean over seeds, with the range over seeds as a band. The dashed line is the noise floor.",
            panels=panels,
        ),
        Figure(
            name="final",
            title="Where the distance ends",
            caption="Seed 0.",
            panels=[Panel(title="Distance after the last step", x_label="", y_label="subspace distance", curves=final)],
        ),
    ]
    return figures if config.seeds == 2 else figures[:1]


def experiment(name: str = "sample-one", **changes: Any) -> Experiment:
    """The sample experiment, with whatever a test wants to be different."""
    plain = Experiment(
        name=name,
        title="Preconditioning learns the representation",
        paper="Sample and Author, On Layer-wise Preconditioning (2025)",
        figure="Figure 1",
        summary="Several algorithms lower the training loss; few of them find the representation.\n\n"
        "The covariance is scaled to trace one per dimension, which the paper does not say.",
        presets={"smoke": Config(iterations=20), "laptop": Config(), "paper": Config(seeds=5, iterations=1000)},
        cells=lambda config: [Cell(key=name, random=name != "SGD") for name in FINAL],  # SGD diverges alike for all
        run=_run,
        claims=_claims,
        figures=_figures,
        cost="laptop: a minute; paper: ten minutes",
    )
    return replace(plain, **changes)


def record(
    runs: Path, experiment: Experiment, preset: str = "laptop", config: Any = None, cells: int | None = None
) -> Path:
    """Run the experiment, or its first few cells; return the file of its records."""
    part = replace(experiment, cells=lambda config: experiment.cells(config)[:cells])
    return run(part, config, preset=preset, out=runs).recorded.path
