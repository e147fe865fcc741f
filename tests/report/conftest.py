"""A site to look at, made once, and a browser to look with."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from report_samples import ODD, Config, experiment, record

from chromium import chromium
from layerwise.experiments.experiment import Cell, Row
from layerwise.experiments.figures import Curve, Figure, Panel
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


def make_site(folder: Path) -> Path:
    """Records and pages of: a run that is complete, one that is not and is damaged, an odd one, and none at all."""
    first, never = experiment(), experiment("never-run", title="Learning rates from 10⁻⁶ to 1")
    record(folder / "runs", first)
    with record(folder / "runs", first, "paper", cells=5).open("ab") as file:
        file.write(b'{"cell":"KFAC","seed')
    record(folder / "runs", odd_experiment(), "smoke", config=replace(Config(), seeds=3))
    return write(folder / "runs", folder / "site", experiments=[first, never, odd_experiment()])


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The folder of the pages; tests only read it."""
    return make_site(tmp_path_factory.mktemp("report")).parent


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium that reaches no network."""
    with chromium() as opened:
        yield opened
