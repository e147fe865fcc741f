"""Options of K-FAC and EKFAC: cells, claims that can fail, and variants that are what they are called."""

import dataclasses
from functools import cache

import jaxtyping
import pytest
from experiment_records import records

from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.george2023.ekfac_options import METHODS, VARIANTS, Config, cells
from layerwise.foundations.errors import InputError, NameLookupError
from layerwise.studies.fisher_geometry import autoencoder

pytest.importorskip("sklearn")

AS_CLAIMED = {
    "kfac/sampled": 19.0,
    "kfac/empirical": 25.0,
    "kfac/product": 25.0,
    "kfac/refresh-5": 17.3,
    "ekfac/empirical": 16.8,
    "ekfac/product": 17.0,
    "ekfac-ra/empirical": 17.6,
    "ekfac-ra/decay-0.99": 17.0,
}
"""Losses by cell; 16 where none is given, and K-FAC's others as its plain one."""


def made(**changed: float) -> list[dict]:
    losses = {cell.key: 19.0 if cell.key.startswith("kfac") else 16.2 for cell in cells(Config())}
    losses |= AS_CLAIMED | changed
    return [
        {"cell": key, "seed": seed, "values": {"best": loss}, "series": {}}
        for key, loss in losses.items()
        for seed in range(3)
    ]


@pytest.mark.parametrize(
    ("cell", "loss", "breaks"),
    [
        ("kfac/empirical", 20.0, {"sampled-kfac"}),
        ("ekfac/empirical", 16.1, {"sampled-ekfac"}),
        ("ekfac-ra/empirical", 16.5, {"sampled-ekfac-ra", "running-above-batch-empirical"}),
        ("kfac/product", 20.5, {"kfac-needs-split-damping"}),
        ("ekfac-ra/product", 18.0, {"ekfac-ra-needs-no-split"}),
        ("kfac/refresh-100", 17.5, {"refresh-kfac"}),
        ("ekfac/refresh-100", 17.9, {"refresh-kfac", "refresh-ekfac"}),
        ("ekfac-ra/refresh-100", float("inf"), {"refresh-ekfac-ra"}),
        ("ekfac-ra/decay-0", 17.0, {"decay-0"}),
        ("ekfac-ra/decay-0.95", 15.0, {"decay-0.95"}),
        ("ekfac-ra/decay-0.99", 16.1, {"decay-too-long"}),
        ("kfac/averaged", 17.0, {"averaged-kfac"}),
        ("ekfac/averaged", 18.0, {"averaged-ekfac"}),
        ("ekfac-ra/averaged", 18.0, {"averaged-ekfac-ra"}),
    ],
)
def test_each_claim_is_broken_by_its_own_cells(cell: str, loss: float, breaks: set[str]):
    claims = find("ekfac-options").claims(Config())
    assert all(judge(claim, made()).status == HELD for claim in claims)
    found = {claim.name for claim in claims if judge(claim, made(**{cell: loss})).status == NOT_HELD}
    assert found == breaks


def test_running_scalings_may_not_be_far_above_those_of_a_batch():
    claims = find("ekfac-options").claims(Config())
    found = {claim.name for claim in claims if judge(claim, made(**{"ekfac/sampled": 15.0})).status == NOT_HELD}
    assert "running-below-batch" in found


def test_a_variant_changes_what_it_says(monkeypatch: pytest.MonkeyPatch):
    """The optimizer of every cell, as the search is given it."""
    experiment, seen = find("ekfac-options"), {}
    config = dataclasses.replace(Config(), rates=(0.1,), dampings=(0.1,))

    class Seen(Exception):
        pass

    def look(problem, method, **given):
        optimizer = method.make(problem.model(0), lr=1.0, damping=0.1, **method.fixed)  # takes all of its options
        seen["now"] = (type(optimizer).__name__, method.fixed)
        raise Seen

    monkeypatch.setattr("layerwise.training.search", look)
    monkeypatch.setattr(autoencoder, "problem", cache(autoencoder.problem))
    found = {}
    for cell in experiment.cells_of(config):
        with pytest.raises(Seen):
            next(iter(experiment.run(config, cell, [0])))
        found[cell.key] = seen["now"]
    assert [name for name, _ in found.values()].count("KFAC") == 6
    assert {key for key, (_, fixed) in found.items() if fixed.get("scaling") == "running"} == {
        f"ekfac-ra/{variant}" for variant in VARIANTS
    }
    for method in METHODS:
        plain = found[f"{method}/sampled"][1]
        assert (plain["estimator"], plain["refresh_every"], plain["factor_decay"]) == ("sampled", 50, 0.0)
        assert found[f"{method}/empirical"][1]["estimator"] == "empirical"
        assert found[f"{method}/product"][1]["damping_split"] == "exact"
        assert found[f"{method}/refresh-5"][1]["refresh_every"] == 5
        assert found[f"{method}/averaged"][1]["factor_decay"] == 0.95
    assert found["ekfac-ra/decay-0.99"][1]["scaling_decay"] == 0.99


def test_each_seed_has_its_own_best_options():
    experiment = find("ekfac-options")
    config = dataclasses.replace(experiment.preset("smoke"), variants=("empirical",), epochs=2, rates=(0.3, 1e-6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        together = records(experiment, config, [0, 1])
        (alone,) = records(experiment, config, [1])
    assert together[1]["values"]["chosen/lr"] == alone["values"]["chosen/lr"]
    assert together[1]["values"]["best"] == pytest.approx(alone["values"]["best"], rel=1e-2)
    assert together[0]["values"]["best"] != together[1]["values"]["best"]


def test_a_grid_on_which_nothing_trains_is_a_record():
    experiment = find("ekfac-options")
    config = dataclasses.replace(experiment.preset("smoke"), variants=("empirical",), epochs=1, rates=(1e20, 1e21))
    (record,) = records(experiment, config, [0])
    assert record["values"]["best"] == float("inf")
    assert record["values"]["diverged"] == 2
    assert not record["series"]
    assert experiment.figures(config, [record])


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"methods": ("sgd",)}, NameLookupError, "sgd"),
        ({"variants": ("sample",)}, NameLookupError, "sampled"),
        ({"variants": ()}, InputError, "at least one"),
        ({"methods": ("kfac",), "variants": ("decay-0",)}, InputError, "ekfac-ra"),
    ],
)
def test_settings_that_cannot_be(wrong: dict, error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        cells(dataclasses.replace(Config(), **wrong))
