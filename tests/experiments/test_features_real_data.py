"""Real images: smoke, claims that can fail, and what is said where MNIST is missing."""

import dataclasses
import math

import jaxtyping
import pytest
import torch
from experiment_records import records

from layerwise.data.folder import MissingDataError
from layerwise.experiments.beyond import real_data as real_data
from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.foundations.errors import InputError
from layerwise.studies.feature_learning import label_transfer

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
    config = dataclasses.replace(experiment.preset("smoke"), seeds=1)
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
    labels |= {"pixels/target@10": 0.9, "random/target@10": 0.85, "muon/target@10": 0.86, "soap/target@10": 0.87}
    labels |= {"kfac-damped/target@10": 0.84}
    labels |= {"sgd/top": 0.9, "kfac/bottom": 0.7, "foof/bottom": 0.9}
    dist = {"sgd": 0.5, "adam": 0.1, "soap": 0.1, "foof": 0.3, "kfac": 0.2, "ekfac": 0.2}
    known = {f"{name}/dist": d for name, d in dist.items()} | {"ekfac/least_loss": 0.001, "adam/least_loss": 0.002}
    values = {"known": known, "labels": labels, "rotated": {"adam/dist": 0.3, "soap/dist": 0.1}}

    def statuses(part="", **changed):
        new = {key.replace("__", "@").replace("_", "/", 1): value for key, value in changed.items()}
        found = [
            {"cell": f"digits/{p}", "seed": seed, "values": v | (new if p == part else {})}
            for p, v in values.items()
            for seed in (0, 1)  # of one seed, no share is refuted
        ]
        claims = real_data.claims(real_data.Config(seeds=2))
        return {claim.name.removeprefix("digits/"): judge(claim, found) for claim in claims}

    right = statuses()
    assert all(verdict.as_expected for verdict in right.values())
    assert {verdict.status for verdict in right.values()} == {HELD}
    assert statuses("known", sgd_dist=0.2)["known/sgd/dist"].status == NOT_HELD
    assert statuses("known", adam_dist=0.45)["known/adam/dist"].status == NOT_HELD
    assert statuses("known", adam_dist=0.45)["known/adam-before-sgd"].status == NOT_HELD
    assert statuses("known", soap_dist=0.3)["known/soap/dist"].status == NOT_HELD
    assert statuses("known", ekfac_least_loss=0.003)["known/ekfac-has-less-loss"].status == NOT_HELD
    assert statuses("rotated", adam_dist=0.105)["rotated/adam-needs-pixels"].status == NOT_HELD
    assert statuses("rotated", soap_dist=0.29)["rotated/soap-before-adam"].status == NOT_HELD
    assert statuses("rotated", soap_dist=0.29)["rotated/soap/dist"].status == NOT_HELD
    assert statuses("labels", sgd_source=0.5)["labels/source"].status == NOT_HELD
    assert statuses("labels", soap_target__10=0.95)["labels/pixels-before-all"].status == NOT_HELD
    assert statuses("labels", kfac_target__10=0.86)["labels/kfac-not-before-untrained"].status == NOT_HELD
    assert statuses("labels", soap_target__10=0.79)["labels/soap-before-kfac"].status == NOT_HELD
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
    with pytest.raises(InputError, match="mnist"):
        real_data.cells(dataclasses.replace(config, data=("mnits",)))


def test_one_seed_of_three_does_not_decide_about_kfac():
    (claim,) = [c for c in real_data.claims(real_data.Config(seeds=3)) if c.name.endswith("kfac-not-before-untrained")]

    def status(*gains):
        values = [{"kfac/target@10": 0.5 + gain, "random/target@10": 0.5} for gain in gains]
        return judge(claim, [{"cell": "digits/labels", "seed": s, "values": v} for s, v in enumerate(values)]).status

    assert status(-0.1, -0.1, 0.1) == HELD
    assert status(-0.1, 0.1, 0.1) == HELD  # as probable as not, were it half of the seeds
    assert status(0.1, 0.1, 0.1) == NOT_HELD


