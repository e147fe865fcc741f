"""A run that goes on from a checkpoint takes the steps of one without a break; and what such a checkpoint holds."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw

MEMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Shampoo": ("Shampoo", {}),
    "SOAP": ("SOAP", {}),
    "EKFAC": ("EKFAC", {"likelihood": "categorical"}),
    "EKFAC running": ("EKFAC", {"likelihood": "categorical", "scaling": "running"}),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("solver", ["auto", "products"])
@pytest.mark.parametrize("name", MEMBERS)
def test_as_without_a_break(name: str, solver: str):
    """By the solvers of a CPU and by that of a GPU."""
    member, options = MEMBERS[name]
    make = lambda model: getattr(lw.optim, member)(model, refresh_every=3, solver=solver, **options)  # noqa: E731
    model = net()
    opt = make(model)
    train(model, opt, range(25))
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    train(model, opt, range(25, 40))
    other = net()
    other.load_state_dict(weights)
    resumed = make(other)
    resumed.load_state_dict(saved)
    train(other, resumed, range(25, 40))
    assert torch.equal(flat(other), flat(model))


@pytest.mark.parametrize("solver", ["auto", "products"])
def test_a_side_without_a_factor_has_nothing_in_a_checkpoint(solver: str):
    """Its eigenvalues would be zeros, which checkpoints of earlier versions do not have."""
    model = net()
    opt = lw.optim.SOAP(model, max_factor=7, refresh_every=3, solver=solver)
    train(model, opt, range(4))
    of_first = next(iter(opt.state[model[0].weight].values()))
    assert "Q" in of_first
    assert "s_Q" in of_first
    assert not {"P", "U_P", "s_P"} & set(of_first)


def test_the_number_of_steps_is_part_of_it():
    model = net()
    opt = lw.optim.KFAC(model)
    train(model, opt, range(5))
    engine = opt.state_dict()["engine"]
    assert engine["steps"] == 5
    assert engine["damping"]["step"] == 5


@pytest.mark.parametrize("member", ["KFAC", "FOOF"])
def test_condition_numbers_do_not_depend_on_the_backend(member: str):
    """Under SUA the bias is a block of its own, and may be the worse conditioned one."""
    found = []
    for solver in ("auto", "products"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
        opt = getattr(lw.optim, member)(model, sua=True, scale="formula", solver=solver)
        x, y = 0.1 * torch.randn(16, 2, 4, 4), torch.randint(3, (16,))
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        found.append(opt.health().condition)
    assert found[0] == pytest.approx(found[1])
    assert found[0]["0"] > 10
