"""Real images: smoke, claims that can fail, and what is said where MNIST is missing."""

import dataclasses
import math

import jaxtyping
import pytest
from experiment_records import records

from layerwise.data.folder import MissingDataError
from layerwise.experiments import features_real_data as real_data
from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.foundations.errors import InputError

pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'layerwise[data]'")


@pytest.fixture(scope="module")
def smoke():
    """Records of preset smoke, with annotations unchecked for speed; tests/studies checks them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        yield records(real_data.EXPERIMENT, real_data.EXPERIMENT.preset("smoke"), [0])


def test_smoke_holds_what_it_claims_and_draws(smoke):
    experiment = find("real-data")
    assert experiment is real_data.EXPERIMENT
    config = experiment.preset("smoke")
    assert experiment.claims(config)
    for claim in experiment.claims(config):
        verdict = judge(claim, smoke)
        assert verdict.as_expected, (claim.name, verdict.detail, verdict.values)
    figures = experiment.figures(config, smoke)
    assert {figure.name for figure in figures} == {"real-data-known", "real-data-transfer", "real-data-movement"}
    for figure in figures:
        for panel in figure.panels:
            assert panel.curves
            for curve in panel.curves:
                assert len(curve.x) == len(curve.y) > 0, (figure.name, curve.label)
                assert all(math.isfinite(y) for y in curve.y)


def test_a_seed_is_the_same_alone_and_beside_others(smoke):
    config = dataclasses.replace(real_data.EXPERIMENT.preset("smoke"), parts=("rotated",))
    beside = [r for r in records(real_data.EXPERIMENT, config, [1, 0]) if r["seed"] == 0]
    assert beside == [r for r in smoke if r["cell"] == "digits/rotated"]


def test_every_member_is_tried_at_as_many_rates():
    config = real_data.Config()
    assert set(real_data.CENTRES) == set(real_data.LABELS)
    assert {len(config.rates(name, column)) for name in real_data.LABELS for column in range(3)} == {3}


@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_every_claim_finds_its_values(preset, smoke):
    """On records of the same cells."""
    config = real_data.EXPERIMENT.preset(preset)
    found = [r | {"cell": r["cell"].replace("digits", data)} for r in smoke for data in config.data]
    claims = real_data.claims(config)
    assert len(claims) == len({claim.name for claim in claims}) > 10
    for claim in claims:
        assert set(claim.quantity(found)) == {0}, claim.name


def test_claims_can_fail():
    members = dict.fromkeys(real_data.LABELS, 0.8)
    target = {f"{name}/target@10": value for name, value in members.items()}
    labels = target | {f"{name}/source": 0.99 for name in members}
    labels |= {"pixels/target@10": 0.9, "random/target@10": 0.85, "muon/target@10": 0.86}
    labels |= {"kfac-damped/target@10": 0.84}
    labels |= {"sgd/top": 0.9, "kfac/bottom": 0.7, "foof/bottom": 0.9}
    dist = {"sgd": 0.5, "adam": 0.1, "soap": 0.1, "foof": 0.3, "kfac": 0.2, "ekfac": 0.2}
    known = {f"{name}/dist": d for name, d in dist.items()} | {"ekfac/least_loss": 0.001, "adam/least_loss": 0.002}
    values = {"known": known, "labels": labels, "rotated": {"adam/dist": 0.3, "soap/dist": 0.1}}

    def statuses(part="", **changed):
        new = {key.replace("__", "@").replace("_", "/", 1): value for key, value in changed.items()}
        found = [
            {"cell": f"digits/{p}", "seed": 0, "values": v | (new if p == part else {})} for p, v in values.items()
        ]
        claims = real_data.claims(real_data.Config(seeds=1))
        return {claim.name.removeprefix("digits/"): judge(claim, found) for claim in claims}

    right = statuses()
    assert all(verdict.as_expected for verdict in right.values())
    refuted = {"known/inverse-before-adam", "labels/kfac-before-untrained"}
    assert {name for name, verdict in right.items() if verdict.status == NOT_HELD} == refuted
    assert statuses("known", kfac_dist=0.05)["known/inverse-before-adam"].status == HELD
    assert statuses("known", sgd_dist=0.2)["known/sgd/dist"].status == NOT_HELD
    assert statuses("known", soap_dist=0.6)["known/soap-before-sgd"].status == NOT_HELD
    assert statuses("known", ekfac_least_loss=0.003)["known/ekfac-has-less-loss"].status == NOT_HELD
    assert statuses("rotated", adam_dist=0.11)["rotated/adam-needs-pixels"].status == NOT_HELD
    assert statuses("rotated", soap_dist=0.29)["rotated/soap-before-adam"].status == NOT_HELD
    assert statuses("labels", sgd_source=0.5)["labels/source"].status == NOT_HELD
    assert statuses("labels", soap_target__10=0.95)["labels/pixels-before-all"].status == NOT_HELD
    assert statuses("labels", kfac_target__10=0.9)["labels/kfac-before-untrained"].status == HELD
    assert statuses("labels", muon_target__10=0.7)["labels/muon-before-kfac"].status == NOT_HELD
    assert statuses("labels", **{"kfac-damped_target__10": 0.7})["labels/damping-helps"].status == NOT_HELD
    assert statuses("labels", kfac_bottom=0.1)["labels/kfac/bottom"].status == NOT_HELD


def test_missing_mnist_is_said(monkeypatch, tmp_path):
    config = dataclasses.replace(real_data.EXPERIMENT.preset("smoke"), data=("mnist",))
    cell = real_data.cells(config)[0]
    monkeypatch.delenv("LAYERWISE_DATA", raising=False)
    with pytest.raises(MissingDataError, match="LAYERWISE_DATA is not set"):
        next(real_data.run(config, cell, [0]))
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match="hf download ylecun/mnist"):
        next(real_data.run(config, cell, [0]))


def test_unknown_data_and_parts_are_refused():
    config = real_data.EXPERIMENT.preset("smoke")
    with pytest.raises(InputError, match="labels"):
        real_data.cells(dataclasses.replace(config, parts=("label",)))
    other = dataclasses.replace(config, data=("mnits",))
    with pytest.raises(InputError, match="mnist"):
        next(real_data.run(other, real_data.cells(other)[0], [0]))
