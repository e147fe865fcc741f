"""Classifiers of images: their data, the options of every method, and a search with its curves."""

import json

import pytest
import torch
from torch import nn

from layerwise.data.folder import MissingDataError
from layerwise.foundations.errors import InputError, NameLookupError
from layerwise.foundations.tf32 import tf32
from layerwise.studies.fisher_geometry import image_classifiers
from layerwise.studies.fisher_geometry.image_classifiers import (
    CURVATURE,
    METHODS,
    TRAINING,
    check_present,
    compared,
    curves,
    error,
    method,
    problem,
    splits,
)
from layerwise.training import Method

pytest.importorskip("sklearn")


def small(batch: int = 50, epochs: int = 1, batch_norm: bool = False):
    return problem("three-convolutions", splits("digits", 100, "cpu"), batch, epochs, batch_norm, width=8)


def test_digits_are_split_and_standardized_by_those_of_the_training():
    found = splits("digits", None, "cpu")
    assert [len(x) for x, _ in found.values()] == [TRAINING["digits"], 297]
    x = found["train"][0]
    assert float(x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x.std()) == pytest.approx(1)
    assert float(found["test"][0].mean()) != pytest.approx(0, abs=1e-3)
    assert len(splits("digits", 100, "cpu")["train"][0]) == 100


def test_data_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch):
    check_present("digits")
    monkeypatch.delenv("LAYERWISE_DATA", raising=False)
    with pytest.raises(MissingDataError, match="LAYERWISE_DATA is not set"):
        check_present("cifar10")
    with pytest.raises(NameLookupError, match="Did you mean 'cifar10'"):
        check_present("cifar100")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without one")
def test_a_device_that_is_not_there_is_said():
    with pytest.raises(InputError, match="device='cuda'"):
        splits("digits", 100, "cuda")


def test_error_is_a_share():
    f = torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    assert float(error(f, torch.tensor([0, 0, 1, 1]))) == 0.25


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains(name: str):
    given = small(batch_norm=name.endswith("-bn"), epochs=3)
    chosen = method(name, (0.1,), (0.1,), refresh=2)
    found = curves(given, chosen, chosen.points()[0], seed=0, steps=2, device="cpu")
    assert found["epoch"] == [0, 1, 2, 3]
    assert found["train/loss"][-1] < found["train/loss"][0]


@pytest.mark.parametrize("name", CURVATURE)
def test_options_are_those_of_the_thesis(name: str):
    chosen = method(name, (0.3, 0.1), (0.1, 0.01), refresh=500, sua=False)
    expected = {
        "scale": "formula",
        "factor_decay": 0.0,
        "momentum": 0.0,
        "clip": None,
        "damping_split": "equal",
        "damping_scale": "absolute",
        "refresh_every": 500,
        "sua": False,
    }
    assert {option: chosen.fixed[option] for option in expected} == expected
    assert chosen.grid == {"lr": (0.3, 0.1), "damping": (0.1, 0.01)}
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    assert chosen.make(model, lr=0.1, damping=0.1, **chosen.fixed)._labels.estimator == "empirical"
    assert method(name, (0.3,), (0.1,), refresh=500).fixed["sua"]


def test_factors_are_little_older_than_what_is_made_of_them():
    ages = {refresh: method("kfac", (0.1,), (0.1,), refresh).fixed["factor_every"] for refresh in (1, 4, 12, 500)}
    assert ages == {1: 1, 4: 1, 12: 2, 500: 10}
    assert {method(name, (0.1,), (0.1,), 500).fixed.get("scaling") for name in CURVATURE} == {None, "batch", "running"}
    assert method("ekfac", (0.1,), (0.1,), 500).fixed["factor_every"] == 1  # its scalings are those of every batch
    assert "refresh_every" not in method("shampoo", (0.1,), (0.1,), 500).fixed


