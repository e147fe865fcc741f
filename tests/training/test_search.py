"""A search gives every method as many trials, chooses by the mean over seeds, and counts what diverged."""

import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from layerwise.foundations.errors import FileFormatError, InputError, NumericalError
from layerwise.training import Budget, Choice, Method, Problem, search, tensor_batches
from layerwise.training.workers import workers


def problem(**more: Any) -> Problem:
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
    data = {"train": (x, x.sum(1, keepdim=True)), "held": (-x, -x.sum(1, keepdim=True))}
    batches = tensor_batches(data, batch_size=16)
    budget = Budget(epochs=2)
    return Problem(
        name="line", model=lambda seed: nn.Linear(3, 1), likelihood="gaussian", batches=batches, budget=budget, **more
    )


def sgd(*rates: float, **more: Any) -> Method:
    return Method(
        name="SGD",
        make=lambda model, lr, **rest: torch.optim.SGD(model.parameters(), lr=lr, **rest),
        grid={"lr": rates, **more},
    )


def test_grid_and_draws_around_its_best_point():
    found = search(problem(), sgd(0.001, 0.01, 0.1), trials=8, seeds=(0, 1), fresh=(5, 6))
    tried = found.tried()
    assert [options["lr"] for options in tried[:3]] == [0.001, 0.01, 0.1]
    assert len(tried) == 8
    assert len(found.trials) == 16
    best = min(tried[:3], key=found.score_of)["lr"]
    assert all(best / 10**0.5 <= options["lr"] <= best * 10**0.5 for options in tried[3:])
    assert len({options["lr"] for options in tried}) == 8
    assert found.options is not None
    assert found.score_of(found.options) == min(map(found.score_of, tried))
    assert [trial.seed for trial in found.reported] == [5, 6]
    assert all(trial.options == found.options for trial in found.reported)


def test_the_score_is_the_loss_at_the_end_of_that_training():
    (trial,) = search(problem(), sgd(0.05), trials=1, seeds=(3,)).trials
    torch.manual_seed(0)
    assert trial.series["step"] == [0, 6]
    assert trial.series["train/loss"][-1] == trial.score < trial.series["train/loss"][0]
    assert trial.series["seconds"][-1] > trial.series["seconds"][0] == 0


def test_the_same_search_twice_and_elsewhere_is_the_same():
    method, found = sgd(0.01, 0.1), []
    with ThreadPoolExecutor(1) as pool:
        for how in (map, pool.map):
            found.append(search(problem(), method, trials=4, map=how).as_dict())
    assert found[0] == found[1]


def test_a_rate_at_the_edge_is_said():
    assert search(problem(), sgd(1e-4, 1e-3, 1e-2), trials=3).at_edge == ("lr",)
    assert search(problem(), sgd(1e-3, 0.1, 100.0), trials=3).at_edge == ()
    assert search(problem(), sgd(0.1), trials=1).at_edge == ()


def test_draws_stay_inside_the_grid_and_keep_their_kind():
    grid = {"a": (0.0, 0.5, 0.9), "b": (0.9, 0.5, 0.98), "whole": (1, 5, 10), "flag": (False, True), "one": (3.0,)}
    method = Method(name="M", make=torch.optim.SGD, grid=grid)
    points = [dict.fromkeys(grid, 0) | {"a": a, "b": b, "whole": w, "flag": True, "one": 3.0}
              for a, b, w in zip(*(grid[n] for n in ("a", "b", "whole")), strict=True)]  # fmt: skip
    drawn = [method.near(p, torch.Generator().manual_seed(s)) for p in points for s in range(20)]
    assert all(0 <= d["a"] <= 0.9 and 0.5 <= d["b"] <= 0.98 and 1 <= d["whole"] <= 10 for d in drawn)
    assert all(type(d["whole"]) is int and d["flag"] is True and d["one"] == 3 for d in drawn)
    assert len({d["a"] for d in drawn}) > 50


def test_processes_may_run_the_trials():
    data = {"train": (torch.randn(20, 2), torch.randn(20, 1))}
    batches = tensor_batches(data, batch_size=5)
    given = Problem(name="p", model=_model, likelihood="gaussian", batches=batches, budget=Budget(epochs=1))
    method = Method(name="SGD", make=_sgd, grid={"lr": (0.01, 0.1)})
    again = pickle.loads(pickle.dumps((given, method)))
    assert search(*again, trials=2).as_dict() == search(given, method, trials=2).as_dict()


def _model(seed: int) -> nn.Module:
    return nn.Linear(2, 1)


def _sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_what_diverges_comes_last_and_is_counted():
    found = search(problem(), sgd(0.1, 1e30, 3.0), trials=3, seeds=(0, 1))
    assert found.options == {"lr": 0.1}
    why = {trial.options["lr"]: trial.diverged for trial in found.trials}
    assert why == {0.1: "", 1e30: "loss not finite", 3.0: "training loss above that before training"}
    assert all(math.isinf(trial.score) == bool(trial.diverged) for trial in found.trials)


