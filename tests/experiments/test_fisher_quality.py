"""Structures against the Fisher matrix: the smoke preset holds what it claims, claims can fail, large networks run."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jaxtyping
import pytest
import torch
from experiment_records import records

from layerwise import data
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.george2023.fisher_quality import EXPERIMENT
from layerwise.foundations.errors import InputError

pytest.importorskip("sklearn")
TINY = dataclasses.replace(
    EXPERIMENT.preset("paper"),
    seeds=2,
    networks=("transformer", "resnet18"),
    steps=(0, 2),
    examples=8,
    directions=2,
    together=1,
    dampings=(0.1,),
    samples=1,
    width=8,
    depth=1,
    length=6,
    blocks=(1,),
    channels=4,
    images=8,
    device="cpu",
)
"""Large networks, cut to nothing."""


@cache
def smoke():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return records(EXPERIMENT, EXPERIMENT.preset("smoke"), [0])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text and images for networks that read a folder."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "tinyshakespeare.txt").write_text("to be or not to be, that is the question\n" * 20)
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    images = data.Images(torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8))
    monkeypatch.setattr(data, "cifar10", lambda *_, limit, **__: images.first(limit))
    return tmp_path


def with_values(found: list[dict], change: Callable[[str], float]) -> list[dict]:
    return [r | {"values": {name: change(name) for name in r["values"]}} for r in found]


def test_smoke_holds_what_it_claims():
    found = smoke()
    claims = EXPERIMENT.claims(EXPERIMENT.preset("smoke"))
    assert len(claims) == 13
    assert [claim.name for claim in claims if judge(claim, found).status != HELD] == []


def alike(name: str) -> float:
    """All structures alike, and none of use; but EKFAC is worse."""
    return 0.0 if name.endswith(("ekfac/cos", "/kfac/frobenius", "/kfac/trace")) else 1.0


def useless(name: str) -> float:
    return 1.0 if name.endswith("/trace") else 0.0


def test_every_claim_can_fail():
    found = smoke()
    broken = [with_values(found, change) for change in (alike, useless)]
    for claim in EXPERIMENT.claims(EXPERIMENT.preset("smoke")):
        assert NOT_HELD in [judge(claim, each).status for each in broken], claim.name


def test_claims_of_other_networks_can_fail_too():
    """Those of preset paper, the memory of a GPU among them."""
    found = smoke()
    config = dataclasses.replace(EXPERIMENT.preset("paper"), seeds=1, steps=(0, 50))
    values = found[0]["values"] | {"memory/peak": 12.0}
    every = [found[0] | {"cell": cell, "values": values} for cell in config.networks]
    claims = EXPERIMENT.claims(config)
    assert [claim.name for claim in claims if judge(claim, every).status != HELD] == []
    broken = [
        with_values(every, lambda name, by=by: 21.0 if name == "memory/peak" else by(name)) for by in (alike, useless)
    ]
    assert all(NOT_HELD in [judge(claim, each).status for each in broken] for claim in claims)


@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_claims_of_larger_presets_read_what_is_recorded(preset: str):
    config = dataclasses.replace(EXPERIMENT.preset(preset), seeds=2, steps=(0, 50))
    cells = [cell.key for cell in EXPERIMENT.cells_of(config)]
    values = smoke()[0]["values"] | {"memory/peak": 12.0}
    again = [smoke()[0] | {"cell": cell, "seed": seed, "values": values} for cell in cells for seed in (0, 1)]
    assert all(judge(claim, again).n == 2 for claim in EXPERIMENT.claims(config))


def all_points(config, found: list[dict]) -> bool:
    """Whether a figure of every network has a panel of products and one of solves a step, and all their points."""
    figures = EXPERIMENT.figures(config, found)
    assert [figure.name for figure in figures] == [f"fisher-quality-{name}" for name in config.networks]
    lengths = [len(config.steps), *(len(config.dampings) for _ in config.steps)]
    return all(
        [{len(curve.y) for curve in panel.curves} for panel in figure.panels] == [{length} for length in lengths]
        for figure in figures
    )


def test_figures_have_all_points():
    assert all_points(EXPERIMENT.preset("smoke"), smoke())


@pytest.mark.usefixtures("folder")
def test_large_networks_run_from_end_to_end_and_seeds_are_independent():
    found = records(EXPERIMENT, TINY, [0, 1])
    assert all(judge(claim, found).n == 2 for claim in EXPERIMENT.claims(TINY))
    assert all(r["values"]["2/ekfac/trace"] < 1e-4 for r in found)
    assert all_points(TINY, found)
    alone = records(EXPERIMENT, dataclasses.replace(TINY, networks=("resnet18",)), [1])
    assert [r["values"] for r in found if (r["cell"], r["seed"]) == ("resnet18", 1)] == [alone[0]["values"]]


def test_a_table_can_be_read_from_the_values():
    """Every structure has a trace, products and solves, each mean with its standard error."""
    found = smoke()
    config, values = EXPERIMENT.preset("smoke"), found[0]["values"]
    for step in config.steps:
        assert values[f"{step}/loss"] > 0
        for structure in ("diag", "quasidiag", "block", "kfac", "ekfac"):
            means = ["quad", "cos", *(f"solve/{damping:g}" for damping in config.dampings)]
            names = ["trace", "frobenius", *means, *(f"{name}/se" for name in means)]
            assert all(f"{step}/{structure}/{name}" in values for name in names)
        assert f"{step}/kfac-trace/solve/0.01/se" in values


def test_missing_data_names_the_variable_and_the_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LAYERWISE_DATA", raising=False)
    for network, named in (("transformer", "tinyshakespeare.txt"), ("resnet18", "parquet")):
        config = dataclasses.replace(EXPERIMENT.preset("laptop"), networks=(network,))
        with pytest.raises(FileNotFoundError, match="LAYERWISE_DATA") as refused:
            records(EXPERIMENT, config, [0])
        assert named in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"networks": ("digits", "resnet50")},
        {"steps": (0, 0, 50)},
        {"dampings": (0.1, 0.1)},
        {"width": 15},
        {"directions": 1},
        {"examples": 0},
        {"networks": ()},
    ],
)
def test_what_does_not_go_together_is_refused(wrong: dict):
    with pytest.raises(InputError):
        EXPERIMENT.refuse_bad(dataclasses.replace(EXPERIMENT.preset("smoke"), **wrong))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is what is tried")
def test_a_gpu_that_is_not_there_is_said_at_once():
    with pytest.raises(InputError, match="--device cpu"):
        EXPERIMENT.refuse_bad(EXPERIMENT.preset("paper"))
