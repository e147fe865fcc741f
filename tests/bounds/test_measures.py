"""Complexity along the path and at its end: formulas by hand, nothing of the run touched, refusals."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import layerwise as lw
from layerwise import bounds
from layerwise.foundations.errors import InputError, UnsupportedError


def seeded(make, seed: int = 0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def batch(n: int = 12, d: int = 4, c: int = 3):
    rng = torch.Generator().manual_seed(1)
    return torch.randn(n, d, generator=rng), torch.randint(c, (n,), generator=rng)


def mlp(dropout: float = 0.0) -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 3)))


def trained(model: nn.Module, steps: int, watch=lambda model: None, seed: int = 3):
    """Plain SGD with dropout's draws; `watch` makes what is called after each step."""
    x, y = batch()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        path = watch(model)
        weights = [torch.cat([p.detach().flatten().clone() for p in model.parameters()])]
        for _ in range(steps):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
            if path is not None:
                path()
            weights.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        return path, weights, torch.get_rng_state(), [p.grad.clone() for p in model.parameters()]


def test_a_run_is_the_same_with_and_without():
    probe = batch()[0]
    _, plain, state, grads = trained(mlp(dropout=0.5), 6)
    model = mlp(dropout=0.5)
    path, watched, state_too, grads_too = trained(model, 6, lambda m: bounds.FlowComplexity(m, probe, every=2))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert torch.equal(state, state_too)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_too, strict=True))
    assert all(module.training for module in model.modules())
    assert path.steps == 6


@pytest.mark.parametrize("every", [1, 3, (2, 5)])
def test_the_path_by_hand(every):
    probe = batch(7)[0]
    path, weights, _, _ = trained(mlp(), 7, lambda m: bounds.FlowComplexity(m, probe, every=every))
    looked = {s for s in range(8) if (s % every == 0 if isinstance(every, int) else s == 0 or s in every)}
    replay, value, straight, trace, since = mlp(), 0.0, 0.0, 0.0, weights[0]
    for t in range(7):
        if t in looked:
            straight += float((weights[t] - since).norm()) * trace**0.5
            since = weights[t]
            nn.utils.vector_to_parameters(weights[t], replay.parameters())
            trace = float(lw.jacobian(replay, probe).to_dense().square().sum())
        value += float((weights[t + 1] - weights[t]).norm()) * trace**0.5
    straight += float((weights[7] - since).norm()) * trace**0.5
    assert path.value == pytest.approx(value, rel=1e-4)
    assert path.displacement == pytest.approx(straight, rel=1e-4)
    assert path.displacement <= path.value * (1 + 1e-6)
    steps = sum(float((b - a).norm()) for a, b in pairwise(weights))
    assert path.length == pytest.approx(steps, rel=1e-5)
    assert [step for step, _ in path.traces] == sorted(looked)


def test_path_and_displacement_are_one_with_a_look_at_every_step():
    probe = batch(5)[0]
    path, _, _, _ = trained(mlp(), 4, lambda m: bounds.FlowComplexity(m, probe))
    assert path.value == pytest.approx(path.displacement, rel=1e-6)


@pytest.mark.parametrize("every", [0, -1, True, (0, 3)])
def test_bad_schedules(every):
    with pytest.raises(InputError, match="every="):
        bounds.FlowComplexity(mlp(), batch()[0], every=every)


def two_layers():
    """f = V relu(Ux), trained a little, by its matrices."""
    initial = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    model = copy.deepcopy(initial)
    trained(model, 5)
    pairs = [[m[i].weight.detach().double() for m in (model, initial)] for i in (0, 2)]
    return model, initial, pairs


def test_measures_by_hand():
    model, initial, ((U, U0), (V, V0)) = two_layers()
    x, y = batch()
    found = bounds.measures(model, initial, x, y)
    s1, s2 = (float(torch.linalg.svdvals(W)[0]) for W in (U, V))
    expected = {
        "parameters": 4 * 6 + 6 + 6 * 3 + 3,
        "frobenius": float(U.norm() * V.norm()),
        "one-inf": max(sum(abs(v) for v in row) for row in U.tolist())
        * max(sum(abs(v) for v in row) for row in V.tolist()),
    }
    b1, b2 = (
        sum(math.dist(a, b) for a, b in zip(W.tolist(), W0.tolist(), strict=True)) for W, W0 in ((U, U0), (V, V0))
    )
    expected["bartlett-2017"] = s1 * s2 * ((b1 / s1) ** (2 / 3) + (b2 / s2) ** (2 / 3)) ** 1.5
    f1, f2 = float((U - U0).norm()), float((V - V0).norm())
    expected["spectral-frobenius"] = (s1 * s2) ** 2 * (f1**2 / s1**2 + f2**2 / s2**2)
    X = x.double()
    capacity = float(V.norm()) * (f1 * float(X.norm()) + float((X @ U0.T).norm()))
    expected["neyshabur-2019"] = 3**0.5 * capacity / len(x) ** 0.5 + 6**0.5
    J = lw.jacobian(model, x).to_dense().double()
    w = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    w0 = torch.cat([p.detach().flatten() for p in initial.parameters()]).double()
    push, p = (J @ w).view(len(x), 3), model(x).detach().double().softmax(1)
    variance = (p * push**2).sum(1) - (p * push).sum(1) ** 2
    expected["fisher-rao"] = float(variance.mean()) ** 0.5
    expected["displacement-trace"] = float((w - w0).norm()) * float(J.norm())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=2e-4), name


