"""SGD, Adam, sign descent: equal to torch's own, or to one line."""

import copy

import pytest
import torch
from optim_tools import Reference, assert_same_steps, batches, cross_entropy, flat, mlp, train_step

import layerwise as lw

DATA = batches(25, 5)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_torchs(momentum: float, nesterov: bool):
    model = mlp()
    other = copy.deepcopy(model)
    opt = lw.optim.SGD(model, lr=0.1, momentum=momentum, nesterov=nesterov)
    torchs = torch.optim.SGD(other.parameters(), lr=0.1, momentum=momentum, nesterov=nesterov, dampening=0.0)
    for batch in DATA:
        train_step(model, opt, batch, cross_entropy)
        train_step(other, torchs, batch, cross_entropy)
        assert (flat(model) - flat(other)).abs().max() < 1e-12


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_weight_decay_is_decoupled(momentum: float, nesterov: bool):
    model = mlp()
    options = {"lr": 0.1, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.3}
    opt = lw.optim.SGD(model, **options)
    reference = Reference(model, lambda t, grads, records: grads, cross_entropy, **options)
    assert_same_steps(opt, model, reference, DATA)


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.8)])
def test_adam_is_torchs_adamw(decay: float, betas: tuple[float, float]):
    model = mlp()
    other = copy.deepcopy(model)
    opt = lw.optim.Adam(model, lr=0.02, betas=betas, eps=1e-6, weight_decay=decay)
    kind = torch.optim.AdamW if decay else torch.optim.Adam
    torchs = kind(other.parameters(), lr=0.02, betas=betas, eps=1e-6, weight_decay=decay)
    for batch in DATA:
        train_step(model, opt, batch, cross_entropy)
        train_step(other, torchs, batch, cross_entropy)
        assert (flat(model) - flat(other)).abs().max() < 1e-12


@pytest.mark.parametrize("ideal", [False, True])
def test_sign_descent(ideal: bool):
    model = mlp()
    options = {"lr": 0.002, "momentum": 0.5}
    opt = lw.optim.Sign(model, ideal=ideal, **options)

    def direction(t, grads, records):
        return {k: g.sign() * (g.abs().sum() if ideal else 1) for k, g in grads.items()}

    assert_same_steps(opt, model, Reference(model, direction, cross_entropy, **options), DATA)
