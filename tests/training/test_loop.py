"""The loop: deterministic, on budget, on schedule; the model and torch's state are left as they should be."""

import math

import pytest
import torch
from torch import nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.foundations.random import stream
from layerwise.training import At, Budget, Every, Logarithmic, Problem, Recorder, accuracy, tensor_batches, train
from layerwise.training.metrics import DistanceFromStart, Evaluation, FisherTrace, KernelAlignment


def dataset(n: int = 48):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator)
    y = (x[:, 0] + x[:, 1] > 0).long()
    return {"train": (x, y), "test": (x[:20], y[:20])}


def network(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))


def problem(**changes) -> Problem:
    given = {
        "name": "halves",
        "model": network,
        "batches": tensor_batches(dataset(), batch_size=16),
        "metrics": {"accuracy": accuracy},
        "budget": Budget(steps=12),
    }
    return Problem(**(given | changes))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


OPTIMIZERS = {
    "torch SGD": sgd,
    "torch Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
    "L-BFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
    "SGD": lambda model: lw.optim.SGD(model, lr=0.1),
    "KFAC": lambda model: lw.optim.KFAC(model, lr=3e-2, scale="formula"),
    "KFAC adaptive": lambda model: lw.optim.KFAC(model, lr=3e-2, damping="adaptive", scale="formula"),
    "EKFAC sampled": lambda model: lw.optim.EKFAC(model, lr=1e-3, likelihood="categorical", scale="formula"),
    "NGD": lambda model: lw.optim.NGD(model, lr=1e-2),
    "FOOF": lambda model: lw.optim.FOOF(model, lr=1e-2, scale="formula"),
    "Muon": lambda model: lw.optim.Muon(model, lr=1e-2, scale="formula"),
    "Shampoo": lambda model: lw.optim.Shampoo(model, lr=1e-2, scale="formula"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns_and_repeats_itself(name):
    runs = [train(problem(budget=Budget(steps=12)), OPTIMIZERS[name], seed=3) for _ in range(2)]
    first, last = (runs[0].recorder.series()["test/loss"][k] for k in (0, -1))
    assert last < first
    assert torch.equal(weights(runs[0].model), weights(runs[1].model))
    assert repr(runs[0].recorder.series()) == repr(runs[1].recorder.series())
    assert runs[0].steps == 12


@pytest.mark.parametrize("name", ["torch SGD", "KFAC", "EKFAC sampled"])
def test_equals_the_plain_loop(name):
    plain = problem(model=lambda seed: nn.Linear(6, 2))
    done = train(plain, OPTIMIZERS[name], seed=1, budget=Budget(epochs=2))
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(stream(1, "training").initial_seed())
        model = nn.Linear(6, 2)
    optimizer = OPTIMIZERS[name](model)
    for epoch in range(2):
        for x, y in plain.batches("train", stream(1, "pass", epoch).initial_seed()):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert done.steps == 6
    torch.testing.assert_close(weights(done.model), weights(model), rtol=1e-5, atol=1e-6)


def test_seeds_differ():
    one, two = (train(problem(), sgd, seed=seed) for seed in (0, 1))
    assert not torch.equal(weights(one.model), weights(two.model))


def test_nothing_depends_on_what_is_measured():
    """Dropout draws, the order of data and train mode are the same however often the test set is looked at."""
    quiet = train(problem(), sgd, measures=[])
    curious = train(problem(), sgd, measures=[(Every(1), Evaluation("test")), (Every(1), drawing)])
    assert torch.equal(weights(quiet.model), weights(curious.model))


def drawing(state) -> dict[str, float]:
    return {"draw": float(torch.rand(()))}


def test_torch_state_is_left_alone():
    before = torch.random.get_rng_state()
    train(problem(), sgd)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("budget", "steps", "epochs"),
    [
        (Budget(steps=0), 0, 0),
        (Budget(steps=7), 7, 2),
        (Budget(epochs=3), 9, 3),
        (Budget(steps=4, epochs=3), 4, 1),
        (Budget(steps=100, epochs=2), 6, 2),
        (Budget(seconds=0), 0, 0),
    ],
)
def test_budgets(budget, steps, epochs):
    done = train(problem(), sgd, budget=budget)
    assert (done.steps, done.epochs, done.stopped) == (steps, epochs, "budget")
    assert done.recorder.steps[-1] == steps


def test_budget_in_seconds_ends():
    done = train(problem(), sgd, budget=Budget(seconds=0.2), measures=[])
    assert done.steps > 0
    assert 0.2 <= done.seconds < 5


@pytest.mark.parametrize("limits", [{}, {"steps": -1}, {"seconds": math.nan}])
def test_bad_budgets(limits):
    with pytest.raises(InputError, match="at least one limit"):
        Budget(**limits)


def test_schedules():
    done = train(
        problem(budget=Budget(steps=11)),
        sgd,
        measures=[(Every(4), Evaluation("test")), (At([2, 4]), drawing), (Logarithmic(1), DistanceFromStart())],
    )
    series = done.recorder.series()
    assert series["step"] == [0, 1, 2, 4, 8, 10, 11]
    measured = {
        name: [s for s, v in zip(series["step"], column, strict=True) if not math.isnan(v)]
        for name, column in series.items()
    }
    assert measured["test/loss"] == [0, 4, 8, 11]
    assert measured["draw"] == [2, 4, 11]
    assert measured["distance"] == [0, 1, 10, 11]
    assert measured["train/batch_loss"] == [1, 2, 4, 8, 10, 11]


def test_last_step_measures_everything_also_at_the_end_of_a_pass():
    done = train(problem(budget=Budget(epochs=2)), sgd, measures=[(Every(3), drawing), (At([0]), Evaluation("test"))])
    assert done.recorder.steps == [0, 3, 6]
    assert not math.isnan(done.recorder.series()["test/loss"][-1])


def test_evaluation_is_the_mean_over_examples_in_eval_mode():
    """20 examples in batches of 16 and 4: not the mean of two means; and dropout is off."""
    done = train(problem(), sgd)
    x, y = dataset()["test"]
    done.model.eval()
    with torch.no_grad():
        f = done.model(x)
    assert done.recorder.last()["test/loss"] == pytest.approx(float(nn.functional.cross_entropy(f, y)), rel=1e-5)
    assert done.recorder.last()["test/accuracy"] == pytest.approx(float((f.argmax(-1) == y).float().mean()))


def test_modes_of_all_modules_are_restored():
    def half_frozen(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    seen = []

    def modes(state) -> dict[str, float]:
        seen.append([module.training for module in state.model.modules()])
        return {}

    def freezing(model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)

    def freeze(state) -> dict[str, float]:
        state.model[1].eval()
        return {}

    done = train(
        problem(model=half_frozen),
        freezing,
        measures=[(At([1]), freeze), (Every(1), Evaluation("test")), (Every(1), modes)],
    )
    assert seen[1] == [True, True, False, True]
    assert all(mode == [True, True, False, True] for mode in seen[1:])
    assert [module.training for module in done.model.modules()] == [True, True, False, True]


def test_stops_where_the_loss_is_not_finite():
    steps = []

    def noting(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e18)
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        return optimizer

    squares = problem(
        model=lambda seed: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)),
        likelihood="gaussian",
        metrics={},
        batches=tensor_batches({k: (x, torch.randn(len(x), 2)) for k, (x, _) in dataset().items()}, 16),
        budget=Budget(steps=200),
    )
    done = train(squares, noting, measures=[(Every(50), Evaluation("test"))])
    assert done.stopped == "loss not finite"
    assert done.steps == len(steps) < 200
    assert not math.isfinite(done.recorder.series()["train/batch_loss"][-1])


