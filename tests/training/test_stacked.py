"""Runs that are trained as one tensor program end where each would have ended alone."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from layerwise.foundations.errors import InputError
from layerwise.optim import EKFAC, FOOF, KFAC, SOAP, Muon, Shampoo
from layerwise.training import Budget, Method, Problem, accuracy, search, tensor_batches
from layerwise.training.stacked import StackedTrainer, stacked
from layerwise.training.trials import Trainer

FORMULA = {"scale": "formula", "factor_decay": 0.0, "momentum": 0.0, "clip": None, "damping_scale": "absolute"}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {"eps": 1e-5}),
    "kfac": (KFAC, {**FORMULA, "damping": 0.1, "refresh_every": 3}),
    "ekfac": (EKFAC, {**FORMULA, "damping": 0.1, "refresh_every": 3}),
    "ekfac-ra": (EKFAC, {**FORMULA, "damping": 0.1, "scaling": "running", "factor_every": 3, "refresh_every": 3}),
    "foof": (FOOF, {**FORMULA, "damping": 0.1}),
    "shampoo": (Shampoo, {"scale": "formula", "refresh_every": 3}),
    "soap": (SOAP, {"scale": "formula", "refresh_every": 3}),
    "muon": (Muon, {"scale": "formula", "weight_decay": 0.1}),
}


def make(name: str) -> Any:
    kind, options = METHODS[name]
    if name in ("sgd", "adam"):
        return lambda model, lr: kind(model.parameters(), lr=lr, **options)
    return lambda model, lr: kind(model, lr=lr, **options)


def network(seed: int, batch_norm: bool = False) -> nn.Sequential:
    norm = [nn.BatchNorm1d(6)] if batch_norm else []
    return nn.Sequential(nn.Linear(5, 6), *norm, nn.Tanh(), nn.Linear(6, 3)).double()


def problem(likelihood: str = "bernoulli", batch_norm: bool = False) -> Problem:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (40,), generator=generator)
    target = y if likelihood == "categorical" else nn.functional.one_hot(y, 3).double()
    data = {"train": (x, target), "held": (-x, target)}
    return Problem(
        name="small",
        model=lambda seed: network(seed, batch_norm),
        batches=tensor_batches(data, batch_size=12),
        likelihood=likelihood,
        metrics={"accuracy": accuracy} if likelihood == "categorical" else {},
        budget=Budget(epochs=3),
    )


RUNS = [({"lr": lr}, seed) for lr in (0.03, 0.1, 0.003) for seed in (0, 1)]


def both(name: str, given: Problem, score: str = "train/loss", runs: Any = RUNS) -> tuple[list, list]:
    one = Trainer(problem=given, make=make(name), score=score, every=5)
    return StackedTrainer(one=one)(runs), [one(run) for run in runs]


@pytest.mark.parametrize("name", METHODS)
def test_together_is_as_alone(name):
    together, alone = both(name, problem())
    for trial, own in zip(together, alone, strict=True):
        assert (trial.options, trial.seed, trial.diverged) == (own.options, own.seed, own.diverged)
        assert trial.series["step"] == own.series["step"] == [0, 5, 10, 12]
        assert trial.series["train/loss"] == pytest.approx(own.series["train/loss"], rel=1e-8)
    assert len({trial.score for trial in together}) == len(RUNS)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_other_likelihoods_and_held_out_scores(likelihood):
    score = "held/accuracy" if likelihood == "categorical" else "held/loss"
    together, alone = both("sgd", problem(likelihood), score)
    assert [t.score for t in together] == pytest.approx([t.score for t in alone], rel=1e-10)
    assert [t.diverged for t in together] == [t.diverged for t in alone]


def test_batch_norms_are_stacked_too():
    together, alone = both("adam", problem(batch_norm=True))
    for trial, own in zip(together, alone, strict=True):
        assert trial.series["train/loss"] == pytest.approx(own.series["train/loss"], rel=1e-8)


@pytest.mark.parametrize("name", ["sgd", "kfac", "ekfac"])
def test_a_run_that_diverges_leaves_the_others_alone(name):
    runs = [({"lr": lr}, 0) for lr in (0.1, 1e300, 0.03)]
    together, alone = both(name, problem("gaussian"), runs=runs)
    assert [t.diverged for t in together] == [t.diverged for t in alone]
    assert together[1].diverged
    assert math.isinf(together[1].score)
    assert [t.score for t in together] == pytest.approx([t.score for t in alone], rel=1e-8)


def test_a_search_that_is_stacked():
    """The same grid; draws share the second option, and the chosen options are trained alone on the fresh seed."""
    method = Method(
        name="SGD",
        make=lambda model, lr, momentum: torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum),
        grid={"lr": (0.01, 0.1, 1.0), "momentum": (0.9, 0.5)},
    )
    asked = {"trials": 12, "seeds": (0, 1), "fresh": (7,)}
    found, plain = (search(problem(), method, **asked, stacked=how) for how in ("lr", None))
    assert found.tried()[:6] == plain.tried()[:6]
    for trial, own in zip(found.trials[:12], plain.trials[:12], strict=True):
        assert (trial.options, trial.seed) == (own.options, own.seed)
        assert trial.score == pytest.approx(own.score, rel=1e-10)
    drawn = found.tried()[6:]
    assert len(drawn) == 6
    assert len({options["momentum"] for options in drawn}) == 2
    assert len({options["lr"] for options in drawn}) == 6
    assert found.reported[0].seed == 7


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (KFAC, {}),
        (KFAC, {**FORMULA, "clip": 0.1}),
        (KFAC, {**FORMULA, "graft": "gradient"}),
        (KFAC, {**FORMULA, "overrides": {"0*": {"lr": 0.5}}}),
        (Muon, {}),
        (SOAP, {}),
        (Shampoo, {}),
    ],
)
def test_updates_that_are_not_in_proportion_to_the_rate_are_refused(kind, options):
    """Updates of AdamW's size are bounded by the weights: half the rate is not half the update."""
    one = Trainer(problem=problem(), make=lambda model, lr: kind(model, lr=lr, **options), score="train/loss", every=5)
    with pytest.raises(InputError, match=f"{kind.__name__}.*Search without"):
        StackedTrainer(one=one)(RUNS)


