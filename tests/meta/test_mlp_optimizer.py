"""The MLP optimizer: its features by the formulas, tasks at once, and its place in a plain loop."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from error_sentences import THREE
from layerwise.foundations.errors import InputError
from layerwise.meta import (
    Episode,
    MLPOptimizer,
    functional,
    inner_step,
    learn,
    mlp_memory,
    mlp_parameters,
    mlp_update,
    unrolled,
)
from layerwise.meta.mlp_optimizer import DECAYS, SCALES, embedding, features


def written_out(g, w, memory, step, meta):
    """One weight at a time, as D.6.1 says it."""
    columns = []
    for i in range(len(g)):
        row = [g[i], w[i]]
        first = [b * memory[i][0][j] + (1 - b) * g[i] for j, b in enumerate(DECAYS)]
        second = [b * memory[i][1][j] + (1 - b) * g[i] ** 2 for j, b in enumerate(DECAYS)]
        roots = [1 / (v + 1e-6) ** 0.5 for v in second]
        row += first + second + [m * r for m, r in zip(first, roots, strict=True)] + roots
        memory[i] = (first, second)
        columns.append(torch.stack(row))
    found = torch.stack(columns)
    found = (found - found.mean(0)) / found.std(0, unbiased=False)
    at = torch.tensor([step / s for s in SCALES], dtype=torch.float64).tanh().expand(len(g), -1)
    hidden = torch.relu(torch.cat([found, at], 1) @ meta["W1"] + meta["b1"])
    output = hidden @ meta["W2"] + meta["b2"]
    return -1e-3 * output[:, 0] * torch.exp(1e-3 * output[:, 1])


def test_the_update_is_the_formula_for_two_steps():
    meta = {name: p.double() for name, p in mlp_parameters(5).items()}
    params = {"a": torch.randn(2, 2).double(), "b": torch.randn(3).double()}
    plain = [(torch.zeros(5).double(), torch.zeros(5).double()) for _ in range(7)]
    memory = mlp_memory(params)
    for step in range(2):
        gradients = {name: torch.randn_like(p) for name, p in params.items()}
        changes, memory = mlp_update(gradients, memory, params, meta)
        flat = [torch.cat([t["a"].reshape(-1), t["b"]]) for t in (gradients, params, changes)]
        expected = written_out(flat[0], flat[1], plain, step, meta)
        torch.testing.assert_close(flat[2], expected, rtol=1e-9, atol=1e-15)
        params = {name: p + changes[name] for name, p in params.items()}


def test_there_are_31_features_and_all_but_nine_are_normalised():
    g, w = torch.randn(2, 50)
    found = features(g, w, torch.randn(50, 5), torch.rand(50, 5))
    at = embedding(torch.tensor(7.0))
    assert found.shape[1] + len(at) == 31 == len(mlp_parameters()["W1"])
    torch.testing.assert_close(found.mean(0), torch.zeros(22), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.square().mean(0), torch.ones(22), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_feature_that_is_the_same_for_all_weights_is_zero(dtype):
    for size in (7, 1001):
        w = torch.randn(size).to(dtype)
        found = features(
            torch.full_like(w, 0.3), w, torch.full((size, 5), 0.1).to(dtype), torch.zeros(size, 5).to(dtype)
        )
        torch.testing.assert_close(found[:, 0], torch.zeros_like(w), atol=0.1, rtol=0)
        torch.testing.assert_close(found[:, 2:], torch.zeros(size, 20).to(dtype), atol=0.1, rtol=0)
        g = torch.full_like(w, 0.3)
        g[0] += 1e-7  # a few last digits of float32 are a difference
        assert float(features(g, w, w[:, None].expand(-1, 5), torch.zeros(size, 5).to(dtype))[0, 0]) > 2


def test_tasks_of_a_stack_do_not_see_each_other():
    meta = mlp_parameters(4)
    params = {"w": torch.randn(3, 4, 2), "b": torch.randn(3, 2)}
    gradients = {name: torch.randn_like(p) for name, p in params.items()}
    changes, memory = mlp_update(gradients, mlp_memory(params, tasks=True), params, meta)
    for i in range(3):
        one = {name: p[i] for name, p in params.items()}
        alone, _ = mlp_update({name: g[i] for name, g in gradients.items()}, mlp_memory(one), one, meta)
        torch.testing.assert_close({name: c[i] for name, c in changes.items()}, alone)
    assert memory["step"].tolist() == [1.0, 1.0, 1.0]


def test_the_optimizer_makes_the_steps_of_the_function_and_goes_on_from_its_state():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    meta, data = mlp_parameters(6), [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(4)]
    loss, params = functional(copy.deepcopy(model), cross_entropy)
    state = {"params": params, "memory": mlp_memory(params)}
    step = inner_step(loss, mlp_update)
    opt = MLPOptimizer(model.parameters(), meta)
    for k, batch in enumerate(data):
        state = step(state, meta, batch)
        opt.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        opt.step()
        if k == 1:  # as after a restart
            saved = opt.state_dict()
            opt = MLPOptimizer(model.parameters(), meta)
            opt.load_state_dict(saved)
    torch.testing.assert_close(dict(model.named_parameters()), state["params"], rtol=1e-4, atol=1e-6)


def test_steps_are_counted_by_all_parameters_together():
    early, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    opt = MLPOptimizer([late, early], mlp_parameters(4))
    for k in range(3):
        early.grad, late.grad = torch.randn(3), torch.randn(2) if k == 2 else None
        opt.step()
    assert int(opt.state[early]["step"]) == int(opt.state[late]["step"]) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    start, meta = torch.randn(5).to(dtype), mlp_parameters(4)
    half, single = nn.Parameter(start.clone()), nn.Parameter(start.float())
    for p in (half, single):
        opt = MLPOptimizer([p], meta, size=100.0)
        for k in range(2):
            p.grad = (start * (0.01 + k)).to(p.dtype)
            opt.step()
        assert opt.state[p]["second"].dtype == torch.float32
    assert half.dtype == dtype
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(half.float(), single.data, rtol=tolerance, atol=tolerance)


def test_the_meta_gradient_of_the_optimizer_is_a_finite_difference():
    model = nn.Linear(3, 2).double()
    loss, params = functional(model, cross_entropy)
    meta = {name: p.double() for name, p in mlp_parameters(3).items()}
    batch = torch.randn(6, 3).double(), torch.randint(2, (6,))

    def value(meta):
        state = {"params": params, "memory": mlp_memory(params)}
        objective = lambda s, b: loss(s["params"], b)  # noqa: E731
        step = inner_step(loss, mlp_update)
        return unrolled(step, state, meta, steps=3, objective=objective, batches=[batch] * 3, judged=[batch] * 3)

    found, eps = value(meta), 1e-3
    up, down = (meta | {"b2": meta["b2"] + sign * torch.tensor([eps, 0.0]).double()} for sign in (1, -1))
    difference = (value(up).value - value(down).value) / (2 * eps)
    torch.testing.assert_close(found.gradient["b2"][0], difference, rtol=1e-4, atol=1e-9)


def test_learning_makes_it_better_on_its_task():
    x = torch.randn(64, 5)
    y = (x[:, 0] > 0).long()
    loss, params = functional(nn.Linear(5, 2), cross_entropy)
    episodes = [
        Episode(
            state={"params": params, "memory": mlp_memory(params)},
            segments=[8],
            batches=lambda k: (x, y),
            judged=lambda k: (x, y),
        )
        for _ in range(12)
    ]
    found = learn(
        inner_step(loss, mlp_update), mlp_parameters(8), episodes, lambda s, b: loss(s["params"], b), tasks=False
    )
    assert not found.faults
    assert found.objectives[-1] < 0.97 * found.objectives[0]


@pytest.mark.parametrize(
    ("meta", "options"),
    [
        (None, {}),
        ({}, {}),
        ({**mlp_parameters(4), "W1": torch.zeros(30, 4)}, {}),
        ({**mlp_parameters(4), "b2": torch.full((2,), torch.nan)}, {}),
        (mlp_parameters(4), {"size": 0.0}),
    ],
)
def test_what_it_cannot_be_made_of_is_refused(unchecked, meta, options):
    with pytest.raises(InputError, match=THREE):
        MLPOptimizer(nn.Linear(2, 2).parameters(), meta, **options)
