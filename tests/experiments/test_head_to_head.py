"""Figures 1, 2 and 5 of Zhang et al. (2025) as experiments: rows, claims that can fail, figures."""

import dataclasses
import math

import jaxtyping
import pytest
from experiment_records import records

from layerwise.experiments.catalog import find
from layerwise.experiments.claims import NOT_ENOUGH, NOT_HELD, judge
from layerwise.experiments.over_seeds import band
from layerwise.experiments.zhang2025 import head_to_head as head_to_head
from layerwise.experiments.zhang2025 import learning_rates as learning_rates
from layerwise.experiments.zhang2025 import normalisation as normalisation
from layerwise.studies import feature_learning as fl

SMALL = {"dx": 20, "dy": 8, "k": 3, "batch": 256}


@pytest.fixture(scope="module", autouse=True)
def untyped_for_speed():
    """Annotations unchecked, which makes long runs three times faster; tests/studies checks them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        yield


@pytest.fixture(scope="module")
def small(untyped_for_speed, early_middle):
    """All cells of preset paper in small, two seeds."""
    return records(head_to_head.EXPERIMENT, small_config(), [0, 1])


def small_config():
    return dataclasses.replace(head_to_head.EXPERIMENT.preset("paper"), steps=40, every=20, **SMALL)


@pytest.fixture(scope="module", autouse=True)
def early_middle():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_to_head, "MIDDLE", 20)
        yield


@pytest.mark.parametrize("name", ["head-to-head", "lr-sweep", "normalisation"])
def test_it_is_in_the_catalog(name):
    experiment = find(name)
    assert experiment.name == name
    assert "2502.01763" in experiment.paper


def test_smoke_shows_the_main_result():
    experiment = head_to_head.EXPERIMENT
    config = experiment.preset("smoke")
    found = records(experiment, config, range(config.seeds))
    for claim in experiment.claims(config):
        verdict = judge(claim, found)
        assert verdict.as_expected, (claim.name, verdict.detail)
    values = found[0]["values"]
    assert 1 <= values["sgd/diverged_at"] <= 10
    assert values["sgd/dist"] == 1.0
    assert math.isinf(values["sgd/loss"])
    figures = experiment.figures(config, found)
    for panel in figures[0].panels:
        assert [curve.label for curve in panel.curves] == list(head_to_head.LABELS.values())
        kfac = panel.curves[3]
        assert list(kfac.x) == list(range(0, 251, 50))
        assert all(math.isfinite(y) and y > 0 for y in kfac.y)
        assert len(panel.curves[0].x) == (6 if panel.y_label == "dist" else 1)  # SGD: only the start is finite


def test_runs_of_other_sizes_claim_nothing():
    for module in (head_to_head, normalisation, learning_rates):
        smoke = module.EXPERIMENT.preset("smoke")
        assert module.claims(smoke)
        assert module.claims(dataclasses.replace(smoke, seeds=7))
        assert module.claims(dataclasses.replace(smoke, steps=17)) == []
        assert module.claims(dataclasses.replace(module.EXPERIMENT.preset("laptop"), steps=17)) == []


def test_a_diverged_run_neither_finds_nor_misses(small):
    """It is counted apart, in the claim about its distance."""
    config = dataclasses.replace(head_to_head.EXPERIMENT.preset("paper"), seeds=2)
    claim = next(claim for claim in head_to_head.claims(config) if claim.name == "trace/sgd/dist")
    diverged = [r | {"values": r["values"] | {"sgd/diverged_at": 7 * r["seed"] - 1}} for r in small]
    assert judge(claim, diverged).diverged == (1,)
    assert set(judge(claim, diverged).values) == {0}


@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_every_claim_finds_its_values(preset, small):
    experiment = head_to_head.EXPERIMENT
    claims = experiment.claims(experiment.preset(preset))
    assert len({claim.name for claim in claims}) == len(claims)
    for claim in claims:
        assert set(claim.quantity(small)) == {0, 1}, claim.name
        assert claim.seeds == (2 if preset == "laptop" or claim.name.endswith("own-draws") else 5)
        if claim.seeds == 5:
            assert judge(claim, small).status == NOT_ENOUGH


def test_presets_are_what_was_asked():
    laptop, paper = (head_to_head.EXPERIMENT.preset(name) for name in ("laptop", "paper"))
    assert (laptop.dx, laptop.dy, laptop.k, laptop.batch, laptop.steps) == (100, 15, 8, 1024, 1000)
    assert (laptop.seeds, laptop.scales) == (2, ("trace",))
    assert paper.seeds >= 5
    assert set(paper.scales) == {"none", "trace"}
    refuted = [claim.name for claim in head_to_head.EXPERIMENT.claims(paper) if claim.expected == "fails"]
    assert {"none/ngd-equal-over-kfac", "trace/ngd-equal-over-kfac"} < set(refuted)


def test_claims_can_fail(small):
    """Records in which KFAC and SGD have changed places refute the main claims."""

    def swapped(values):
        names = {"kfac": "sgd", "sgd": "kfac"}
        return {
            "/".join([names.get(key.split("/")[0], key.split("/")[0]), key.split("/")[1]]): v
            for key, v in values.items()
        }

    wrong = [record | {"values": swapped(record["values"])} for record in small]
    experiment = head_to_head.EXPERIMENT
    config = dataclasses.replace(experiment.preset("paper"), seeds=2)
    verdicts = {claim.name: judge(claim, wrong) for claim in experiment.claims(config)}
    for name in ("none/kfac/dist", "none/kfac/loss", "none/sgd/diverged_at", "trace/kfac/dist", "none/kfac-over-dfw"):
        assert verdicts[name].status == NOT_HELD, name


def test_a_seed_is_the_same_alone_and_beside_others(small):
    assert records(head_to_head.EXPERIMENT, small_config(), [1]) == [record for record in small if record["seed"] == 1]


def test_min_min_is_kfac_at_rate_one(small):
    setting = fl.Setting(scale="trace", repair="abs", **SMALL)
    alone = fl.compare(["altminmin"], setting=setting, steps=40, seeds=[0])["altminmin"]
    recorded = next(r for r in small if r["cell"] == "trace" and r["seed"] == 0)["values"]["altminmin/dist"]
    assert recorded == pytest.approx(float(alone.dist[0, -1]), rel=1e-9)


# --- Figure 5 -----------------------------------------------------------------------------------------------


def sweep_record(seed=0, **dist):
    exponents = list(learning_rates.EXPONENTS)
    series = {"exponent": exponents, "lr": [10**e for e in exponents]}
    return {"cell": "none", "seed": seed, "values": {}, "series": series | dist}


def test_sweep_smoke_claims_and_draws():
    experiment = learning_rates.EXPERIMENT
    config = experiment.preset("smoke")
    found = records(experiment, config, range(config.seeds))
    for claim in experiment.claims(config):
        assert judge(claim, found).as_expected, claim.name
    assert len(found[0]["series"]["kfac/dist"]) == len(config.exponents)
    assert found[0]["values"]["kfac/best"] == min(found[0]["series"]["kfac/dist"])
    (figure,) = experiment.figures(config, found)
    assert [curve.label for curve in figure.panels[0].curves] == list(learning_rates.LABELS.values())


def test_sweep_claims_look_at_the_rates_they_name():
    good = [1.0] * 8 + [0.0008, 0.0013, 0.0020, 0.0041, 0.0092]
    narrow = [1.0] * 8 + [0.0011, 0.0021, 0.706, 1.0, 0.999]
    bad = [0.9] * 13
    record = sweep_record(
        **{"kfac/dist": good, "ngd/dist": good, "dfw/dist": narrow}
        | {f"{n}/dist": bad for n in ("adam", "amgd", "sgd")}
    )
    experiment = learning_rates.EXPERIMENT
    claims = {claim.name: claim for claim in experiment.claims(learning_rates.Config(scales=("none",)))}
    claims.pop("none/own-draws", None)
    verdicts = {name: judge(claim, [record]) for name, claim in claims.items()}
    assert all(verdict.as_expected for verdict in verdicts.values())
    assert verdicts["none/kfac-range"].values == {0: 0.0092}
    assert verdicts["none/dfw-good"].values == {0: 0.0021}
    assert verdicts["none/dfw-bad"].values == {0: 0.706}
    assert verdicts["none/kfac-at-one"].values[0] == pytest.approx(11.5)
    assert verdicts["none/kfac-wide"].values == {0: 5}
    assert verdicts["none/dfw-narrower"].values == {0: 0.4}
    record["series"]["kfac/dist"][10] = 0.5
    assert judge(claims["none/kfac-range"], [record]).status == NOT_HELD
    assert judge(claims["none/dfw-narrower"], [record]).values == {0: 0.5}
    record["series"]["sgd/dist"][0] = 0.1
    assert judge(claims["none/sgd"], [record]).status == NOT_HELD


# --- Figure 2 -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whitened(untyped_for_speed):
    return records(normalisation.EXPERIMENT, normalisation.SMOKE, [0, 1])


def test_normalisation_smoke_claims_and_draws(whitened):
    experiment = normalisation.EXPERIMENT
    for claim in experiment.claims(normalisation.SMOKE):
        assert judge(claim, whitened).as_expected, claim.name
    (figure,) = experiment.figures(normalisation.SMOKE, whitened[:1])
    limit = figure.panels[1].curves[-1]
    assert limit.style == "dashed"
    assert set(limit.y) == {whitened[0]["values"]["limit"]}
    laptop = experiment.preset("laptop")
    for claim in experiment.claims(laptop):
        assert set(claim.quantity(whitened)) == {0, 1}, claim.name


@pytest.mark.parametrize("other", ["amgd", "coord_batch"])
def test_figure_2_is_a_contrast(whitened, other):
    """Its claims fail for AMGD without normalisation, and for inputs that are only scaled by coordinate."""
    wrong = []
    for record in whitened:
        measured = {k.removeprefix(f"{other}/"): v for k, v in record["values"].items() if k.startswith(f"{other}/")}
        wrong.append(record | {"values": record["values"] | {f"whiten_pop/{k}": v for k, v in measured.items()}})
    verdicts = {claim.name: judge(claim, wrong) for claim in normalisation.claims(normalisation.SMOKE)}
    for name in ("trace/whitened-over-plain", "trace/whiten_pop/limit_dist", "trace/limit"):
        assert verdicts[name].status == NOT_HELD, name


def test_a_band_leaves_out_what_is_not_finite():
    def one(seed, y):
        return {"cell": "a", "seed": seed, "values": {}, "series": {"t": [0, 1, 2], "y": y}}

    curve = band([one(0, [1.0, 2.0, 3.0]), one(1, [3.0, math.inf, 5.0])], "a", "t", "y", "SGD")
    assert (curve.x, curve.y, curve.low, curve.high) == ([0, 2], [2.0, 4.0], [1.0, 3.0], [3.0, 5.0])
    assert band([], "a", "t", "y", "SGD").x == []
