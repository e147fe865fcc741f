"""Experiments on the eigenbasis of K-FAC: smoke presets hold what they claim, and claims can fail."""

import dataclasses
import json
from functools import cache

import jaxtyping
import pytest
from experiment_records import records

from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.george2023.autoencoder import LABELS
from layerwise.foundations.errors import InputError
from layerwise.studies.fisher_geometry import autoencoder
from layerwise.training.stacked import refuse_other_rates

pytest.importorskip("sklearn")
NAMES = ("amortization", "autoencoder", "decorrelation", "ekfac-options", "kfe-theorems")


@cache
def smoke(name: str):
    experiment = find(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return experiment, records(experiment, experiment.preset("smoke"), [0])


@pytest.fixture(scope="module", params=NAMES)
def ran(request: pytest.FixtureRequest):
    return smoke(request.param)


def test_smoke_holds_what_it_claims(ran):
    experiment, found = ran
    claims = experiment.claims(experiment.preset("smoke"))
    assert claims
    assert [claim.name for claim in claims if judge(claim, found).status != HELD] == []


def test_every_claim_can_fail(ran):
    """Ratios that are one, gains that are losses, errors that are not rounding."""
    experiment, found = ran
    worse = {"nearer than others": -1e-3, "nearer than K-FAC": -1e-3}
    broken = [r | {"values": {name: worse.get(name, 1.0) for name in r["values"]}} for r in found]  # all methods alike
    claims = experiment.claims(experiment.preset("smoke"))
    assert [claim.name for claim in claims if judge(claim, broken).status != NOT_HELD] == []


def test_the_whole_grid_and_the_choice_are_recorded():
    experiment, found = smoke("autoencoder")
    config = experiment.preset("smoke")
    for record in found:
        tried = json.loads(record["values"]["trials"])
        names = record["values"]["options"].split(", ")
        assert len(tried) == config.trials
        assert all(len(row) == len(names) + 2 for row in tried)
        best = min(tried, key=lambda row: row[-1])
        assert [record["values"][f"chosen/{name}"] for name in names] == best[:-2]
        assert record["values"]["best"] == pytest.approx(best[-1], abs=1e-3)
        assert len(record["series"]["step"]) == config.epochs + 1


def test_a_method_that_never_trains_is_a_record():
    experiment = find("autoencoder")
    config = dataclasses.replace(experiment.preset("smoke"), methods=("sgd",), rates=(1e20, 1e21), epochs=1)
    (record,) = records(experiment, config, [0])
    assert record["values"]["diverged"] == 2
    assert record["values"]["best"] == float("inf")
    assert "final" not in record["values"]
    assert experiment.figures(config, [record])


@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_claims_of_larger_presets_read_what_is_recorded(ran, preset: str):
    experiment, found = ran
    config = dataclasses.replace(experiment.preset(preset), seeds=2)
    cells = [cell.key for cell in experiment.cells_of(config)]
    again = [found[k % len(found)] | {"cell": c, "seed": seed} for k, c in enumerate(cells) for seed in (0, 1)]
    assert all(judge(claim, again).n == 2 for claim in experiment.claims(config))


def test_figures_have_all_points(ran):
    experiment, found = ran
    (figure,) = experiment.figures(experiment.preset("smoke"), found)
    assert all(curve.y for panel in figure.panels for curve in panel.curves)


def test_a_method_that_never_trains_fails_its_claims():
    """Infinite losses are recorded, and neither hide the seed nor hold anything."""
    experiment = find("autoencoder")
    config = dataclasses.replace(
        experiment.preset("smoke"), methods=("sgd", "kfac"), rates=(1e20, 1e21), epochs=1, choosing=1
    )
    found = records(experiment, config, [0])
    assert [record["values"]["best"] for record in found] == [float("inf")] * 2
    assert all(not record["series"] for record in found)
    (claim,) = experiment.claims(config)
    assert judge(claim, found).status == NOT_HELD
    assert experiment.figures(config, found)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"rates": (0.3,), "trials": 3}, "a single rate"), ({"methods": ("sgd", "sgd")}, "each once")],
)
def test_settings_of_the_search_that_cannot_be(wrong: dict, says: str):
    experiment = find("autoencoder")
    with pytest.raises(InputError, match=says):
        experiment.refuse_bad(dataclasses.replace(experiment.preset("smoke"), **wrong))


@pytest.mark.parametrize("name", LABELS)
def test_methods_that_are_searched_as_one_program_can_be(name: str):
    """Their updates are in proportion to the rate, whatever other options the grid has."""
    chosen = autoencoder.method(name, (1.0, 0.1), (0.1, 0.01), 5)
    others = {option: values[0] for option, values in chosen.grid.items() if option != "lr"}
    refuse_other_rates(chosen.make(autoencoder.autoencoder((6, 4)), lr=1.0, **others, **chosen.fixed))
