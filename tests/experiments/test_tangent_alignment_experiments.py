"""Experiments about how tangent kernels align: smoke presets hold what they claim, claims can fail, bad settings."""

import dataclasses
import math

import jaxtyping
import pytest
import torch
from experiment_records import records, smoke

from error_sentences import WORDED
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.george2023 import (
    alignment_by_optimizer,
    disk_eigenfunctions,
    easy_and_difficult,
    fourier_modes,
    label_alignment,
    sensitivity,
    spectrum,
)
from layerwise.foundations.errors import InputError, LayerwiseError, NameLookupError

pytest.importorskip("sklearn")
EXPERIMENTS = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        spectrum,
        label_alignment,
        easy_and_difficult,
        sensitivity,
        disk_eigenfunctions,
        fourier_modes,
        alignment_by_optimizer,
    )
}
CLEAN, NOISY = "digits/mlp/0%", "digits/mlp/50%"


def status(name: str, found: list[dict], preset: str = "smoke") -> dict[str, str]:
    experiment = EXPERIMENTS[name]
    return {claim.name: judge(claim, found).status for claim in experiment.claims(experiment.preset(preset))}


def row(cell: str, seed: int = 0, **values: float) -> dict:
    """A record with these values ("__" for "@", "_of_" for "/")."""
    named = {name.replace("__", "@").replace("_of_", "/"): value for name, value in values.items()}
    return {"cell": cell, "seed": seed, "values": named, "series": {}}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke_is_as_expected(name: str):
    experiment = EXPERIMENTS[name]
    claims = experiment.claims(experiment.preset("smoke"))
    assert claims
    assert [claim.name for claim in claims if judge(claim, smoke(name)).as_expected is not True] == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_figures_have_points_and_can_be_made_before_anything_has_run(name: str):
    experiment = EXPERIMENTS[name]
    config = experiment.preset("smoke")
    before, after = experiment.figures(config, []), experiment.figures(config, smoke(name))
    assert len(before) == len(after) >= 1
    curves = [curve for figure in after for panel in figure.panels for curve in panel.curves]
    assert curves
    assert all(len(curve.x) == len(curve.y) > 0 for curve in curves)
    logs = [p for figure in after for p in figure.panels if p.x_scale == "log"]
    assert all(x > 0 for panel in logs for curve in panel.curves for x in curve.x)


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_claims_of_larger_presets_have_names_of_their_own(name: str, preset: str):
    experiment = EXPERIMENTS[name]
    config = experiment.preset(preset)
    names = [claim.name for claim in experiment.claims(config)]
    assert len(names) == len(set(names)) > 0
    assert all(judge(claim, []).status == "not enough runs" for claim in experiment.claims(config))
    assert experiment.cells_of(config)


# --- spectrum and alignment ----------------------------------------------------------------------------------


def test_claims_of_the_spectrum_can_fail():
    start = {"test_of_effective_rank__start": 400.0, "test_of_eigenvalue_of_max__start": 1.0}
    start["test_of_trace_ratio_of_40__start"] = 0.3

    def found(rank: float, share: float, largest: float, best: float) -> dict[str, str]:
        clean = start | {"test_of_effective_rank__end": rank, "test_of_eigenvalue_of_max__end": largest}
        clean["test_of_trace_ratio_of_40__end"] = share
        noisy = {"train_of_effective_rank__best": best, "train_of_effective_rank__end": 100.0}
        rows = [row(cell, s, **v) for s in range(3) for cell, v in ((CLEAN, clean), (NOISY, noisy))]
        return {
            name.rpartition("%/")[0][-2:] + name.rpartition("/")[2]: v
            for name, v in status("spectrum", rows, "laptop").items()
        }

    assert set(found(250, 0.45, 20, 85).values()) == {HELD}
    for wrong, which in (((300, 0.45, 20, 85), "0"), ((250, 0.35, 20, 85), "0"), ((250, 0.45, 5, 85), "0")):
        failed = [name for name, verdict in found(*wrong).items() if verdict == NOT_HELD]
        assert len(failed) == 1, which
    assert [n for n, v in found(250, 0.45, 20, 99).items() if v == NOT_HELD] == ["50effective-rank"]