def test_adaptive_damping_is_told():
    """After the first step, whose result the closure tells; later ups and downs may cancel."""
    done = train(problem(budget=Budget(steps=1)), OPTIMIZERS["KFAC adaptive"])
    assert done.optimizer.param_groups[0]["damping"] != 1e-1


def test_scheduler_is_stepped():
    done = train(
        problem(), sgd, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.1)
    )
    assert done.optimizer.param_groups[0]["lr"] == pytest.approx(0.003)


def test_curvature_and_kernel_on_the_way():
    x, y = dataset()["test"]
    target = nn.functional.one_hot(y, 2).float().flatten()
    smooth = problem(model=lambda seed: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)))
    measures = [(Every(6), FisherTrace((x, y))), (Every(6), KernelAlignment(x, torch.outer(target, target)))]
    done = train(smooth, sgd, measures=measures)
    exact = lw.fisher(done.model, (x, y), structure="dense", estimator="exact").to_dense().trace()
    assert done.recorder.last()["fisher/trace"] == pytest.approx(float(exact), rel=1e-5)
    assert 0 < done.recorder.last()["kernel/alignment"] <= 1
    quiet = train(smooth, sgd, measures=[])
    assert torch.equal(weights(quiet.model), weights(done.model))


def test_batches_that_run_dry_are_named():
    used_up = iter([])
    with pytest.raises(InputError, match="gave no batch"):
        train(problem(batches=lambda split, seed: used_up), sgd, measures=[])
    with pytest.raises(InputError, match="without batches"):
        train(problem(batches=lambda split, seed: used_up), sgd)


def test_bad_problems():
    with pytest.raises(KeyError, match="categorical"):
        problem(likelihood="categorial")
    with pytest.raises(InputError, match="named 'loss'"):
        problem(metrics={"loss": accuracy})
    with pytest.raises(InputError, match="Available: test, train"):
        list(tensor_batches(dataset(), 8)("valid", 0))
    with pytest.raises(InputError, match="batch_size=0"):
        tensor_batches(dataset(), 0)
    with pytest.raises(InputError, match="as many of both"):
        tensor_batches({"train": (torch.zeros(3, 1), torch.zeros(2))}, 2)
    for bad in (lambda: Every(0), lambda: Logarithmic(0)):
        with pytest.raises(InputError):
            bad()


def test_recorder_takes_what_comes():
    recorder = Recorder()
    recorder.add(0, {"a": 1})
    recorder.add(0, {"b": 2.0})
    recorder.add(3, {"b": math.inf})
    assert repr(recorder.series()) == repr({"step": [0, 3], "a": [1.0, math.nan], "b": [2.0, math.inf]})
    assert recorder.last() == {"a": 1.0, "b": math.inf}
