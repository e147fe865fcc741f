"""A site to look at, made once, and a browser to look with."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from report_samples import ODD, Config, experiment, record

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.over_seeds import band
from layerwise.report import write


def _odd_figures(config, records):
    many = list(range(900))
    curves = [
        Curve(label=ODD, x=many, y=[math.sin(k) if k % 7 else math.nan for k in many]),
        Curve(label="infinite", x=[0, 1], y=[math.inf, -math.inf]),
        Curve(label="empty", x=[], y=[]),
        Curve(label="points", x=[1, 10, 100], y=[1.0, 2.0, 3.0], low=[0.5, 1, 2], high=[2, 3, 4], style="points"),
    ]
    uneven = Panel(title="uneven", x_label="x", y_label="y", curves=[Curve(label="SGD", x=[1, 2, 3], y=[1.0])])
    return [
        Figure(
            name="odd <name>/../up",
            title=ODD,
            caption=ODD,
            panels=[
                Panel(title=ODD, x_label=ODD, y_label="y < 0 & more", curves=curves, x_scale="log", y_scale="log"),
                Panel(title="nothing", x_label="x", y_label="y", curves=[], y_scale="log"),
            ],
        ),
        Figure(name="uneven", title="Uneven", caption="", panels=[uneven]),
        Figure(name="none", title="No panels", caption="", panels=[]),
    ]


def odd_experiment():
    """Everything that is unusual at once."""
    return experiment(
        "odd-one",
        title=ODD,
        paper=ODD,
        figure=ODD,
        summary=ODD,
        cells=lambda config: [Cell(key="only")],
        run=lambda config, cell, seeds: [Row(seed=seed, values={"dist": math.nan}) for seed in seeds],
        figures=_odd_figures,
    )


def crowded_experiment():
    """Thirty-six curves in a panel, and a hundred claims, a misprint with its correction and a failure among them."""

    def run(config, cell, seeds):
        steps = list(range(0, 101, 5))
        for seed in seeds:
            series = {"step": steps} | {
                f"c{k}": [math.exp(-step * (k + 1) / 900) + seed / 50 for step in steps] for k in range(36)
            }
            yield Row(seed=seed, values={"dist": 0.1 + seed / 100}, series=series)

    def claims(config):
        value = {"quantity": lambda records: {r["seed"]: r["values"]["dist"] for r in records}, "relation": "<="}
        printed = {"origin": "misprint", "expected": "fails", "why": "The bound is 1 + d.", "source": "eq. (7)"}
        return [
            Claim(name="printed", statement="The bound is d.", target=0.01, **value, **printed),
            Claim(name="corrected", statement="The bound is 1 + d.", target=1.0, source="eq. (7)", **value),
            Claim(name="broken", statement="The distance vanishes.", target=0.0, **value),
            *(Claim(name=f"c{k}", statement=f"Claim number {k}.", target=1.0, **value) for k in range(97)),
        ]

    def figures(config, records):
        curves = [band(records, "only", "step", f"c{k}", f"width {k + 1}") for k in range(36)]
        panel = Panel(title="Many", x_label="step", y_label="loss", y_scale="log", curves=curves)
        return [Figure(name="many", title="Many curves", caption="One a width.", panels=[panel])]

    changes = {"cells": lambda config: [Cell(key="only")], "run": run, "claims": claims, "figures": figures}
    return experiment("crowded", title="Many curves and many claims", paper="Another (2024), A book", **changes)


def make_site(folder: Path) -> Path:
    """Records and pages of: a run that is complete, one that is not and is damaged, odd and crowded ones, and none."""
    first, never = experiment(), experiment("never-run", title="Learning rates from 10⁻⁶ to 1")
    record(folder / "runs", first)
    with record(folder / "runs", first, "paper", cells=5).open("ab") as file:
        file.write(b'{"cell":"KFAC","seed')
    record(folder / "runs", odd_experiment(), "smoke", config=replace(Config(), seeds=3))
    record(folder / "runs", crowded_experiment(), "smoke")
    known = [first, never, odd_experiment(), crowded_experiment()]
    return write(folder / "runs", folder / "site", experiments=known)


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The folder of the pages; tests only read it."""
    return make_site(tmp_path_factory.mktemp("report")).parent


@pytest.fixture(scope="session")
def site_with_files(tmp_path_factory) -> Path:
    """The same of two experiments, with figures as files, which take the longest."""
    folder = tmp_path_factory.mktemp("files")
    record(folder / "runs", experiment())
    record(folder / "runs", odd_experiment(), "smoke", config=replace(Config(), seeds=3))
    known = [experiment(), odd_experiment()]
    return write(folder / "runs", folder / "site", experiments=known, files=True).parent