def test_one_diverged_seed_is_enough():
    """A model that only one seed can train."""

    def model(seed: int) -> nn.Module:
        layer = nn.Linear(3, 1)
        nn.init.constant_(layer.weight, 0.0 if seed == 0 else math.nan)
        return layer

    given = problem()
    given = Problem(name="one", model=model, likelihood="gaussian", batches=given.batches, budget=given.budget)
    found = search(given, sgd(0.1), trials=1, seeds=(0, 1))
    assert found.options is None
    assert math.isinf(found.score_of({"lr": 0.1}))


def test_a_search_without_a_finite_run_is_a_verdict_and_an_error_where_one_is_needed():
    found = search(problem(), sgd(1e30, 1e31), trials=3, fresh=(9,))
    assert isinstance(found, Choice)
    assert found.options is None
    assert found.reported == ()
    assert len(found.as_dict()["trials"]) == 6
    with pytest.raises(InputError, match="every one of 3 options diverged"):
        found.require()


def test_an_error_of_the_numbers_counts_as_diverged_and_others_are_raised():
    def fails(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        if lr > 0.5:
            raise NumericalError("no root")
        return torch.optim.SGD(model.parameters(), lr=lr)

    found = search(problem(), Method(name="M", make=fails, grid={"lr": (0.1, 1.0)}), trials=2, seeds=(0,))
    assert found.trials[1].diverged == "NumericalError: no root"
    with pytest.raises(TypeError, match="rate"):
        search(problem(), Method(name="M", make=fails, grid={"rate": (0.1,)}), trials=1)


def test_held_out_data_may_choose():
    metrics = {"far": lambda f, y: (f - y).abs().mean()}
    found = search(problem(metrics=metrics), sgd(0.01, 0.1), trials=2, score="held/far", seeds=(0,))
    assert found.options == {"lr": 0.1}
    assert "held/far" in found.trials[0].series
    with pytest.raises(InputError, match="held/far"):
        search(problem(metrics=metrics), sgd(0.01), trials=1, score="held/fra")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"trials": 1}, "3 points"),
        ({"seeds": ()}, "some seeds"),
        ({"fresh": (0, 9)}, "not among them"),
        ({"seeds": (0, 0)}, "each once"),
    ],
)
def test_bad_arguments(wrong: dict[str, Any], says: str):
    with pytest.raises(InputError, match=says):
        search(problem(), sgd(0.001, 0.01, 0.1), **{"trials": 3, "seeds": (0,), **wrong})


def test_a_single_point_has_nothing_around_it():
    with pytest.raises(InputError, match="single point"):
        search(problem(), sgd(0.1), trials=4)


@pytest.mark.parametrize("grid", [{}, {"lr": ()}, {"lr": (0.1, 0.1)}, {"lr": (math.nan,)}])
def test_bad_grids(grid: dict[str, Any]):
    with pytest.raises(InputError, match="grid"):
        Method(name="SGD", make=torch.optim.SGD, grid=grid)


def test_a_search_goes_on_where_it_stopped(tmp_path):
    """After three of six trials; the file is cut in the middle of a line, as by a kill."""
    method, path = sgd(0.01, 0.1), tmp_path / "new" / "kept.trials"
    whole = search(problem(), method, trials=3, fresh=(5,))
    ran: list[Any] = []

    def stops(function: Any, runs: Any) -> Any:
        for run in runs:
            if len(ran) == 3:
                raise KeyboardInterrupt
            ran.append(run)
            yield function(run)

    with pytest.raises(KeyboardInterrupt):
        search(problem(), method, trials=3, fresh=(5,), keep=path, map=stops)
    text = path.read_bytes()
    path.write_bytes(text[: len(text) - 20])
    again: list[Any] = []
    found = search(problem(), method, trials=3, fresh=(5,), keep=path, map=lambda f, r: map(f, _noted(again, r)))
    assert len(again) == 7 - 2  # two survived
    assert found.as_dict() == whole.as_dict()
    assert found.reported[0].score == whole.reported[0].score
    nothing: list[Any] = []
    search(problem(), method, trials=3, fresh=(5,), keep=path, map=lambda f, r: map(f, _noted(nothing, r)))
    assert nothing == []


def _noted(notes: list[Any], runs: Any) -> Any:
    for run in runs:
        notes.append(run)
        yield run


def test_trials_of_another_search_are_refused(tmp_path):
    search(problem(), sgd(0.01), trials=1, keep=tmp_path / "kept")
    with pytest.raises(FileFormatError, match="another search"):
        search(problem(), sgd(0.01), trials=1, keep=tmp_path / "kept", budget=Budget(epochs=1))
    other = replace(problem(), model=lambda seed: nn.Linear(3, 1, bias=False))
    with pytest.raises(FileFormatError, match="another search"):
        search(other, sgd(0.01), trials=1, keep=tmp_path / "kept")
    (tmp_path / "cut").write_text('{"budg')
    assert search(problem(), sgd(0.01), trials=1, keep=tmp_path / "cut").options == {"lr": 0.01}


def test_infinite_scores_are_kept_too(tmp_path):
    for _ in range(2):
        found = search(problem(), sgd(0.1, 1e30), trials=2, keep=tmp_path / "kept")
    assert [math.isinf(trial.score) for trial in found.trials] == [False, False, True, True]


def test_processes_share_the_work():
    with workers(2) as over:
        assert list(over(abs, [-1, 2, -3])) == [1, 2, 3]