def test_torch_optimizers_that_are_not_in_proportion_are_refused():
    makers = (
        lambda model, lr: torch.optim.Adafactor(model.parameters(), lr=lr),
        lambda model, lr: torch.optim.SGD([{"params": list(model.parameters())}], lr=0.5),
        lambda model, lr: torch.optim.LBFGS(model.parameters(), lr=lr),
    )
    for maker in makers:
        one = Trainer(problem=problem(), make=maker, score="train/loss", every=5)
        with pytest.raises(InputError, match="Search without"):
            StackedTrainer(one=one)(RUNS)


def test_a_neighbour_that_diverges_leaves_running_statistics_alone():
    runs = [({"lr": lr}, 0) for lr in (0.1, 1e200, 0.03)]
    together, alone = both("sgd", problem("gaussian", batch_norm=True), runs=runs)
    assert [t.score for t in together] == pytest.approx([t.score for t in alone], rel=1e-8)
    assert [bool(t.diverged) for t in together] == [False, True, False]


@pytest.mark.parametrize("name", ["sgd", "kfac"])
def test_a_gradient_that_is_not_finite_stops_nobody_else(name):
    """The loss of seed 1 is finite, its gradient is not: the optimizer would skip the step for all."""

    def model(seed: int) -> nn.Sequential:
        made = network(seed)
        if seed == 1:
            with torch.no_grad():
                made[0].weight.mul_(1e-160)
                made[2].weight.mul_(1e160)
                made[2].bias.fill_(1e150)
        return made

    given = replace(problem("gaussian"), model=model)
    runs = [({"lr": 0.03}, 0), ({"lr": 0.03}, 1)]
    together, alone = both(name, given, runs=runs)
    assert together[0].score == pytest.approx(alone[0].score, rel=1e-8)
    assert not together[0].diverged


def test_networks_that_would_lose_something_are_refused():
    frozen, layer, hooked = network(0), nn.Linear(3, 3), network(0)
    frozen[0].requires_grad_(False)
    hooked[0].register_forward_hook(lambda *given: None)
    for model, what in ((frozen, "frozen"), (nn.Sequential(layer, nn.Tanh(), layer), "twice"), (hooked, "hooks")):
        with pytest.raises(InputError, match=what):
            stacked([model])


def test_batches_that_cannot_be_trained_on_together():
    empty = replace(problem(), batches=lambda split, seed: iter([]), budget=Budget(steps=3))
    deep = replace(problem(), batches=tensor_batches({"train": (torch.randn(4, 2, 5), torch.zeros(4, 2, 3))}, 2))
    for given, what in ((empty, "batch"), (deep, "N, features|shape")):
        one = Trainer(problem=given, make=make("sgd"), score="train/loss", every=5)
        with pytest.raises(InputError, match=what):
            StackedTrainer(one=one)(RUNS)


def test_what_cannot_be_stacked_is_said():
    with pytest.raises(InputError, match="Conv2d"):
        stacked([nn.Sequential(nn.Conv2d(1, 1, 1))])
    with pytest.raises(InputError, match="a Linear of no layers"):
        stacked([nn.Linear(2, 2)])
    method = Method(name="M", make=torch.optim.SGD, grid={"rate": (0.1,)})
    with pytest.raises(InputError, match="rate"):
        search(problem(), method, trials=1, stacked="lr")
    one = Trainer(problem=problem(), make=make("sgd"), score="train/loss", every=5)
    with pytest.raises(InputError, match="alike"):
        StackedTrainer(one=one)([({"lr": 1.0, "a": 1}, 0), ({"lr": 1.0, "a": 2}, 0)])
    short = Trainer(problem=problem(), make=make("sgd"), score="train/loss", every=5, budget=Budget(seconds=1.0))
    with pytest.raises(InputError, match="seconds"):
        StackedTrainer(one=short)(RUNS)


@pytest.mark.parametrize("name", ["kfac", "ekfac", "ekfac-ra", "foof"])
def test_a_matrix_without_statistics_stops_no_other_of_its_stack(name):
    """Of seed 1 all weights are zero, so that its first layer has no gradient: as an expert has that gets no token."""

    def model(seed: int) -> nn.Sequential:
        made = network(seed)
        if seed == 1:
            nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in made.parameters())), made.parameters())
        return made.double()

    together, alone = both(name, replace(problem(), model=model), runs=[({"lr": 0.03}, 0), ({"lr": 0.03}, 1)])
    assert [t.score for t in together] == pytest.approx([t.score for t in alone], rel=1e-8)


def test_networks_of_two_kinds_are_refused():
    one, other = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    for models in ([one, other], [one, nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh())]):
        with pytest.raises(InputError, match="differ in more than their weights"):
            stacked(models)
