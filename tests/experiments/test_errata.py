"""Errata of all papers: both readings are judged, and each verdict could have been the other."""

import pytest
from experiment_records import smoke

from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.george2023 import regime_errata
from layerwise.experiments.wu2024 import anchor_errata, hessian_errata, masking_errata
from layerwise.experiments.zhang2025 import errata

PLACES = {
    module.EXPERIMENT.name: module.PLACES
    for module in (errata, regime_errata, anchor_errata, hessian_errata, masking_errata)
}
every = pytest.mark.parametrize("name", PLACES)


def claims_of(name: str) -> list:
    return find(name).claims(find(name).preset("smoke"))


@every
def test_printed_readings_fail_and_corrected_ones_hold(name):
    claims = claims_of(name)
    assert len(claims) == 2 * len(PLACES[name]) + 1
    assert {c.origin for c in claims if c.name.endswith("printed")} == {"misprint"}
    assert {c.origin for c in claims if not c.name.endswith("printed")} == {"ours"}
    for claim in claims:
        verdict = judge(claim, smoke(name))
        assert verdict.status == (NOT_HELD if claim.name.endswith("printed") else HELD), claim.name
        assert verdict.as_expected


def test_a_scanned_text_may_be_damaged():
    doubtful = {c.name for c in claims_of("errata") if c.note and c.origin == "misprint"}
    assert doubtful == {f"places/{name}/printed" for name in ("locoprop", "ratio", "self-normalised")}


@every
def test_verdicts_follow_the_numbers(name):
    """With the readings exchanged every claim ends the other way."""
    other = {"printed": "corrected", "corrected": "printed"}
    turned = []
    for record in smoke(name):
        places = {tuple(key.split("/")): value for key, value in record["values"].items()}
        turned.append(record | {"values": {f"{place}/{other[kind]}": x for (place, kind), x in places.items()}})
    pairs = [claim for claim in claims_of(name) if not claim.name.endswith("seeds-differ")]
    assert [claim.name for claim in pairs if judge(claim, turned).as_expected] == []


@every
def test_a_seed_that_is_ignored_is_noticed(name):
    (claim,) = (c for c in claims_of(name) if c.name.endswith("seeds-differ"))
    first = smoke(name)[0]
    assert judge(claim, [first, first | {"seed": 1}]).status == NOT_HELD


@every
def test_figure_shows_both_readings_at_every_place(name):
    experiment = find(name)
    for found, labels in ((smoke(name), ["as printed", "corrected"]), ([], [])):
        (figure,) = experiment.figures(experiment.preset("smoke"), found)
        (panel,) = figure.panels
        assert [curve.label for curve in panel.curves] == labels
        assert all(len(curve.x) == len(PLACES[name]) for curve in panel.curves)


def test_places_do_not_share_draws():
    assert len({record["values"]["foof/printed"] for record in smoke("errata")}) == 2


def test_errors_are_of_the_sizes_that_theory_gives():
    """Sizes known beforehand, so that an instance that is set up wrongly is seen."""
    for record in smoke("errata"):
        values = record["values"]
        assert values["derivative/printed"] == pytest.approx(2, abs=0.05)
        assert values["locoprop/printed"] == pytest.approx(1, abs=1e-9)
        assert values["noise/printed"] == pytest.approx(0.8, abs=0.05)
        assert values["low-anisotropy/printed"] == pytest.approx(0.28, abs=0.05)
        assert 0.8 < values["ratio/printed"] <= 1  # ρ² is about n/dx = 1/64
        # Whitened samples deviate by about 2√(dx/n) + dx/n = 0.83, samples of a decaying spectrum by less.
        assert 0.15 < values["concentration/printed"] < 0.5
