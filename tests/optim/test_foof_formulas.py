"""FOOF and LocoProp: the input factor alone, their identity, and the least-squares head of Lemma 3.1."""

import copy

import pytest
import torch
from optim_tools import (
    Mean,
    Record,
    Reference,
    assert_same_steps,
    batches,
    convnet,
    cross_entropy,
    eye,
    flat,
    gaussian,
    mean_eigenvalue,
    mlp,
    train_step,
)
from torch import Tensor, nn

import layerwise as lw

pytestmark = pytest.mark.usefixtures("untyped")
LR, DAMPING = 0.02, 0.05


def half_squares(f: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (f - y).square().sum() / len(f)


def data_of(shape: str):
    if shape == "conv":
        return convnet(), batches(20, 2, 4, 4)
    return (mlp(), batches(20, 4, 5, positions=(4,))) if shape == "sequence" else (mlp(), batches(20, 5))


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("shape", ["dense", "sequence", "conv"])
def test_foof(shape: str, relative: bool):
    model, data = data_of(shape)
    means: dict[str, Mean] = {}

    def direction(t: int, grads: dict[str, Tensor], records: dict[str, Record]) -> dict[str, Tensor]:
        found = {}
        for name, G in grads.items():
            Q = means.setdefault(name, Mean(0.9)).add(records[name].Q())
            shift = DAMPING * (mean_eigenvalue(Q) if relative else 1.0)
            found[name] = G @ torch.linalg.inv(Q + shift * eye(Q))
        return found

    opt = lw.optim.FOOF(
        model, LR, DAMPING, 0.9, 0.1, nesterov=True, factor_decay=0.9, refresh_every=1,
        damping_scale="relative" if relative else "absolute", scale="formula",
    )  # fmt: skip
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    assert_same_steps(opt, model, Reference(model, direction, cross_entropy, LR, **options), data)


@pytest.mark.parametrize("shape", ["dense", "conv"])
def test_locoprop(shape: str):
    model, data = data_of(shape)
    means: dict[str, Mean] = {}

    def direction(t: int, grads: dict[str, Tensor], records: dict[str, Record]) -> dict[str, Tensor]:
        found = {}
        for name, G in grads.items():
            Q = means.setdefault(name, Mean(0.95)).add(records[name].Q())
            found[name] = G @ torch.linalg.inv(eye(Q) + 0.3 * Q)
        return found

    opt = lw.optim.LocoProp(model, lr=0.3)
    assert_same_steps(opt, model, Reference(model, direction, cross_entropy, 0.3), data)


def test_locoprop_is_foof_with_a_step_of_one_and_a_damping_of_one_over_eta():
    eta = 0.7
    a, b = mlp(), mlp()
    one = lw.optim.LocoProp(a, lr=eta)
    other = lw.optim.FOOF(
        b, lr=1.0, damping=1 / eta, momentum=0.0, damping_scale="absolute", refresh_every=1, scale="formula"
    )
    for batch in batches(20, 5):
        train_step(a, one, batch, cross_entropy)
        train_step(b, other, batch, cross_entropy)
        assert (flat(a) - flat(b)).abs().max() < 1e-10


def test_locoprop_minimises_its_local_objective():
    """``½ E‖W a − (h − ∂ℓ/∂h)‖² + ‖W − W_t‖²/(2η)``, in every layer."""
    model, (x, y) = mlp(4, 3), (gaussian(7, 4), gaussian(7, 3, seed=1))
    before = copy.deepcopy(model)
    opt = lw.optim.LocoProp(model, lr=0.4)
    train_step(model, opt, (x, y), half_squares)
    a = torch.cat([x, torch.ones(7, 1, dtype=x.dtype)], 1)
    start = torch.cat([before[0].weight, before[0].bias[:, None]], 1).detach()
    target = a @ start.T - (a @ start.T - y)

    def objective(W: Tensor) -> Tensor:
        return 0.5 * (a @ W.T - target).square().sum() / 7 + (W - start).square().sum() / (2 * 0.4)

    W = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach().requires_grad_()
    assert torch.autograd.grad(objective(W), W)[0].abs().max() < 1e-12


@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_a_step_of_the_head_is_a_least_squares_fit(eta: float):
    """Lemma 3.1: ``F ← (1 − η) F + η F_ls`` with ``F_ls = Yᵀ Z (Zᵀ Z)⁻¹``, to 1e-10."""
    body = mlp(5, 4)
    model = nn.Sequential(body, nn.Tanh(), nn.Linear(4, 3, bias=False).double())
    body.requires_grad_(False)
    x, y = gaussian(30, 5), gaussian(30, 3, seed=1)
    before = model[2].weight.detach().clone()
    opt = lw.optim.FOOF(model, lr=eta, damping=0.0, momentum=0.0, damping_scale="absolute", scale="formula")
    train_step(model, opt, (x, y), half_squares)
    z = body(x).tanh()
    fit = y.T @ z @ torch.linalg.inv(z.T @ z)
    assert (model[2].weight - ((1 - eta) * before + eta * fit)).abs().max() < 1e-10
