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


def train(model: nn.Module, opt: Layerwise, step: int, factor: float = 1.0, without: str | None = None) -> None:
    """One step, gradients times a number; a layer may have none."""
    x, y = batch(step)
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad *= factor
    for p in () if without is None else model.get_submodule(without).parameters():
        p.grad = None
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


@pytest.mark.parametrize(("member", "other"), [("KFAC", "EKFAC"), ("Shampoo", "SOAP")])
def test_a_batch_that_is_left_out_hides_nothing_that_was_loaded(member: str, other: str):
    """The next step decomposes it."""
    model = network()
    before = getattr(lw.optim, other)(model)
    for step in range(1, 4):
        train(model, before, step)
    opt = getattr(lw.optim, member)(model, factor_every=100, refresh_every=100, precision="high")
    opt.load_state_dict(before.state_dict())
    train(model, opt, 4, factor=float("nan"))
    train(model, opt, 5)
    assert all(fresh(opt))


@pytest.mark.parametrize("member", ["KFAC", "EKFAC", "FOOF"])
def test_what_the_first_step_after_a_load_takes_back_is_not_known(member: str):
    """A layer without a gradient gets its factor of zeros back, although statistics were seen of it; its first gradient
    comes at a step without."""
    models, kept = (equal_layers(), equal_layers()), None
    for number, model in enumerate(models):
        opt = getattr(lw.optim, member)(model, factor_every=4, refresh_every=100)
        if kept is not None:
            model.load_state_dict(kept[0])
            opt.load_state_dict(kept[1])
        for step in range(1, 5) if number == 0 else (5, 6, 7):
            train(model, opt, step, without="2" if step < 7 else None)
        kept = model.state_dict(), opt.state_dict()
    assert of_layer(opt, "2") == [False]
    for step in (8, 9):
        train(model, opt, step)
    assert of_layer(opt, "2") == [True]


def test_an_average_that_begins_with_a_batch_that_is_left_out():
    """SOAP's factors of a late layer, beside others: the next gradient is their first."""
    model = equal_layers()
    opt = lw.optim.SOAP(model, refresh_every=100)
    for step in range(1, 6):
        train(model, opt, step, without="2")
    train(model, opt, 6, factor=float("nan"))
    train(model, opt, 7)
    assert of_layer(opt, "2") == [False]
    train(model, opt, 8)
    assert of_layer(opt, "2") == [True]


def equal_layers() -> nn.Module:
    """Three in one stack, and a head."""
    torch.manual_seed(0)
    body = [layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*body, nn.Linear(6, 3))


def of_layer(opt: Layerwise, layer: str) -> list[bool]:
    """Whether its weight has a decomposition."""
    fresh(opt)
    stack = next(stack for stack in opt._stacks or [] if f"{layer}.weight" in stack.params)
    return [on for spec, groups in stack.layers if spec.name == layer for on in stack.memory["fresh"][groups]]


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