def test_every_method_has_as_many_points():
    assert {len(method(name, (0.3, 0.1, 0.03), (0.1, 0.01), 10).points()) for name in METHODS} == {6}


def test_methods_that_there_are_not():
    with pytest.raises(NameLookupError, match="Did you mean 'kfac'"):
        method("kfac-bn", (0.1,), (0.1,), 1)


@pytest.mark.parametrize("name", ["sgd", "adam", "ekfac-ra"])
def test_rates_are_halved(name: str):
    chosen = method(name, (0.4,), (0.1,), refresh=1, halve_every=2)
    model = nn.Linear(3, 2)
    options = chosen.points()[0]
    optimizer = chosen.make(model, **options, **chosen.fixed)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"] / options["lr"])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1])).backward()
        optimizer.step()
    assert rates == [1, 1, 0.5, 0.5, 0.25]


def test_halved_steps_are_half_as_long():
    moved = []
    for halve in (None, 1):
        chosen = method("sgd", (0.5,), (0.1,), refresh=1, halve_every=halve)
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = chosen.make(model, lr=0.5, momentum=0.0)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        moved.append(float(model.weight.detach()))
    assert moved == pytest.approx([-1.5, -0.875])


def test_tf32_is_what_it_was():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with tf32(True):
        assert torch.backends.cuda.matmul.allow_tf32
        with tf32(False):
            assert not torch.backends.cudnn.allow_tf32
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_a_search_has_its_draws_and_the_curves_of_another_seed():
    given, chosen = small(), method("sgd", (0.1, 0.01), (0.1,), 1)
    values, series = compared(given, chosen, trials=3, seed=0, fresh=7)
    tried = json.loads(values["trials"])
    assert len(tried) == 3
    assert tried[2][0] not in (0.1, 0.01)
    best = min(tried, key=lambda row: row[-1])
    assert [values["chosen/lr"], values["chosen/momentum"]] == best[:-1]
    assert values["best"] == pytest.approx(best[-1], abs=1e-4)
    options = {"lr": values["chosen/lr"], "momentum": values["chosen/momentum"]}
    again = curves(given, chosen, options, seed=7, steps=2, device="cpu")
    assert values["final"] == again["train/loss"][-1] == series["train/loss"][-1]
    assert values["test/error"] == series["test/error"][-1]


def test_runs_that_diverge_leave_no_curves(monkeypatch: pytest.MonkeyPatch):
    given = small()
    values, series = compared(given, method("sgd", (1e20, 1e21), (0.1,), 1), trials=2, seed=0, fresh=1)
    assert values["diverged"] == 2
    assert not series
    assert values["best"] == float("inf")
    assert "final" not in values
    monkeypatch.setattr(image_classifiers, "curves", lambda *given: {})
    values, series = compared(given, method("sgd", (0.1,), (0.1,), 1), trials=1, seed=0, fresh=1)
    assert values["final"] == float("inf")
    assert "test/error" not in values


def test_an_error_of_the_numbers_is_a_divergence():
    def fails(model: nn.Module, **options):
        raise torch.linalg.LinAlgError("no convergence")

    chosen = Method(name="fails", make=fails, grid={"lr": (0.1,)})
    assert curves(small(), chosen, {"lr": 0.1}, seed=0, steps=2, device="cpu") == {}


@pytest.mark.parametrize("name", ["kfac", "ekfac", "ekfac-ra"])
def test_labels_of_the_model_or_of_the_data(name: str):
    options = {"lr": 0.1, "damping": 0.1}
    for suffix, estimator in (("", "empirical"), ("-sampled", "sampled")):
        chosen = method(name + suffix, (0.1,), (0.1,), 5)
        optimizer = chosen.make(torch.nn.Linear(4, 3), **options, **chosen.fixed)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(optimizer.model(torch.randn(6, 4)), torch.arange(6) % 3).backward()
        optimizer.step()
        assert optimizer._labels.estimator == estimator
