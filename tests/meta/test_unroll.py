"""Unrolled meta-gradients against one autograd graph of the whole loop, and how faults are told."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from layerwise.foundations.errors import InputError
from layerwise.meta import Episode, Fault, Quadratic, functional, inner_step, learn, sgd, unrolled


def momentum(gradients, memory, params, meta):
    memory = {name: meta["momentum"] * memory[name] + g for name, g in gradients.items()}
    return {name: -meta["lr"] * v for name, v in memory.items()}, memory


def problem():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    loss, params = functional(model, cross_entropy)
    batches = [(torch.randn(5, 3).double(), torch.randint(2, (5,))) for _ in range(6)]
    state = {"params": params, "memory": {name: torch.zeros_like(p) for name, p in params.items()}}
    meta = {"lr": torch.tensor(0.3).double(), "momentum": torch.tensor(0.5).double()}
    return loss, state, meta, batches


def by_one_graph(loss, state, meta, batches, judged, average, first_with_gradient=0):
    meta = {name: value.clone().requires_grad_() for name, value in meta.items()}
    params, memory, values = state["params"], state["memory"], []
    for k, batch in enumerate(batches):
        if k == first_with_gradient:
            params, memory = ({n: t.detach() for n, t in tree.items()} for tree in (params, memory))
        params = {name: p if p.requires_grad else p.clone().requires_grad_() for name, p in params.items()}
        found = torch.autograd.grad(loss(params, batch), list(params.values()), create_graph=True)
        changes, memory = momentum(dict(zip(params, found, strict=True)), memory, params, meta)
        params = {name: p + changes[name] for name, p in params.items()}
        values.append(loss(params, judged))
    value = torch.stack(values[first_with_gradient:]).sum() / len(batches) if average else values[-1]
    return value, dict(zip(meta, torch.autograd.grad(value, list(meta.values())), strict=True))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("truncate", [None, 2])
def test_gradient_of_a_loop_with_memory_is_that_of_one_graph(average, truncate):
    loss, state, meta, batches = problem()
    judged = batches[-1]
    found = unrolled(
        inner_step(loss, momentum),
        state,
        meta,
        steps=6,
        objective=lambda s, batch: loss(s["params"], batch),
        batches=batches,
        judged=lambda k: judged,
        average=average,
        truncate=truncate,
    )
    first = 0 if truncate is None else 6 - truncate
    value, expected = by_one_graph(loss, state, meta, batches, judged, average, first)
    assert found.fault is None
    assert not found.vanished
    if truncate is None:
        torch.testing.assert_close(found.value, value.detach())
    torch.testing.assert_close(found.gradient, expected, rtol=1e-9, atol=1e-12)


def test_tasks_at_once_are_the_mean_of_each_alone():
    loss, state, _, batches = problem()
    meta = {"lr": torch.tensor(0.3).double()}
    states = [{"params": {n: p * (1 + i) for n, p in state["params"].items()}, "memory": None} for i in range(2)]
    data = [[batches[i], batches[i + 2]] for i in range(2)]
    objective = lambda s, batch: loss(s["params"], batch)  # noqa: E731
    step = inner_step(loss, sgd)
    each = [
        unrolled(step, s, meta, steps=2, objective=objective, batches=b, judged=b)
        for s, b in zip(states, data, strict=True)
    ]
    stacked = {"params": {n: torch.stack([s["params"][n] for s in states]) for n in state["params"]}, "memory": None}
    both = [tuple(torch.stack(t) for t in zip(data[0][k], data[1][k], strict=True)) for k in range(2)]
    found = unrolled(step, stacked, meta, steps=2, objective=objective, batches=both, judged=both, tasks=True)
    mean = sum(e.gradient["lr"] for e in each) / 2
    torch.testing.assert_close(found.gradient["lr"], mean)
    torch.testing.assert_close(found.value, (each[0].value + each[1].value) / 2)


@pytest.mark.parametrize("tasks", [False, True])
def test_random_numbers_of_steps_and_batches_are_the_same_on_the_way_back(tasks):
    """Against a finite difference with the same seed: dropout, drawn batches, and a random objective."""
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 2)).double()
    loss, params = functional(model, cross_entropy)
    x, y = torch.randn(20, 3).double(), torch.randint(2, (20,))
    params = {name: torch.stack([p, 2 * p]) for name, p in params.items()} if tasks else params

    def drawn(k):
        rows = torch.randint(20, (2, 5) if tasks else (5,))
        return x[rows], y[rows]

    def at(lr):
        torch.manual_seed(5)
        state, meta = {"params": params, "memory": None}, {"lr": torch.tensor(lr, dtype=torch.float64)}
        options = {"steps": 3, "batches": drawn, "judged": drawn, "average": True, "tasks": tasks}
        found = unrolled(inner_step(loss, sgd), state, meta, objective=lambda s, b: loss(s["params"], b), **options)
        return found, torch.rand(1)

    (found, after), eps = at(0.3), 1e-5
    difference = (at(0.3 + eps)[0].value - at(0.3 - eps)[0].value) / (2 * eps)
    torch.testing.assert_close(found.gradient["lr"], difference, rtol=1e-6, atol=1e-9)
    torch.manual_seed(5)
    assert after != torch.rand(1)  # the caller's random numbers have gone on, not back


def test_every_batch_is_asked_for_once():
    batches, asked = iter(range(1, 4)), []
    found = unrolled(
        lambda w, meta, b: w * meta["a"] * b,
        torch.tensor(1.0),
        {"a": torch.tensor(1.0)},
        steps=3,
        objective=lambda w, _: w,
        batches=lambda k: (asked.append(k), next(batches))[1],
    )
    assert asked == [0, 1, 2]
    assert float(found.gradient["a"]) == 18.0  # of 6a³


def test_an_earlier_objective_that_is_no_number_is_said():
    found = unrolled(
        lambda w, meta, _: w * meta["a"],
        torch.tensor(2.0),
        {"a": torch.tensor(0.5)},
        steps=4,
        objective=lambda w, _: torch.where(w == 0.5, torch.inf, w),
        average=True,
        truncate=1,
    )
    assert found.fault == Fault("objective", 2)


def test_integers_in_the_state_are_carried_along():
    def step(state, meta, batch):
        return {"w": state["w"] * meta["a"] ** state["k"], "k": state["k"] + 1}

    state = {"w": torch.tensor(2.0), "k": torch.tensor(1)}
    found = unrolled(step, state, {"a": torch.tensor(3.0)}, steps=2, objective=lambda s, _: s["w"])
    assert float(found.gradient["a"]) == 54.0  # 2a³
    assert int(found.state["k"]) == 3


def on_quadratic(steps, eta, dtype):
    q = Quadratic(torch.tensor([1.0, 10.0]).double(), torch.tensor([1.0, 1.0]).double())
    lam = q.eigenvalues.to(dtype)

    def step(w, meta, batch):
        return w - meta["lr"] * lam * w

    meta = {"lr": torch.tensor(eta)}
    objective = lambda w, _: q.loss(w).log() / steps  # noqa: E731
    return q, unrolled(step, q.c, meta, steps=steps, objective=objective, dtype=dtype)


def test_precision_only_moves_the_wall():
    """(ηL − 1)^(2t) = 9^(2t) leaves float32 at t = 21 and float64 at t = 162."""
    q, found = on_quadratic(15, 1.0, torch.float32)
    assert found.fault is None
    torch.testing.assert_close(found.gradient["lr"].double(), q.gradient(1.0, 15), rtol=1e-5, atol=0)
    assert on_quadratic(25, 1.0, torch.float32)[1].fault == Fault("objective", 25)
    assert on_quadratic(25, 1.0, torch.float64)[1].fault is None
    assert on_quadratic(200, 1.0, torch.float64)[1].fault == Fault("objective", 200)
    assert on_quadratic(60, 1.0, torch.float32)[1].fault == Fault("forward", 41)  # 9⁴¹ > 3.4e38 > 9⁴⁰
    assert torch.isfinite(q.gradient(1.0, 200))


def test_a_derivative_that_overflows_on_the_way_back_is_told_apart():
    def step(w, meta, batch):
        return (w + meta["a"]).sqrt() * 0 + w  # derivative of √ at 0 is infinite

    found = unrolled(step, torch.tensor(0.0), {"a": torch.tensor(0.0)}, steps=3, objective=lambda w, _: w)
    assert found.fault == Fault("backward", 3)
    assert "way back" in str(found.fault)


def test_a_gradient_of_exactly_zero_is_said():
    found = unrolled(
        lambda w, meta, _: w - 0 * meta["a"],
        torch.tensor(1.0),
        {"a": torch.tensor(1.0)},
        steps=2,
        objective=lambda w, _: w,
    )
    assert found.vanished


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"meta": {}}, "meta"),
        ({"meta": {"a": torch.tensor(1)}}, "meta"),
        ({"meta": {"a": torch.tensor(torch.nan)}}, "not finite"),
        ({"steps": 0}, "steps=0"),
        ({"truncate": 0}, "truncate=0"),
        ({"batches": [None]}, "1 batches for 3 steps"),
        ({"batches": iter([None] * 3)}, "list_iterator"),
        ({"objective": lambda w, _: w.repeat(2)}, "shape"),
        ({"objective": lambda w, _: 1.0}, "type float"),
        ({"tasks": True}, "tasks"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(unchecked, changed, message):
    options = {"meta": {"a": torch.tensor(1.0)}, "steps": 3, "objective": lambda w, _: w} | changed
    with pytest.raises(InputError, match=message):
        unrolled(lambda w, meta, _: w * meta["a"], torch.tensor(1.0), **options)


def test_an_objective_may_have_an_axis_of_one():
    found = unrolled(
        lambda w, m, _: w * m["a"], torch.ones(1), {"a": torch.tensor(3.0)}, steps=2, objective=lambda w, _: w
    )
    assert float(found.gradient["a"]) == 6.0


def test_batch_normalisation_that_keeps_averages_is_refused():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    loss, params = functional(model, cross_entropy)
    batch = torch.randn(4, 3), torch.randint(2, (4,))
    step, state = inner_step(loss, sgd), {"params": params, "memory": None}
    with pytest.raises(InputError, match="eval"):
        step(state, {"lr": torch.tensor(0.1)}, batch)
    model.eval()
    step(state, {"lr": torch.tensor(0.1)}, batch)


@pytest.mark.parametrize(
    ("meta", "options", "message"),
    [
        ({}, {}, "meta"),
        ({"a": -3.0}, {}, "meta"),
        ({"a": torch.tensor(1.0)}, {"clip": -1.0}, "clip"),
        ({"a": torch.tensor(1.0)}, {"decay": 2.0}, "decay"),
    ],
)
def test_what_learning_cannot_start_from_is_refused(unchecked, meta, options, message):
    with pytest.raises(InputError, match=message):
        learn(lambda w, m, _: w * m["a"], meta, [], lambda w, _: w, **options)


def test_learning_never_uses_a_gradient_that_is_no_number():
    def step(w, meta, batch):
        return w * meta["a"]

    meta = {"a": torch.tensor(1e20)}
    good = Episode(state=torch.ones(1), segments=[1, 1, 4])
    found = learn(step, meta, [good], lambda w, _: w.log(), lr=1e18)
    assert [at for at, _ in found.faults] == [1]  # the second segment overflows; the third is left out
    assert len(found.objectives) == 2
    assert torch.isfinite(found.meta["a"])