@pytest.mark.parametrize(
    ("changed", "claimed"),
    [
        ({}, {"known", "rotated", "moved", "labels"}),
        ({"steps": 5}, {"moved", "labels"}),
        ({"label_steps": 20}, {"known", "rotated", "moved"}),
        ({"label_steps": 0}, {"known", "rotated"}),
        ({"each": (2, 5)}, {"known", "rotated", "moved"}),
        ({"parts": ("rotated",)}, set()),
        ({"parts": ("labels",), "label_steps": 8}, {"moved"}),
    ],
)
def test_each_part_is_claimed_by_its_own_steps(changed, claimed):
    claims = real_data.claims(real_data.Config(**changed))
    kinds = {"moved" if c.name.endswith(("/top", "/bottom", "/learned")) else c.name.split("/")[1] for c in claims}
    assert kinds == claimed


def test_the_width_is_said_as_it_is():
    (claim,) = [c for c in real_data.claims(real_data.Config(width=77)) if c.name.endswith("pixels-before-all")]
    assert "77 units" in claim.statement


@pytest.mark.parametrize("part", real_data.PARTS)
def test_a_part_alone_has_figures_with_panels(part, smoke):
    config = dataclasses.replace(real_data.EXPERIMENT.preset("smoke"), parts=(part,))
    found = real_data.figures(config, [r for r in smoke if r["cell"].endswith(part)])
    assert found
    assert all(figure.panels and all(panel.curves for panel in figure.panels) for figure in found)


# --- How a rate is chosen -----------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """A function from offsets to the values of both parts, with two members on few images."""
    for names in ("KNOWN", "ROTATED"):
        monkeypatch.setattr(real_data, names, ("sgd", "adam"))
    monkeypatch.setattr(real_data, "LABELS", {"sgd": "SGD", "adam": "Adam"})
    x, y = (part[:400] for part in real_data.Config().images("digits"))

    def values(*offsets):
        config = real_data.Config(offsets=offsets, steps=5, label_steps=5, batch=64, width=8, draws=2, each=(2,))
        return real_data.with_features(config, x, 0, False).values, real_data.with_labels(config, x, y, 0, 1).values

    return values


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_best_rate_is_chosen_whatever_its_place(small, name):
    low, high = small(-3.0), small(0.0)
    for both in (small(-3.0, 0.0), small(0.0, -3.0)):
        for part, by in ((0, "dist"), (0, "least_loss"), (1, "held_loss")):
            alone = [found[part][f"{name}/{by}"] for found in (low, high)]
            assert alone[0] != alone[1]
            assert both[part][f"{name}/{by}"] == min(alone), by
        better = min((low, high), key=lambda found: found[0][f"{name}/dist"])
        assert all(both[0][f"{name}/{key}"] == better[0][f"{name}/{key}"] for key in ("rate", "loss", "top"))
        better = min((low, high), key=lambda found: found[1][f"{name}/held_loss"])
        assert all(both[1][f"{name}/{key}"] == better[1][f"{name}/{key}"] for key in ("rate", "source", "target@2"))


def test_a_rate_that_breaks_off_counts_as_lost_and_is_not_chosen(small):
    known, labels = small(200.0)
    assert known["sgd/dist"] == known["sgd/dist_by_loss"] == 1
    assert known["sgd/loss"] == known["sgd/least_loss"] == labels["sgd/held_loss"] == math.inf
    assert math.isnan(known["sgd/top"])
    assert math.isnan(labels["sgd/top"])
    assert small(200.0, 0.0) == small(0.0)


def test_the_test_images_do_not_choose_the_rate(small, monkeypatch):
    """A source task whose test images are no numbers, and one whose held-out images are none."""
    honest, whole = small(-3.0, 0.0)[1], label_transfer.task

    def poisoned(split):
        def task(x, y, labels, seed):
            found = whole(x, y, labels, seed)
            bad = {split: torch.full_like(found.x[split], torch.nan)} if 0 in labels else {}
            return dataclasses.replace(found, x=found.x | bad)

        monkeypatch.setattr(label_transfer, "task", task)
        return small(-3.0, 0.0)[1]

    by_test, by_held = poisoned("test"), poisoned("held")
    for name in ("sgd", "adam"):
        same = [f"{name}/{key}" for key in ("rate", "held_loss", "target@2", "top")]
        assert [by_test[key] for key in same] == [honest[key] for key in same]
        assert by_test[f"{name}/source"] < honest[f"{name}/source"]
        assert by_held[f"{name}/held_loss"] == math.inf