def test_claims_of_the_alignment_can_fail():
    good = {
        "test_of_cka__start": 0.03,
        "test_of_cka__peak": 0.1,
        "test_of_cka__end": 0.1,
        "test_of_cka-none__start": 0.03,
        "test_of_cka-none__peak": 0.06,
        "test_of_cka-global__end": 0.05,
        "layers_of_first": 0.05,
        "layers_of_between": 0.1,
        "layers_of_last": 0.06,
        "accuracy_missed": 0.01,
        "train_of_cka__peak": 0.05,
    }
    noisy = good | {"test_of_cka__end": 0.06}
    both = {"printed": 1.0, "corrected": 1e-12}

    def failed(**wrong: float) -> list[str]:
        rows = []
        for seed in range(3):
            rows += [row(CLEAN, seed, **good | wrong), row(NOISY, seed, **noisy | wrong)]
            rows.append(row("centerings", seed, **both))
        found = status("label-alignment", rows, "laptop")
        assert found.pop("centerings/printed") == NOT_HELD
        return sorted(name for name, verdict in found.items() if verdict == NOT_HELD)

    assert failed() == []
    assert failed(test_of_cka__peak=0.07) == [f"{CLEAN}/cka", f"{NOISY}/falls-again"] or failed(
        test_of_cka__peak=0.07
    ) == [f"{CLEAN}/cka"]
    assert failed(layers_of_last=0.11) == [f"{CLEAN}/layers"]
    assert failed(layers_of_first=0.11) == [f"{CLEAN}/layers"]
    assert failed(**{"test_of_cka-none__peak": 0.03}) == [f"{CLEAN}/uncentred"]
    assert failed(**{"test_of_cka-global__end": 0.1}) == [f"{CLEAN}/centerings-differ"]
    assert failed(accuracy_missed=0.06) == [f"{NOISY}/with-accuracy"]
    assert failed(train_of_cka__peak=0.09) == [f"{NOISY}/held-out-above-training"]
    assert f"{NOISY}/falls-again" in failed(test_of_cka__end=0.09)


def test_the_alignment_reads_what_the_spectrum_trained():
    """One training serves both: the same seed gives the same accuracies."""
    (one,) = smoke("spectrum")
    other = next(r for r in smoke("label-alignment") if r["cell"] == CLEAN)
    assert one["series"]["test/accuracy"] == other["series"]["test/accuracy"]
    assert one["series"]["step"] == other["series"]["step"]
    assert one["series"]["step + 1"][0] == 1
    assert one["values"]["test/effective_rank@start"] == one["series"]["test/effective_rank"][0]
    best = spectrum.peak(one["series"]["test/accuracy"])
    assert one["values"]["train/effective_rank@best"] == one["series"]["train/effective_rank"][best]
    assert other["values"]["test/cka@peak"] == max(other["series"]["test/cka"])


# --- easy and difficult, sensitivity ---------------------------------------------------------------------------


def test_where_a_curve_comes_near_its_peak():
    assert easy_and_difficult.near_peak([0.1, 0.5, 0.91, 1.0, 0.95]) == 2
    assert spectrum.peak([0.1, 1.0, 0.5, 1.0]) == 1


def test_claims_about_easy_examples_can_fail():
    def found(**values: float) -> list[str]:
        good = {"ratio": 7.0, "easy_step": 30, "difficult_step": 300}
        rows = [row("depth-6", seed, **good | values) for seed in range(3)]
        return [n for n, v in status("easy-and-difficult", rows, "laptop").items() if v == NOT_HELD]

    assert found() == []
    assert found(ratio=2.9) == ["depth-6/ratio"]
    assert found(easy_step=300) == ["depth-6/first"]


def test_easy_examples_of_the_smoke_are_aligned_with_better():
    (record,) = smoke("easy-and-difficult")
    series = record["series"]
    ratios = [a / b for a, b in zip(series["easy/cka"], series["difficult/cka"], strict=True)]
    assert record["values"]["ratio"] == max(ratios)
    assert series["ratio"] == ratios


