"""Schedulers that move momentum: they move the member's own, and never add a second one."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_tools import MEMBERS, batches, cross_entropy, flat, member, mlp, train_step
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

import layerwise as lw
from layerwise.foundations.errors import InputError

pytestmark = pytest.mark.usefixtures("untyped")
DATA = batches(10, 5)
BY_BETAS = ("Adam", "SOAP")
Make = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: dict[str, Make] = {
    "OneCycleLR": lambda opt: OneCycleLR(opt, max_lr=0.02, total_steps=10, base_momentum=0.3, max_momentum=0.8),
    "CyclicLR": lambda opt: CyclicLR(opt, 0.001, 0.02, step_size_up=3, base_momentum=0.3, max_momentum=0.8),
}


def run(model: nn.Module, opt: torch.optim.Optimizer, schedule: Any = None, steps: int = 8) -> torch.Tensor:
    for t in range(steps):
        train_step(model, opt, DATA[t], cross_entropy)
        if schedule is not None:
            schedule.step()
    return flat(model)


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_only_the_members_own_momentum_moves(name: str, kind: str):
    model = mlp()
    opt = member(name, model)
    before = dict(opt.param_groups[0])
    schedule = SCHEDULES[kind](opt)
    run(model, opt, schedule, 3)
    group = opt.param_groups[0]
    if name in BY_BETAS:
        assert group["momentum"] == 0.0
        assert 0.3 <= group["betas"][0] < 0.8
        assert group["betas"][1] == before["betas"][1]
    else:
        assert "betas" not in group
        assert 0.3 <= group["momentum"] < 0.8
    assert torch.isfinite(flat(model)).all()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_cycled_betas_are_those_of_torchs_adam(kind: str):
    model, other = mlp(), mlp()
    ours, theirs = lw.optim.Adam(model, lr=0.01), torch.optim.Adam(other.parameters(), lr=0.01)
    run(model, ours, SCHEDULES[kind](ours))
    run(other, theirs, SCHEDULES[kind](theirs))
    assert torch.allclose(flat(model), flat(other), rtol=0, atol=1e-12)


def test_cycled_momentum_is_that_of_torchs_sgd():
    model, other = mlp(), mlp()
    ours, theirs = lw.optim.SGD(model, lr=0.01, momentum=0.9), torch.optim.SGD(other.parameters(), 0.01, momentum=0.9)
    run(model, ours, SCHEDULES["OneCycleLR"](ours))
    run(other, theirs, SCHEDULES["OneCycleLR"](theirs))
    assert torch.allclose(flat(model), flat(other), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["Muon", "SOAP"])
def test_a_changed_average_is_that_of_the_rule(name: str):
    """The value in the group is the one that steps are made with: as if it had been given at the start."""
    own = {"Muon": {"momentum": 0.5}, "SOAP": {"betas": (0.5, 0.95)}}[name]
    model, other = mlp(), mlp()
    ours, told = member(name, model), member(name, other, **own)
    ours.param_groups[0].update(own)
    assert torch.equal(run(model, ours), run(other, told))


@pytest.mark.parametrize("name", ["Adam", "SOAP"])
def test_betas_of_some_layers(name: str):
    model, other, plain = mlp(), mlp(), mlp()
    everywhere = run(model, member(name, model, overrides={"*": {"betas": (0.5, 0.95)}}))
    assert torch.equal(everywhere, run(other, member(name, other, betas=(0.5, 0.95))))
    assert not torch.equal(everywhere, run(plain, member(name, plain)))
    with pytest.raises(InputError, match="betas=nan"):
        member(name, mlp(), overrides={"4": {"betas": (math.nan, 0.9)}})


def test_the_fallback_keeps_its_own_average():
    """Biases of Muon get Adam's step, whatever the momentum of the matrices is."""
    model, other = mlp(), mlp()
    one, two = (lw.optim.Muon(m, lr=0.0, fallback_lr=None, overrides={"*.bias": {"lr": 0.01}}) for m in (model, other))
    two.param_groups[0]["momentum"] = two.param_groups[1]["momentum"] = 0.1
    assert torch.equal(run(model, one), run(other, two))
