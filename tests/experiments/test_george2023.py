"""Experiments on the eigenbasis of K-FAC: smoke presets hold what they claim, and claims can fail."""

import dataclasses

import jaxtyping
import pytest
from experiment_records import records

from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge

pytest.importorskip("sklearn")
NAMES = ("amortization", "decorrelation", "kfe-theorems")


@pytest.fixture(scope="module", params=NAMES)
def ran(request: pytest.FixtureRequest):
    experiment = find(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return experiment, records(experiment, experiment.preset("smoke"), [0])


def test_smoke_holds_what_it_claims(ran):
    experiment, found = ran
    claims = experiment.claims(experiment.preset("smoke"))
    assert claims
    assert [claim.name for claim in claims if judge(claim, found).status != HELD] == []


def test_every_claim_can_fail(ran):
    """Ratios that are one, gains that are losses, errors that are not rounding."""
    experiment, found = ran
    worse = {"nearer than others": -1e-3, "nearer than K-FAC": -1e-3}
    broken = [r | {"values": {name: worse.get(name, 1.0) for name in r["values"]}} for r in found]
    claims = experiment.claims(experiment.preset("smoke"))
    assert [claim.name for claim in claims if judge(claim, broken).status != NOT_HELD] == []


@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_claims_of_larger_presets_read_what_is_recorded(ran, preset: str):
    experiment, found = ran
    config = dataclasses.replace(experiment.preset(preset), seeds=2)
    again = [r | {"seed": seed} for r in found for seed in (0, 1)]
    assert all(judge(claim, again).n == 2 for claim in experiment.claims(config))


def test_figures_have_all_points(ran):
    experiment, found = ran
    (figure,) = experiment.figures(experiment.preset("smoke"), found)
    assert all(curve.y for panel in figure.panels for curve in panel.curves)
