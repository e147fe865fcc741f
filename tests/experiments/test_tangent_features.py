"""Tangent kernels of two classes: the smoke preset holds what it claims, claims can fail, one training serves all."""

import dataclasses
import math
from functools import cache

import jaxtyping
import pytest
import torch
from experiment_records import records

from error_sentences import WORDED
from layerwise import data
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.george2023.tangent_features import EXPERIMENT, MEASURES, Config, risen, times
from layerwise.experiments.runner import run
from layerwise.foundations.errors import InputError
from layerwise.studies.fisher_geometry import tangent_features

pytest.importorskip("sklearn")
SMOKE = EXPERIMENT.preset("smoke")


@cache
def smoke() -> list[dict]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in steps of a millisecond a second thread costs more than it gives
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
            return records(EXPERIMENT, SMOKE, [0])
    finally:
        torch.set_num_threads(threads)


def status(found: list[dict], config: Config = SMOKE) -> dict[str, str]:
    return {claim.name: judge(claim, found).status for claim in EXPERIMENT.claims(config)}


def test_smoke_holds_what_it_claims():
    assert status(smoke()) == dict.fromkeys(("3-8/contrast", "3-8/fisher", "3-8/accuracy"), HELD)


@pytest.mark.parametrize("name", MEASURES)
def test_every_claim_can_fail(name: str):
    """A measure that is a little short of its limit, with the others as they are."""
    (record,) = smoke()
    short = {"contrast": lambda x: 1.49 * x, "fisher": lambda x: 1.29 * x, "accuracy": lambda x: x - 0.02}
    values = record["values"] | {f"{name}@300": short[name](record["values"][f"{name}@0"])}
    found = status([record | {"values": values}])
    assert [claim for claim, verdict in found.items() if verdict == NOT_HELD] == [f"3-8/{name}"]


def test_one_seed_of_five_may_miss_and_two_may_not():
    config = dataclasses.replace(SMOKE, seeds=5)
    (record,) = smoke()
    flat = record["values"] | {"contrast@300": record["values"]["contrast@0"]}
    for missing, expected in ((1, HELD), (2, NOT_HELD)):
        found = [record | {"seed": seed, "values": flat if seed < missing else record["values"]} for seed in range(5)]
        assert status(found, config)["3-8/contrast"] == expected


def test_factors():
    assert times(0.1, 0.25) == pytest.approx(2.5)
    assert times(-0.1, 0.1) == math.inf
    assert times(-0.1, -0.05) == 0
    assert math.isnan(times(math.nan, 1.0))
    assert risen(0.96, 0.95) == -0.01


@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_claims_of_larger_presets_read_what_is_recorded(preset: str):
    config = dataclasses.replace(EXPERIMENT.preset(preset), seeds=2, steps=SMOKE.steps)
    (record,) = smoke()
    again = [record | {"cell": cell.key, "seed": s} for cell in EXPERIMENT.cells_of(config) for s in (0, 1)]
    claims = EXPERIMENT.claims(config)
    assert len(claims) == 9
    assert all(judge(claim, again).n == 2 for claim in claims)


def test_figures_have_all_points():
    along, images = EXPERIMENT.figures(SMOKE, smoke())
    (values,) = (record["values"] for record in smoke())
    assert list(along.panels[0].curves[0].y) == [values[f"contrast@{step}"] for step in SMOKE.steps]
    assert len(images.panels) == 4
    assert [curve.label for curve in images.panels[0].curves] == ["3", "8"]
    assert all(len(curve.x) == len(curve.y) == 50 for panel in images.panels for curve in panel.curves)
    first, second = images.panels[3].curves  # mean cosines with 3 and with 8, after training
    own = [*first.x, *second.y]
    other = [*first.y, *second.x]
    assert (sum(own) - sum(other)) / 100 == pytest.approx(values["contrast@300"])


def test_figures_before_anything_has_run():
    assert len(EXPERIMENT.figures(SMOKE, [])) == 2


def test_one_training_of_a_residual_network_serves_all_pairs(monkeypatch: pytest.MonkeyPatch, tmp_path):
    x, y = torch.rand(60, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 10
    monkeypatch.setattr(tangent_features, "cifar10", lambda limit: (data.Images(x, y).first(limit), data.Images(x, y)))
    trained, trainings = tangent_features.TangentFeatures.trained, []
    monkeypatch.setattr(
        tangent_features.TangentFeatures,
        "trained",
        lambda self, x, y, seed: trainings.append(seed) or trained(self, x, y, seed),
    )
    small = {"seeds": 1, "width": 2, "trained_on": 40, "each": 4, "steps": (0, 1), "batch": 8, "device": "cpu"}
    config = dataclasses.replace(EXPERIMENT.preset("paper"), pairs=("cat-dog", "ship-frog"), **small)
    done = run(EXPERIMENT, config, preset="paper", out=tmp_path)
    assert done.new == 2
    assert trainings == [0]
    assert all(judge(claim, done.recorded.records).n == 1 for claim in EXPERIMENT.claims(config))


def test_missing_files_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"LAYERWISE_DATA with cifar10/train-\S+ and cifar10/test-\S+parquet"):
        run(EXPERIMENT, dataclasses.replace(EXPERIMENT.preset("paper"), device="cpu"), preset="paper", out=tmp_path)


@pytest.mark.parametrize("wrong", [{"pairs": ("3-cat",)}, {"network": "resnet18"}, {"momentum": 1.5}], ids=str)
def test_bad_settings_are_refused_before_anything_runs(wrong: dict):
    with pytest.raises(InputError, match=WORDED):
        EXPERIMENT.refuse_bad(dataclasses.replace(SMOKE, **wrong))
