"""Features of non-linear networks as an experiment: rows, claims that can fail, figures, bad options."""

import dataclasses

import jaxtyping
import pytest
from experiment_records import records

from layerwise.experiments.beyond import networks as networks
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.foundations.errors import InputError
from layerwise.studies.feature_learning.networks import Learned

EXPERIMENT = networks.EXPERIMENT


@pytest.fixture(scope="module")
def smoke():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return records(EXPERIMENT, EXPERIMENT.preset("smoke"), [0])


def small_claims():
    """Of preset smoke with one seed, which is enough here."""
    return EXPERIMENT.claims(dataclasses.replace(EXPERIMENT.preset("smoke"), seeds=1))


def test_smoke_holds_what_it_claims(smoke):
    claims = small_claims()
    assert claims
    assert all(judge(claim, smoke).status == HELD for claim in claims)


def swapped(found, first, second):
    """Records in which two members have changed places."""
    names = {first: second, second: first}
    return [
        record
        | {
            "values": {
                "/".join([names.get(key.split("/")[0], key.split("/")[0]), *key.split("/")[1:]]): value
                for key, value in record["values"].items()
            }
        }
        for record in found
    ]


def test_claims_fail_if_sgd_were_as_good(smoke):
    claims = small_claims()
    assert all(judge(claim, swapped(smoke, "sgd", "kfac")).status == NOT_HELD for claim in claims)


@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_every_claim_of_large_presets_reads_what_is_recorded(preset, smoke):
    config = EXPERIMENT.preset(preset)
    row = {k.removeprefix("kfac/"): v for k, v in smoke[0]["values"].items() if k.startswith("kfac/")}
    values = {f"{name}/{key}": value for name in config.members for key, value in row.items()} | {"start": 1.0}
    found = [{"cell": cell, "seed": 0, "values": values, "series": {}} for cell in config.cells]
    claims = EXPERIMENT.claims(config)
    assert len({claim.name for claim in claims}) == len(claims) >= 10 * len(config.cells)
    for claim in claims:
        assert set(claim.quantity(found)) == {0}, claim.name
    ratios = [claim for claim in claims if claim.name.endswith(("-dist", "-least", "-transfer"))]
    assert all(judge(dataclasses.replace(claim, seeds=1), found).status == NOT_HELD for claim in ratios)


def test_the_rate_is_that_of_the_least_held_out_loss(monkeypatch):
    """Not of the least distance or loss; the least distance over rates is recorded beside."""
    runs = iter(
        Learned(steps=[0, 40], dist=[1.0, dist], loss=[7.0, loss], score=score, transfer=dist)
        for dist, loss, score in [(0.1, 0.9, 0.5), (0.4, 0.8, 0.2), (0.3, 0.1, 0.6), (0.9, 0.7, 0.9)]
    )
    monkeypatch.setattr("layerwise.studies.feature_learning.networks.learn", lambda *a, **k: next(runs))
    config = dataclasses.replace(EXPERIMENT.preset("smoke"), members=("kfac",))
    (row,) = EXPERIMENT.run(config, EXPERIMENT.cells_of(config)[0], [0])
    assert (row.values["kfac/dist"], row.values["kfac/loss"], row.values["kfac/transfer"]) == (0.4, 0.8, 0.4)
    assert (row.values["kfac/least"], row.values["start"]) == (0.1, 7.0)
    assert row.values["kfac/rate"] == networks.MEMBERS["kfac"].rates[1]


def test_claims_are_of_members_that_run(smoke):
    config = dataclasses.replace(EXPERIMENT.preset("laptop"), members=("sgd", "kfac"))
    assert {claim.name.split("/")[1].split("-")[0] for claim in EXPERIMENT.claims(config)} == {"sgd", "kfac"}
    assert EXPERIMENT.claims(dataclasses.replace(config, members=("sgd", "adam"))) == []


def test_figures_show_every_member(smoke):
    config = EXPERIMENT.preset("smoke")
    (figure,) = EXPERIMENT.figures(config, smoke)
    for panel in figure.panels:
        assert [curve.label for curve in panel.curves] == ["SGD", "Adam", "KFAC"]
        assert all(len(curve.x) for curve in panel.curves)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cells": ("gausian-2",)}, "gaussian"),
        ({"members": ("kfca",)}, "kfac"),
        ({"members": ()}, "members with nothing in it"),
        ({"every": 0}, "every=0"),
    ],
)
def test_unknown_names_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        EXPERIMENT.refuse_bad(dataclasses.replace(EXPERIMENT.preset("smoke"), **options))


def test_a_cell_without_a_depth_is_refused():
    with pytest.raises(InputError, match="gaussian-2"):
        EXPERIMENT.refuse_bad(dataclasses.replace(EXPERIMENT.preset("smoke"), cells=("gaussian",)))
