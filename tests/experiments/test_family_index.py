"""The family on the single-index problem as experiments: rows, claims that can fail, figures."""

import dataclasses
import math

import jaxtyping
import pytest
from experiment_records import records

from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.zhang2025 import family_index as by_step
from layerwise.experiments.zhang2025 import family_trained as trained
from layerwise.foundations.errors import InputError
from layerwise.studies.feature_learning.index_family import (
    INDEX_MEMBERS,
    member_step,
    predicted_recovery,
    recovery,
    turned_trial,
)

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
    config = dataclasses.replace(experiment.preset("smoke"), seeds=1)
    assert experiment.claims(config)
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
    assert {claim.origin for claim in claims if "near-theory" not in claim.name} == {
        "ours"
    }  # Appendix D has no numbers
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
    options = {"seeds": 1} | ({"steps": 40} if module is trained else {})
    config = dataclasses.replace(module.EXPERIMENT.preset("smoke"), **options)
    twice = [*found, *({**record, "seed": record["seed"] + 100} for record in found)]  # one seed refutes no share
    return {claim.name.split("/", 1)[1]: judge(claim, twice).status for claim in module.claims(config)}


def failed(module, found):
    return {name for name, status in statuses(module, found).items() if status == NOT_HELD}


def test_claims_fail_where_the_numbers_say_otherwise(smoke):
    found = smoke["family-index"]
    assert failed(by_step, changed(found, "theory", **{"foof-sgd": 0.0, "sign-sgd": 0.1, "kfac": 0.15})) == {
        "foof-against-sgd",
        "sign-against-sgd",
        "kfac-near-theory",
    }
    wrong = {"muon@0.9/share": 0.6, "ngd@0.9/share": 0.8, "soap@0.9/gap": 0.9, "foof@0/correlation": 0.1}
    assert failed(by_step, changed(found, "anisotropies", **wrong)) == {
        "muon-share",
        "ngd-against-sgd",
        "soap-gap",
        "foof-against-sgd@0",
    }
    best = {"kfac-relative@10/correlation": 0.99, "ngd@10/share": 0.99, "mahalanobis@10/share": 0.9}
    assert failed(by_step, changed(found, "dampings", **best)) == {
        "kfac-relative-best-correlation",
        "ngd-best-share",
        "mahalanobis-best-share",
    }


def test_one_lemma_in_place_of_the_other_is_noticed(smoke):
    """They differ by more than the claims allow."""
    for preset in ("smoke", "laptop", "paper"):
        config = by_step.EXPERIMENT.preset(preset)
        theory = predicted_recovery(config.setting(config.largest), config.damping)
        (claim,) = (claim for claim in by_step.claims(config) if claim.name.endswith("/foof-near-theory"))
        assert theory["foof"] - theory["sgd"] > 1.5 * claim.target[1]


def test_means_are_of_trials_of_their_own(smoke):
    """Eight of each seed, of which no other seed and no other cell has one."""
    config = by_step.EXPERIMENT.preset("smoke")
    setting = config.setting(0.9)
    first = by_step.AVERAGED_FROM
    steps = [(t, member_step("foof", t, config.damping)) for t in (turned_trial(setting, first + i) for i in range(8))]
    mean = sum(recovery(step, trial.index).correlation for trial, step in steps) / 8
    values = next(r["values"] for r in smoke["family-index"] if r["cell"] == "theory")
    assert values["foof"] == pytest.approx(mean - predicted_recovery(setting, config.damping)["foof"])


def test_short_training_claims_fail_where_nothing_is_learned(smoke):
    found = smoke["family-trained"]
    config = dataclasses.replace(trained.EXPERIMENT.preset("smoke"), seeds=1)
    idle = {f"{name}/fresh": found[0]["values"]["start"] for name in trained.MIDDLE}
    idle |= {f"{name}/correlation": 0.2 for name in trained.MIDDLE}
    verdicts = [judge(claim, changed(found, "trained", **idle)) for claim in trained.claims(config)]
    assert {verdict.status for verdict in verdicts} == {NOT_HELD}
    one = changed(found, "trained", **{"adam/fresh": 2 * found[0]["values"]["start"]})
    failing = [claim.name for claim in trained.claims(config) if judge(claim, one).status == NOT_HELD]
    assert failing == ["trained/all-learn"]


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
