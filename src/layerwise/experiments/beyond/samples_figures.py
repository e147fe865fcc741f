"""The figures of experiment `samples`."""

import math
import statistics
from collections.abc import Sequence
from functools import cache

import numpy as np

from layerwise.experiments.beyond.samples_runs import BOUNDARY, DAMPINGS, LIMITS, SIMULATED, STEPS, Config
from layerwise.experiments.experiment import Record
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.over_seeds import band
from layerwise.studies.feature_learning.members import member

LABELS = {"sgd": "SGD", "kfac": "KFAC, λ → 0", "damped": "KFAC, λ = 0.3", "best": "KFAC, best λ"}


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Needs by κ, distances at the largest κ, what limits KFAC, and the boundary of one step."""
    names = [*config.members, "least-squares"]
    top, budget = config.conditions[-1], config.steps * config.batch
    limits = [band(records, LIMITS, "damping", f"steps@{n}", f"batch {n}") for n in config.batches]
    paths = [_path(records, name) for name in config.members]
    return [
        Figure(
            name="samples",
            title=f"Samples until the subspace distance is {config.distance:g}",
            caption=(
                "Median over seeds; the band spans all seeds. Points at which a seed did not get there within "
                f"{budget} samples are left out of the lines; right, who got there in every seed, a row for each "
                "member in the order of the legend. Dashed: least squares of rank k on all samples so far."
            ),
            panels=[
                Panel(
                    title="by the inputs' condition number",
                    x_label="κ",
                    y_label="samples",
                    x_scale="log",
                    y_scale="log",
                    curves=[_needs(config, records, name) for name in names],
                ),
                Panel(
                    title="who gets there in every seed",
                    x_label="κ",
                    y_label="member",
                    x_scale="log",
                    curves=[_reached(config, records, place, name) for place, name in enumerate(config.members)],
                ),
            ],
        ),
        Figure(
            name="samples-paths",
            title=f"At condition number {top:g}",
            caption=(
                "Medians over seeds; bands span all seeds. Left, each member at its best rate until its last seed is "
                "done (it stays found, diverges or spends the budget); a seed that is done earlier keeps its last "
                f"distance. Right, KFAC at the one rate {config.rate:g}, where every seed gets there."
            ),
            panels=[
                Panel(title="distance by samples", x_label="samples", y_label="dist", x_scale="log", curves=paths),
                Panel(title="what limits KFAC", x_label="damping", y_label="steps", x_scale="log", curves=limits),
            ],
        ),
        Figure(
            name="samples-boundary",
            title=f"Samples for a correlation of {config.correlation:g} after one step",
            caption=(
                "Dashed, the lemmas solved for n/dx: above its line a method has the correlation. SGD's line ends "
                "where 1/√(1 + e²) is the target. Points: where the mean correlation of the learned "
                "direction in simulations crosses the target."
            ),
            panels=[
                Panel(
                    title="phase boundary",
                    x_label="anisotropy e",
                    y_label="n/dx",
                    y_scale="log",
                    curves=[
                        *(_line(config, method) for method in DAMPINGS),
                        *(_crossings(config, records, method) for method in SIMULATED),
                    ],
                )
            ],
        ),
    ]


def _needed(records: Sequence[Record], name: str, condition: float) -> list[float]:
    key = f"{name}@{condition:g}"
    return [record["values"][key] for record in records if record["cell"] == STEPS and key in record["values"]]


def _needs(config: Config, records: Sequence[Record], name: str) -> Curve:
    """Samples needed by κ, where every seed got there."""
    found = [(condition, _needed(records, name, condition)) for condition in config.conditions]
    kept = [(condition, needed) for condition, needed in found if needed and max(needed) < math.inf]
    reference = name == "least-squares"
    return Curve(
        label="least squares of rank k" if reference else member(name).label,
        x=[condition for condition, _ in kept],
        y=[statistics.median(needed) for _, needed in kept],
        low=[min(needed) for _, needed in kept],
        high=[max(needed) for _, needed in kept],
        style="dashed" if reference else "line",
    )


def _path(records: Sequence[Record], name: str) -> Curve:
    """Distance by samples until the last seed is done; where an earlier one is done, its last distance goes on."""
    key = f"{name}/dist"
    found = [record for record in records if record["cell"] == STEPS and key in record["series"]]
    runs = [[dist for dist in record["series"][key] if math.isfinite(dist)] for record in found]
    longest = max(map(len, runs), default=0)
    shown: list[Record] = [
        {
            **record,
            "series": {
                "samples": record["series"]["samples"][:longest],
                key: [*run, *run[-1:] * (longest - len(run))],
            },
        }
        for record, run in zip(found, runs, strict=True)
    ]
    return band(shown, STEPS, "samples", key, member(name).label)


def _reached(config: Config, records: Sequence[Record], place: int, name: str) -> Curve:
    """A member's row of the diagram: points at the κ at which every seed finds the features."""
    needed = {condition: _needed(records, name, condition) for condition in config.conditions}
    reached = [condition for condition, found in needed.items() if found and max(found) < math.inf]
    return Curve(label=member(name).label, x=reached, y=[place] * len(reached), style="points")


@cache
def _line(config: Config, method: str) -> Curve:
    """The predicted boundary where it is finite."""
    points = [(e, config.boundary(method, e)) for e in np.linspace(0, 0.96, 25).tolist()]
    kept = [(e, per) for e, per in points if math.isfinite(per)]
    return Curve(label=LABELS[method], x=[e for e, _ in kept], y=[per for _, per in kept], style="dashed")


def _crossings(config: Config, records: Sequence[Record], method: str) -> Curve:
    """Where the mean correlation over seeds, interpolated in log n, crosses the target."""
    found = [record["series"] for record in records if record["cell"] == BOUNDARY]
    x, y = [], []
    for e in config.anisotropies if found else ():
        at = [i for i, value in enumerate(found[0]["e"]) if value == e]
        per = [found[0][f"{method}/n"][i] for i in at]
        rho = [statistics.fmean(series[f"{method}/learned"][i] for series in found) for i in at]
        if rho == sorted(rho) and rho[0] <= config.correlation <= rho[-1]:
            x.append(e)
            y.append(math.exp(float(np.interp(config.correlation, rho, np.log(per)))))
    return Curve(label=f"{LABELS[method]} (simulated)", x=x, y=y, style="points")