def test_one_output_and_labels_of_two_signs():
    """Its Fisher matrix is Bernoulli's; a softmax over one output would have none."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)))
    x = batch()[0]
    f = model(x).detach()[:, 0]
    push = lw.jacobian(model, x).to_dense() @ torch.cat([p.detach().flatten() for p in model.parameters()])
    p = f.sigmoid()
    expected = float((p * (1 - p) * push**2).mean()) ** 0.5
    found = bounds.measures(model, copy.deepcopy(model), x, f.sign())
    assert found["fisher-rao"] == pytest.approx(expected, rel=1e-4)


def test_division_by_the_margin():
    model, initial, _ = two_layers()
    trained(model, 150)
    x, y = batch()
    margin = bounds.margin_percentile(model(x).detach(), y)
    plain, divided = (bounds.measures(model, initial, x, y, normalized=n) for n in (False, True))
    assert margin > 0
    for name in plain:
        power = {"parameters": 0, "spectral-frobenius": 2}.get(name, 1)
        units = 6**0.5 if name == "neyshabur-2019" else 0
        assert divided[name] - units == pytest.approx((plain[name] - units) / margin**power, rel=1e-5)
    with pytest.raises(InputError, match="margin"):
        bounds.measures(initial, initial, x, (initial(x).argmax(1) + 1) % 3, normalized=True)


def test_convolutions_count_as_matrices():
    make = lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))  # noqa: E731
    initial = seeded(make)
    model = copy.deepcopy(initial)
    model[0].weight.data += 0.1
    x, y = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 1])
    found = bounds.measures(model, initial, x, y)
    W, V = model[0].weight.detach().reshape(3, 9), model[3].weight.detach()
    assert found["frobenius"] == pytest.approx(float(W.norm() * V.norm()), rel=1e-5)
    assert found["spectral-frobenius"] == pytest.approx(27 * 0.01 * float(torch.linalg.svdvals(V)[0]) ** 2, rel=1e-4)
    start = nn.functional.conv2d(x, initial[0].weight.detach())
    capacity = float(V.norm()) * (27**0.5 * 0.1 * float(x.norm()) + float(start.norm()))
    assert found["neyshabur-2019"] == pytest.approx(2**0.5 * capacity / 5**0.5 + 3**0.5, rel=1e-4)
    assert all(math.isfinite(value) for value in found.values())


def test_deep_networks_multiply_by_other_layers():
    initial = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)))
    model = copy.deepcopy(initial)
    model[0].weight.data += 0.1
    x = batch()[0]
    s = float(torch.linalg.svdvals(model[2].weight.detach())[0])
    start = (torch.relu(initial[0](x)) @ initial[2].weight.T).detach()
    moved = 20**0.5 * 0.1 * s * float(x.norm())
    capacity = float(model[4].weight.detach().norm()) * (moved + float(start.norm()))
    expected = 3**0.5 * capacity / 12**0.5 + 6**0.5
    assert bounds.neyshabur2019(model, initial, x) == pytest.approx(expected, rel=1e-4)


class Backwards(nn.Module):
    """Lists its layers in another order than it calls them."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(6, 3), nn.Linear(4, 6)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def tied():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), "a BatchNorm1d"),
        (lambda: nn.Sequential(nn.Conv2d(2, 2, 1, groups=2)), "in groups"),
        (tied, "shared"),
        (lambda: nn.Sequential(nn.ReLU()), "without layers"),
    ],
)
def test_what_is_refused(make, says):
    model = seeded(make)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((InputError, UnsupportedError), match=says):
        bounds.frobenius_product(model)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_chains_and_initial_models_are_checked():
    x, _ = batch()
    model = seeded(Backwards)
    with pytest.raises(UnsupportedError, match="order first, last"):
        bounds.neyshabur2019(model, copy.deepcopy(model), x)
    with pytest.raises(InputError, match="other layers"):
        bounds.bartlett2017(mlp(), nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    with pytest.raises(InputError, match="one layer"):
        bounds.neyshabur2019(nn.Linear(4, 3), nn.Linear(4, 3), x)


def test_the_kernel_is_that_of_eval_mode():
    """Without dropout's draws, and with batch norm as it has learned to be."""
    x = batch()[0]
    model = mlp(dropout=0.5)
    path = bounds.FlowComplexity(model, x)
    expected = float(lw.jacobian(mlp(dropout=0.5).eval(), x).to_dense().square().sum())
    assert path.traces[0][1] == pytest.approx(expected, rel=1e-4)
    normed = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)))
    before = copy.deepcopy(normed.state_dict())
    assert bounds.FlowComplexity(normed, x).traces[0][1] > 0
    assert all(torch.equal(a, b) for a, b in zip(before.values(), normed.state_dict().values(), strict=True))
    assert normed.training
