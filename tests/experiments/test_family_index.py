"""The family on the single-index problem as experiments: rows, claims that can fail, figures."""

import dataclasses
import math

import jaxtyping
import pytest
from experiment_records import records

from layerwise.experiments import zhang2025_family_index as by_step
from layerwise.experiments import zhang2025_family_trained as trained
from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.foundations.errors import InputError
from layerwise.studies.feature_learning.index_family import INDEX_MEMBERS

MODULES = {"family-index": by_step, "family-trained": trained}


@pytest.fixture(scope="module")
def smoke():
    """Records of every smoke preset, seed 0, with annotations unchecked for speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return {name: records(m.EXPERIMENT, m.EXPERIMENT.preset("smoke"), [0]) for name, m in MODULES.items()}


@pytest.mark.parametrize("name", MODULES)
def test_smoke_holds_what_it_claims_and_draws(name, smoke):
    experiment = find(name)
    config = experiment.preset("smoke")
    for claim in experiment.claims(config):
        verdict = judge(claim, smoke[name])
        assert verdict.status == HELD, (claim.name, verdict.detail, verdict.values)
    for figure in experiment.figures(config, smoke[name]):
        for curve in (curve for panel in figure.panels for curve in panel.curves):
            assert len(curve.x) == len(curve.y) > 0, (figure.name, curve.label)
            assert all(math.isfinite(y) for y in curve.y)
    assert experiment.figures(config, [])


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_every_claim_finds_its_values(name, preset, smoke):
    experiment = MODULES[name].EXPERIMENT
    config = experiment.preset(preset)
    if name == "family-index":  # the claims of these sizes, at the points of the small run
        small = experiment.preset("smoke")
        config = dataclasses.replace(config, anisotropies=small.anisotropies, dampings=small.dampings)
    claims = experiment.claims(config)
    assert len(claims) == len({claim.name for claim in claims}) >= 12
    for claim in claims:
        assert set(claim.quantity(smoke[name])) == {0}, claim.name


def test_a_trial_is_the_same_beside_others(smoke):
    experiment = by_step.EXPERIMENT
    config = dataclasses.replace(experiment.preset("smoke"), anisotropies=(0.9,))
    cell = experiment.cells_of(config)[0]
    alone, beside = list(experiment.run(config, cell, [0])), list(experiment.run(config, cell, [1, 0]))
    assert alone[0] == beside[1]
    assert all(smoke["family-index"][0]["values"][key] == value for key, value in alone[0].values.items())


def test_every_member_has_a_claim_about_its_step():
    names = {claim.name.split("/")[1].split("@")[0] for claim in by_step.claims(by_step.EXPERIMENT.preset("laptop"))}
    for member in INDEX_MEMBERS:
        assert names & {f"{member}-{what}" for what in ("against-sgd", "share", "near-theory")}, member


def test_fewer_units_than_inputs_are_refused():
    config = dataclasses.replace(by_step.EXPERIMENT.preset("smoke"), dh=10)
    with pytest.raises(InputError, match="dh ≥ dx"):
        by_step.EXPERIMENT.cells_of(config)


def changed(found, cell, **values):
    return [
        r | {"values": r["values"] | {k.replace("__", "/"): v for k, v in values.items()}} if r["cell"] == cell else r
        for r in found
    ]


def statuses(module, found):
    config = dataclasses.replace(module.EXPERIMENT.preset("smoke"), **({"steps": 40} if module is trained else {}))
    return {claim.name.split("/", 1)[1]: judge(claim, found).status for claim in module.claims(config)}


def test_claims_fail_where_the_numbers_say_otherwise(smoke):
    found = smoke["family-index"]
    values = found[0]["values"]
    like_sgd = {f"foof@0.9/{m}": values[f"sgd@0.9/{m}"] for m in ("correlation", "share")}
    wrong = statuses(by_step, changed(found, "anisotropies", **like_sgd))
    assert wrong["foof-against-sgd"] == NOT_HELD
    assert wrong["kfac-against-sgd"] == HELD
    like_foof = {f"{m}@0.9/correlation": values["foof@0.9/correlation"] for m in ("sign", "sgd", "soap")}
    wrong = statuses(by_step, changed(found, "anisotropies", **like_foof))
    for name in ("sign-against-sgd", "sign-near-theory"):
        assert wrong[name] == NOT_HELD, name
    wrong = statuses(
        by_step, changed(found, "anisotropies", **{"muon@0.9/share": 0.6, "ngd@0.9/share": 0.8, "soap@0.9/gap": 0.9})
    )
    assert {wrong[name] for name in ("muon-share", "ngd-against-sgd", "soap-gap")} == {NOT_HELD}
    best = {"kfac-relative@1/correlation": 0.99, "ngd@1/share": 0.99, "mahalanobis@1/share": 0.9}
    wrong = statuses(by_step, changed(found, "dampings", **best))
    for name in ("kfac-relative-best-correlation", "ngd-best-share", "mahalanobis-best-share"):
        assert wrong[name] == NOT_HELD, name


def test_claims_about_training_fail_where_a_member_misses(smoke):
    names = trained.MIDDLE
    good = {f"{name}/correlation": 0.9 for name in names} | {f"{name}/fresh": 0.7 for name in names}
    good |= {"ngd/fresh": 1.0, "mahalanobis/fresh": 0.9}
    assert set(statuses(trained, changed(smoke["family-trained"], "trained", **good)).values()) == {HELD}
    bad = good | {"adam/correlation": 0.3, "ngd/fresh": 0.7}
    wrong = statuses(trained, changed(smoke["family-trained"], "trained", **bad))
    assert {name for name, status in wrong.items() if status == NOT_HELD} == {
        "adam/correlation",
        "adam-near-kfac",
        "ngd-overfits",
    }
