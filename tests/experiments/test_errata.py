"""Errata of Zhang et al. (2025): both readings are judged, and each verdict could have been the other."""

import pytest
from experiment_records import records

from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.zhang2025 import errata as errata

EXPERIMENT = errata.EXPERIMENT


@pytest.fixture(scope="module")
def smoke():
    config = EXPERIMENT.preset("smoke")
    return records(EXPERIMENT, config, range(config.seeds))


def test_printed_readings_fail_and_corrected_ones_hold(smoke):
    claims = EXPERIMENT.claims(EXPERIMENT.preset("smoke"))
    assert len(claims) == 2 * len(errata.ERRATA) + 1 == 27
    assert {c.origin for c in claims if c.name.endswith("printed")} == {"misprint"}
    assert {c.origin for c in claims if not c.name.endswith("printed")} == {"ours"}
    doubtful = {c.name for c in claims if c.note and c.origin == "misprint"}
    assert doubtful == {f"places/{name}/printed" for name in ("locoprop", "ratio", "self-normalised")}
    for claim in claims:
        verdict = judge(claim, smoke)
        assert verdict.status == (NOT_HELD if claim.name.endswith("printed") else HELD), claim.name
        assert verdict.as_expected


def test_verdicts_follow_the_numbers(smoke):
    """With the readings exchanged every claim ends the other way."""
    turned = [
        record
        | {
            "values": {
                key.replace("printed", "x").replace("corrected", "printed").replace("x", "corrected"): value
                for key, value in record["values"].items()
            }
        }
        for record in smoke
    ]
    for claim in EXPERIMENT.claims(EXPERIMENT.preset("smoke")):
        if not claim.name.endswith("seeds-differ"):
            assert judge(claim, turned).as_expected is False, claim.name


def test_a_seed_that_is_ignored_is_noticed(smoke):
    (claim,) = (c for c in EXPERIMENT.claims(EXPERIMENT.preset("smoke")) if c.name.endswith("seeds-differ"))
    assert judge(claim, [smoke[0], smoke[0] | {"seed": 1}]).status == NOT_HELD


def test_figure_shows_both_readings_at_every_place(smoke):
    (figure,) = EXPERIMENT.figures(EXPERIMENT.preset("smoke"), smoke)
    (panel,) = figure.panels
    assert [curve.label for curve in panel.curves] == ["as printed", "corrected"]
    assert all(len(curve.x) == len(errata.ERRATA) for curve in panel.curves)


def test_places_do_not_share_draws(smoke):
    assert len({record["values"]["foof/printed"] for record in smoke}) == len(smoke)


def test_errors_are_of_the_sizes_that_theory_gives(smoke):
    """Sizes known beforehand, so that an instance that is set up wrongly is seen."""
    for record in smoke:
        values = record["values"]
        assert values["derivative/printed"] == pytest.approx(2, abs=0.05)
        assert values["locoprop/printed"] == pytest.approx(1, abs=1e-9)
        assert values["noise/printed"] == pytest.approx(0.8, abs=0.05)
        assert values["low-anisotropy/printed"] == pytest.approx(0.28, abs=0.05)
        assert 0.8 < values["ratio/printed"] <= 1  # ρ² is about n/dx = 1/64
        # Whitened samples deviate by about 2√(dx/n) + dx/n = 0.83, samples of a decaying spectrum by less.
        assert 0.15 < values["concentration/printed"] < 0.5
