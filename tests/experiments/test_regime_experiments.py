"""yin-yang, c-scores, label-noise, spurious and rate-is-not-alpha: smoke presets, claims that can fail, bad options."""

import dataclasses
import math

import jaxtyping
import pytest
import torch
from experiment_records import records, smoke

from error_sentences import WORDED
from layerwise import data
from layerwise.data.folder import MissingDataError
from layerwise.experiments.claims import HELD, NOT_ENOUGH, NOT_HELD, judge
from layerwise.experiments.experiment import Experiment
from layerwise.experiments.george2023 import c_scores, label_noise, rate_is_not_alpha, spurious, yin_yang
from layerwise.experiments.george2023.equal_progress import at
from layerwise.foundations.errors import LayerwiseError
from layerwise.studies.training_regimes import examples

pytest.importorskip("sklearn")
ALL = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (c_scores, label_noise, rate_is_not_alpha, spurious, yin_yang)
}


def status(experiment: Experiment, found: list[dict], preset: str = "smoke") -> dict[str, str]:
    return {claim.name: judge(claim, found).status for claim in experiment.claims(experiment.preset(preset))}


@pytest.mark.parametrize("name", [name for name in ALL if name != "spurious"])
def test_smoke_holds_what_it_claims(name: str):
    assert set(status(ALL[name], smoke(name)).values()) == {HELD}


def test_smoke_of_spurious_decides():
    """One seed of a small network: the sign of so small an effect is not asked for."""
    found = status(ALL["spurious"], smoke("spurious"))
    assert set(found) == {"without@0.3/α=1", "without@0.2/α=1"}
    assert NOT_ENOUGH not in found.values()


@pytest.mark.parametrize("name", ALL)
def test_claims_fail_when_regimes_are_exchanged(name: str):
    """Records in which the lazy run has the other's name, and the other way round."""
    experiment = ALL[name]
    config = experiment.preset("smoke")
    names = config.names()
    first, last = names[-2 if name in ("spurious", "rate-is-not-alpha") else 0], names[-1]
    swap = {first: last, last: first}

    def exchanged(key: str) -> str:
        head, slash, run = key.rpartition("/")
        return f"{head}{slash}{swap.get(run, run)}" if slash else key

    found = [r | {"values": {exchanged(k): v for k, v in r["values"].items()}} for r in smoke(name)]
    if name == "yin-yang":  # differences of regions have no name of a run
        for record in found:
            record["values"] |= {k: -v for k, v in record["values"].items() if k.partition("@")[0] in ("easy", "disc")}
    verdicts = status(experiment, found)
    if name == "spurious":
        before = status(experiment, smoke(name))
        assert sum(before[claim] != verdict for claim, verdict in verdicts.items()) >= 1
    else:
        assert NOT_HELD in verdicts.values()
        assert sum(verdict == NOT_HELD for verdict in verdicts.values()) >= len(verdicts) / 2


def test_a_dependence_on_the_rate_is_noticed():
    (record,) = smoke("rate-is-not-alpha")
    values = record["values"] | {at("noisy", 1.0, "lr=0.05"): record["values"][at("noisy", 1.0, "lr=0.02")] + 0.5}
    assert set(status(ALL["rate-is-not-alpha"], [record | {"values": values}]).values()) == {NOT_HELD}


@pytest.mark.parametrize("name", ALL)
def test_a_threshold_that_was_not_reached_is_not_judged(name: str):
    missing = [r | {"values": {k: v for k, v in r["values"].items() if "@" not in k}} for r in smoke(name)]
    found = status(ALL[name], missing)
    assert NOT_ENOUGH in found.values()
    assert HELD not in [verdict for claim, verdict in found.items() if "@" in claim]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_claims_of_larger_presets_read_what_is_recorded(name: str, preset: str):
    """Each claim's quantity is found in records that have the names of that preset."""
    experiment = ALL[name]
    config = dataclasses.replace(experiment.preset(preset), seeds=1)
    keys = {
        part: [f"{part}@{t:g}/{run}" for t in config.thresholds for run in config.names()]
        for part in ("noisy", "spread", "part 0", "part 9", "without", "steps")
    }
    values = {key: 1.0 + k for names in keys.values() for k, key in enumerate(names)}
    values |= {f"{part}@{t:g}": 0.5 for part in ("easy", "disc") for t in config.thresholds}
    values |= {f"{part}/{run}": 0.5 for part in ("signs", "kernel", "best") for run in config.names()}
    (record,) = records_of(values)
    assert all(judge(claim, [record]).n == 1 for claim in experiment.claims(config))