def test_claims_about_sensitivity_can_fail():
    for values, expected in (({"ratio": 14.0, "theory": 15.0}, []), ({"ratio": 4.0, "theory": 4.0}, ["mlp/ratio"])):
        rows = [row("mlp", seed, **values) for seed in range(3)]
        found = status("sensitivity", rows, "laptop")
        assert [n for n, v in found.items() if v == NOT_HELD] == expected
    rows = [row("mlp", seed, ratio=14.0, theory=40.0) for seed in range(3)]
    assert status("sensitivity", rows, "laptop")["mlp/theory"] == NOT_HELD


# --- the disk and the line -------------------------------------------------------------------------------------


def test_the_printed_ratios_of_the_disk_would_be_seen():
    """Were the thesis' numbers found, the claims that refute them would fail, and those that replace them too."""
    names = ("effective_rank", "cka", "largest", "ratio", "disk", "loss")
    start = dict(zip(names, (16.0, 0.1, 20.0, 0.015, 0.6, 0.7), strict=True))
    end = dict(zip(names, (9.0, 0.2, 1e4, 0.002, 0.8, 0.01), strict=True))
    values = {f"{n}__start": v for n, v in start.items()} | {f"{n}__end": v for n, v in end.items()}
    rows = [row("disk", seed, effective_rank__lowest=9.0, **values) for seed in range(3)]
    found = status("disk-eigenfunctions", rows, "laptop")
    assert found["disk/ratio@start"] == found["disk/ratio-falls"] == HELD
    assert found["disk/ratio-rises"] == found["disk/singular-values"] == NOT_HELD
    assert found["disk/effective-rank"] == found["disk/cka"] == found["disk/largest"] == HELD
    flat = [
        row("disk", s, **values | {"cka__end": 0.1, "largest__end": 30.0, "effective_rank__lowest": 15.0})
        for s in range(3)
    ]
    found = status("disk-eigenfunctions", flat, "laptop")
    assert found["disk/effective-rank"] == found["disk/cka"] == found["disk/largest"] == NOT_HELD


def test_claims_about_fourier_modes_can_fail():
    seeds = range(20)
    wrong = [row("biases", s, spearman=0.5, inversions=3, ratio=0.04, root=0.2) for s in seeds]
    wrong += [row("no-biases", s, spearman=0.95, inversions=0, ratio=0.0, root=0.0) for s in seeds]
    found = status("fourier-modes", wrong, "laptop")
    assert found["biases/ratio"] == HELD
    assert {v for n, v in found.items() if n != "biases/ratio"} == {NOT_HELD}


# --- optimizers --------------------------------------------------------------------------------------------------


def test_claims_about_optimizers_can_fail():
    def found(method: str, **values: float) -> list[str]:
        base = {"step__0.03": 100.0, "cka__0.03": 0.12, "effective_rank__0.03": 230.0}
        good = {
            "sgd": (100, 230),
            "adam": (90, 230),
            "muon": (70, 280),
            "soap": (60, 300),
            "kfac": (40, 340),
            "ekfac": (45, 310),
        }
        rows = []
        for name, (steps, rank) in good.items():
            own = base | {"step__0.03": steps, "effective_rank__0.03": rank} | (values if name == method else {})
            rows += [row(name, seed, **own) for seed in range(3)]
        return [n for n, v in status("alignment-by-optimizer", rows, "laptop").items() if v == NOT_HELD]

    assert found("none") == []
    assert found("kfac", step__0_03=0.0) == []
    assert found("kfac", **{"step__0.03": 90.0}) == ["kfac-sooner"]
    assert found("soap", **{"cka__0.03": 0.2}) == ["soap-not-further"]
    assert found("muon", **{"effective_rank__0.03": 230.0}) == ["muon-rank"]
    assert found("adam", **{"effective_rank__0.03": 300.0}) == ["adam-rank"]


def test_a_loss_that_was_not_reached_is_left_out():
    rows = [
        row("kfac", 0, **{"cka__0.1": 0.1}),
        row("sgd", 0),
        row("kfac", 1, **{"cka__0.1": 0.2}),
        row("sgd", 1, **{"cka__0.1": 0.1}),
    ]
    assert alignment_by_optimizer.over("kfac", "sgd", "cka@0.1")(rows) == {1: 2.0}
    config = dataclasses.replace(alignment_by_optimizer.EXPERIMENT.preset("smoke"), losses=(1.0, 0.1))
    (figure,) = alignment_by_optimizer.figures(config, rows)
    assert [(c.label, c.x) for c in figure.panels[0].curves] == [("SGD", [0.1]), ("KFAC", [0.1])]


