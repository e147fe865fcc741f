"""When factors are decomposed first: as soon as they have statistics, on a CPU and as on a GPU."""

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.engine import Layerwise
from layerwise.optim.step.stack import Stack

EVERY = 7


@pytest.fixture(params=["eager", "asynchronous"], autouse=True)
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "asynchronous":
        monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, 6, generator=generator), torch.randint(3, (32,), generator=generator)


def train(model: nn.Module, opt: Layerwise, step: int, factor: float = 1.0) -> None:
    """One step, gradients times a number."""
    x, y = batch(step)
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad *= factor
    opt.step()


def fresh(opt: Layerwise) -> list[bool]:
    """Of all layers that are preconditioned; host and state agree."""
    stacks: list[Stack] = [stack for stack in opt._stacks or [] if not stack.fallback]
    for stack in stacks:
        saved = stack.state.get("fresh", torch.zeros(stack.groups))
        assert stack.memory["fresh"] == [bool(on) for on in saved.tolist()]
    return [on for stack in stacks for on in stack.memory["fresh"]]


@pytest.mark.parametrize("precision", ["auto", "high"])
@pytest.mark.parametrize("member", ["KFAC", "EKFAC", "FOOF", "Shampoo"])
def test_not_of_a_batch_that_is_left_out(member: str, precision: str):
    """The first gradients are not finite. Statistics come again with the next batch that has some, and are decomposed
    at once."""
    model = network()
    opt = getattr(lw.optim, member)(model, factor_every=EVERY, refresh_every=100, precision=precision)
    train(model, opt, 1, factor=float("nan"))
    for step in range(2, 2 * EVERY):
        assert all(fresh(opt)) == (step > EVERY + 1)
        train(model, opt, step)


@pytest.mark.parametrize(("member", "other"), [("KFAC", "EKFAC"), ("EKFAC", "KFAC"), ("Shampoo", "SOAP")])
def test_factors_of_another_member_are_decomposed_at_the_first_step(member: str, other: str):
    model = network()
    before = getattr(lw.optim, other)(model)
    for step in range(1, 4):
        train(model, before, step)
    opt = getattr(lw.optim, member)(model, factor_every=100, refresh_every=100)
    opt.load_state_dict(before.state_dict())
    train(model, opt, 4)
    assert all(fresh(opt))


def test_what_layers_without_a_gradient_get_back_is_as_fresh_as_it_was():
    """Of several processes one may see a gradient where another does not: then all decompose, and some take it back."""
    model = network()
    opt = lw.optim.FOOF(model)
    train(model, opt, 1, factor=float("nan"))  # nothing is decomposed
    stack = next(stack for stack in opt._stacks or [] if not stack.fallback)
    before = stack.copied()
    stack.state["fresh"], stack.memory["fresh"] = torch.ones(stack.groups), [True] * stack.groups
    stack.restore(before, [False] * len(stack.specs))
    assert stack.memory["fresh"] == [bool(on) for on in stack.state["fresh"].tolist()] == [False] * stack.groups