def records_of(values: dict[str, float]) -> list[dict]:
    return [{"cell": "all", "seed": 0, "values": values, "series": {}}]


@pytest.mark.parametrize("name", ALL)
def test_figures(name: str):
    experiment = ALL[name]
    config = experiment.preset("smoke")
    (figure,) = experiment.figures(config, smoke(name))
    for panel in figure.panels:
        assert panel.curves
        assert all(len(curve.x) == len(curve.y) >= 5 for curve in panel.curves)
        assert all(math.isfinite(y) for curve in panel.curves for y in curve.y)
    assert experiment.figures(config, [])


def test_progress_of_regimes_is_equal_and_steps_are_not():
    (record,) = smoke("label-noise")
    values = record["values"]
    assert values[at("step", 1.0, "α=1")] < values[at("step", 1.0, "α=100")]
    assert values["signs/α=1"] < values["signs/α=100"] <= 1
    assert values["kernel/α=1"] < values["kernel/α=100"] <= 1
    assert values["representation/α=1"] < values["representation/α=100"] <= 1


@pytest.mark.parametrize("name", ["label-noise", "c-scores"])
def test_photographs_run_like_digits(name: str, monkeypatch: pytest.MonkeyPatch):
    """The preset paper with a narrow network, a few images and a step or two."""
    generator = torch.Generator().manual_seed(0)
    images = data.Images(torch.rand(24, 3, 32, 32, generator=generator), torch.arange(24) % 10)
    monkeypatch.setattr(examples, "photographs", lambda limit=None: images)
    monkeypatch.setattr(examples, "CIFAR10", 24)
    if name == "c-scores":
        real = examples.estimate_cscores
        monkeypatch.setattr(examples, "estimate_cscores", lambda *a, **k: real(*a, **{**k, "steps": 1, "batch": 5}))
    small = {
        "width": 2,
        "train": 12,
        "network": "vgg11",
        "batch": 6,
        "epochs": 2,
        "growth": 2.0,
        "thresholds": (50.0, 40.0),
        "device": "cpu",
    }
    config = dataclasses.replace(ALL[name].preset("paper"), **small)
    ALL[name].refuse_bad(config)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    (record,) = records(ALL[name], config, [0])
    assert all(judge(claim, [record]).n == 1 for claim in ALL[name].claims(config))


@pytest.mark.parametrize(
    ("name", "preset", "missing"),
    [
        ("label-noise", "paper", "cifar10/train"),
        ("c-scores", "paper", "cifar10/train"),
        ("spurious", "paper", "list_attr_celeba"),
    ],
)
def test_missing_files_are_named(name: str, preset: str, missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    examples.photographs.cache_clear()
    with pytest.raises(MissingDataError, match=missing):
        ALL[name].refuse_bad(dataclasses.replace(ALL[name].preset(preset), device="cpu"))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("label-noise", {"thresholds": (0.5, 1.0)}),
        ("label-noise", {"alphas": (1,)}),
        ("label-noise", {"fraction": 1.5}),
        ("label-noise", {"images": "letters"}),
        ("label-noise", {"network": "resnet18"}),
        ("c-scores", {"train": 5000}),
        ("c-scores", {"alphas": (0, 1)}),
        ("spurious", {"alphas": (1, 1)}),
        ("spurious", {"network": "vgg11"}),
        ("rate-is-not-alpha", {"rates": (0.1,)}),
        ("rate-is-not-alpha", {"limits": ()}),
        ("yin-yang", {"variant": "right"}),
        ("yin-yang", {"thresholds": (0.3, 0.5)}),
        ("yin-yang", {"alphas": (1, 2, 3)}),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_anything_runs(name: str, wrong: dict):
    with pytest.raises(LayerwiseError, match=WORDED):
        ALL[name].refuse_bad(dataclasses.replace(ALL[name].preset("smoke"), **wrong))
