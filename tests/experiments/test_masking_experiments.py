"""Experiments on masked sparse coding: smoke presets hold what they claim, claims can fail, larger presets are read."""

import dataclasses

import pytest
from experiment_records import smoke

from error_sentences import WORDED
from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.wu2024 import over_realised
from layerwise.experiments.wu2024.both_objectives import from_printed, printed_claims
from layerwise.foundations.errors import LayerwiseError

NAMES = (
    "over-realised",
    "wrong-dictionary",
    "masking-theorem",
    "masked-early-stopping",
    "dictionary-steps",
    pytest.param("scaling", marks=pytest.mark.slow),
    pytest.param("noise", marks=pytest.mark.slow),
)
SWEEPS = ("over-realised", "scaling", "noise")


@pytest.fixture(params=NAMES)
def ran(request: pytest.FixtureRequest):
    return find(request.param), smoke(request.param)


def test_smoke_is_as_expected(ran):
    experiment, found = ran
    claims = experiment.claims(experiment.preset("smoke"))
    assert claims
    assert [claim.name for claim in claims if not judge(claim, found).as_expected] == []


def test_figures(ran):
    experiment, found = ran
    config = experiment.preset("smoke")
    for figure in experiment.figures(config, found):
        assert all(len(curve.x) == len(curve.y) >= 1 for panel in figure.panels for curve in panel.curves)
    assert experiment.figures(config, [])


def test_claims_fail_when_objectives_are_exchanged():
    experiment, found = find("over-realised"), smoke("over-realised")
    swapped = []
    for record in found:
        values = record["values"]
        exchanged = values | {"standard": values["masked"], "masked": values["standard"]}
        swapped.append(record | {"values": exchanged})
    assert {judge(claim, swapped).status for claim in experiment.claims(experiment.preset("smoke"))} == {NOT_HELD}


def table_records(table, seeds=2, shift=0.0):
    """What a run that reproduces a figure would have recorded."""
    rows = []
    for cell, pair in table.items():
        values = {name: error + shift for name, error in pair.items()} | {"start": 0.45 if cell[0] == "s" else 0.0}
        rows += [{"cell": cell, "seed": seed, "values": values, "series": {}} for seed in range(seeds)]
    return rows


@pytest.mark.parametrize("name", SWEEPS)
def test_printed_figures_hold_and_others_do_not(name):
    """The full presets judge the printed tables as they should, and notice errors that are .03 off."""
    experiment = find(name)
    config = dataclasses.replace(experiment.preset("paper"), seeds=2)
    module = __import__(f"layerwise.experiments.wu2024.{name.replace('-', '_')}", fromlist=["PRINTED"])
    assert set(module.PRINTED) == {cell.key for cell in experiment.cells_of(config)}
    claims = [claim for claim in experiment.claims(config) if "start" not in claim.name]
    assert [c.name for c in claims if judge(c, table_records(module.PRINTED)).status != HELD] == []
    off = [c for c in claims if c.name.endswith("printed")]
    assert len(off) == 2 * len(module.PRINTED)
    assert {judge(c, table_records(module.PRINTED, shift=0.03)).status for c in off} == {NOT_HELD}


def test_a_mean_is_compared_with_the_printed_one():
    rows = [{"cell": "a", "seed": s, "values": {"x": x}} for s, x in ((0, 0.10), (1, 0.14))]
    assert from_printed("a", "x", 0.12)(rows) == pytest.approx({0: 0.0, 1: 0.0})
    (claim,) = printed_claims({"a": {"x": 0.2}}, 0.02, "here", 2, {})
    assert judge(claim, rows).status == NOT_HELD


def test_limits_are_of_the_sizes_they_were_found_for():
    laptop, paper = over_realised.SMALL, over_realised.FULL
    names = [{claim.name for claim in over_realised.claims(config)} for config in (laptop, paper)]
    assert "sample/500/standard-from-start" in names[0]
    assert "sample/1000/standard/printed" in names[1]
    other = over_realised.claims(dataclasses.replace(laptop, epochs=20))
    assert {claim.target for claim in other} == {0.01}
    fewer = {claim.name for claim in over_realised.claims(dataclasses.replace(paper, atoms=(200,), device="cuda"))}
    assert fewer < names[1]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("over-realised", {"atoms": (200, 100)}),
        ("over-realised", {"starts": ("somewhere",)}),
        ("over-realised", {"k": 30}),
        ("over-realised", {"atoms": (30,), "starts": ("local",)}),
        ("scaling", {"sizes": (10,)}),
        ("noise", {"sigmas": (0.2, 0.1)}),
        ("wrong-dictionary", {"directions": 1}),
        ("wrong-dictionary", {"p": 3000}),
        ("masking-theorem", {"visible": 400}),
        ("masking-theorem", {"signals": (2.0, 3.0)}),
        ("masked-early-stopping", {"problems": ("atoms-201",)}),
        ("masked-early-stopping", {"patience": 100}),
        ("dictionary-steps", {"methods": ("kfac", "muon")}),
        ("dictionary-steps", {"methods": ("adam", "kafc")}),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_anything_runs(name, wrong):
    with pytest.raises(LayerwiseError, match=WORDED):
        find(name).refuse_bad(dataclasses.replace(find(name).preset("smoke"), **wrong))