def test_rates_are_chosen_on_seeds_that_are_not_reported():
    rows = {r["cell"]: r for r in smoke("alignment-by-optimizer")}
    assert set(rows) == {"sgd", "kfac"}
    assert rows["sgd"]["values"]["cka@start"] == pytest.approx(rows["kfac"]["values"]["cka@start"], rel=1e-5)
    for record in rows.values():
        assert record["values"]["rate"] in (0.1, 0.03, 0.01, 0.003)
        assert all(a <= b for a, b in zip(record["series"]["fit/loss"], record["series"]["loss"], strict=True))
    assert alignment_by_optimizer.EXPERIMENT.preset("paper").seeds <= alignment_by_optimizer.CHOOSING


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("spectrum", {"settings": ("digits/vgg19",)}),
        ("spectrum", {"settings": ("letters/mlp",)}),
        ("spectrum", {"trained_on": 5000}),
        ("spectrum", {"random_labels": (2.0,)}),
        ("label-alignment", {"settings": ()}),
        ("easy-and-difficult", {"depths": (1,)}),
        ("easy-and-difficult", {"examples": 100, "random_labels": 0.01}),
        ("sensitivity", {"directions": 5000}),
        ("sensitivity", {"network": "vgg11"}),
        ("disk-eigenfunctions", {"steps": (10, 20)}),
        ("fourier-modes", {"modes": 60}),
        ("alignment-by-optimizer", {"methods": ("sgd", "kfca")}),
        ("alignment-by-optimizer", {"trials": 1}),
        ("alignment-by-optimizer", {"losses": (0.1, 1.0)}),
        ("alignment-by-optimizer", {"seeds": 2000}),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_anything_runs(name: str, wrong: dict):
    experiment = EXPERIMENTS[name]
    with pytest.raises((InputError, NameLookupError), match=WORDED):
        experiment.refuse_bad(dataclasses.replace(experiment.preset("smoke"), **wrong))


@pytest.mark.parametrize("name", ["spectrum", "sensitivity", "alignment-by-optimizer"])
def test_missing_files_are_named(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    experiment = EXPERIMENTS[name]
    config = dataclasses.replace(experiment.preset("paper"), device="cpu")
    with pytest.raises(LayerwiseError, match=r"train-\*.parquet"):
        experiment.refuse_bad(config)


def test_the_paper_preset_on_a_handful_of_images(monkeypatch: pytest.MonkeyPatch):
    """VGG19 and ResNet-18 on drawn images: what a GPU would run, made small."""
    from layerwise import data
    from layerwise.studies.tangent_alignment import classification

    x, y = torch.rand(60, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 10
    images = data.Images(x, y)
    digits = classification._images("digits")
    monkeypatch.setattr(classification, "_images", lambda name: digits if name == "digits" else (images, images))
    monkeypatch.setitem(classification.MOST, "cifar10", 60)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    small = {"seeds": 1, "steps": 1, "examples": 3, "width": 2, "batch": 10, "device": "cpu", "random_labels": (0.0,)}
    config = dataclasses.replace(spectrum.EXPERIMENT.preset("paper"), **small)
    config = dataclasses.replace(config, settings=("cifar10/vgg19", "cifar10/resnet18"))
    found = records(EXPERIMENTS["spectrum"], config, [0])
    assert [r["cell"] for r in found] == ["cifar10/vgg19/0%", "cifar10/resnet18/0%"]
    assert all(math.isfinite(r["values"]["test/effective_rank@end"]) for r in found)
    aligned = records(EXPERIMENTS["label-alignment"], config, [0])
    layers = [name for name in aligned[0]["series"] if name.startswith("test/cka/")]
    assert len(layers) == 17  # 16 convolutions and a linear layer
    assert all(judge(claim, found).n == 1 for claim in EXPERIMENTS["spectrum"].claims(config))
