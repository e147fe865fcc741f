"""The norm of AdamW's update of large matrices, measured on some of their rows; and moments of other checkpoints."""

from typing import Any

import pytest
import torch
from optim_tools import flat
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.backend import norms
from layerwise.optim.engine import Layerwise
from layerwise.optim.step import update
from layerwise.optim.step.update import moment_rows, rows_apart
from random_tensors import randn

pytestmark = pytest.mark.usefixtures("untyped")
O, I = 640, 512
MEMBERS: dict[str, dict[str, Any]] = {
    "Muon": {},
    "Shampoo": {"refresh_every": 100},
    "SOAP": {"refresh_every": 100},
    "FOOF": {"refresh_every": 100},
}
KINDS = ["Muon", "FOOF", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Shampoo", "SOAP"))]
"""With a momentum of its own, and without."""


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(I, O), nn.Tanh(), nn.Linear(O, 10))


def train(opt: Layerwise, model: nn.Module, steps: range) -> None:
    for step in steps:
        opt.zero_grad()
        x, y = randn(64, I, seed=step), torch.arange(64) % 10
        nn.functional.cross_entropy(model(x + 0.3 * y.view(-1, 1)), y).backward()
        opt.step()


def large(opt: Layerwise) -> dict[str, Tensor]:
    """The state of the large layer."""
    return opt.state_dict()["state"][0]["0"]


def by_layer(state: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Those of weights, by the layer's name."""
    found = {name: own for of_param in state["state"].values() for name, own in of_param.items()}
    return {name.removesuffix(".weight"): own for name, own in found.items() if "graft_v" in own}


def as_before(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint in which moments have all rows, as they were kept once: those that are not kept now are noise."""
    own = state["state"][0]["0"]
    for name in ("graft_m", "graft_v"):
        rows = own[name]
        if rows.shape[1] < O:
            own[name] = randn(1, O, rows.shape[2], seed=9).square()
            own[name][:, :: rows_apart(O, rows.shape[2])] = rows
    return state


def test_which_rows():
    """Not all of large matrices alone, at least a hundred of them, and an odd number apart."""
    for outputs in range(1, 5000, 7):
        apart = rows_apart(outputs, 512)
        assert apart % 2 == 1
        assert apart == 1 or outputs >= 512
        assert moment_rows(outputs, 512, own_momentum=True)[1] >= min(outputs, 100)
    assert rows_apart(4096, 8) == 1


@pytest.mark.parametrize("name", KINDS)
def test_the_norm_is_known_within_a_few_per_cent(name: str):
    """Beside the moments and the norm of all rows, over steps of a training."""
    model = net()
    opt = getattr(lw.optim, name)(model, lr=1e-3, **MEMBERS[name])
    m, v = torch.zeros(1, O, I), torch.zeros(1, O, I)
    b1, b2 = 0.9, 0.999
    for step in range(4):
        train(opt, model, range(step, step + 1))
        (stack,) = [s for s in opt._stacks or [] if s.specs[0].name.startswith("0") and not s.fallback]
        grad = stack.gradient()[0][:, :O, :I]
        m.lerp_(grad, 1 - b1)
        v.lerp_(grad.square(), 1 - b2)
        t, state = step + 1, stack.state
        seen, apart = state["graft_v"], rows_apart(O, stack.shape.own_inputs)
        assert apart > 1
        torch.testing.assert_close(seen[:, :, :I], v[:, ::apart], rtol=1e-3, atol=1e-12)
        update = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8)
        part = (O / seen.shape[1]) ** 0.5 * norms(update[:, ::apart])
        torch.testing.assert_close(part, norms(update), rtol=0.05, atol=0)


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_with_all_rows_goes_on_the_same(name: str):
    model = net()
    opt = getattr(lw.optim, name)(model, lr=1e-3, **MEMBERS[name])
    train(opt, model, range(3))
    state, weights = as_before(opt.state_dict()), {k: x.clone() for k, x in model.state_dict().items()}
    assert state["state"][0]["0"]["graft_v"].shape[1] == O
    train(opt, model, range(3, 5))
    again = net()
    again.load_state_dict(weights)
    other = getattr(lw.optim, name)(again, lr=1e-3, **MEMBERS[name])
    other.load_state_dict(state)
    train(other, again, range(3, 5))
    assert torch.equal(flat(again), flat(model))
    assert {k: x.shape for k, x in large(other).items()} == {k: x.shape for k, x in large(opt).items()}


@pytest.mark.parametrize(("before", "after", "steps"), [("Shampoo", "SOAP", 1), ("SOAP", "Shampoo", 4)])
def test_another_members_moments(before: str, after: str, steps: int):
    """Moments begin anew, of the rows that are wanted; but v goes on where only m is not of all rows."""
    model = net()
    opt = getattr(lw.optim, before)(model, lr=1e-3, **MEMBERS[before])
    train(opt, model, range(3))
    other = getattr(lw.optim, after)(model, lr=1e-3, **MEMBERS[after])
    other.load_state_dict(opt.state_dict())
    train(other, model, range(3, 4))
    assert torch.isfinite(flat(model)).all()
    assert large(other)["graft_m"].shape[1] == moment_rows(O, I, own_momentum=after == "SOAP")[0]
    assert float(large(other)["graft_steps"]) == steps


def test_grafting_needs_all_rows():
    model = net()
    opt = lw.optim.Shampoo(model, lr=1e-3)
    train(opt, model, range(2))
    other = lw.optim.Shampoo(model, lr=1e-3, scale="formula", graft="adam", power=0.5, damping=1e-2)
    other.load_state_dict(opt.state_dict())
    train(other, model, range(2, 3))
    assert large(other)["graft_v"].shape[1] == O
    assert float(large(other)["graft_steps"]) == 1.0


@pytest.mark.parametrize("name", KINDS)
def test_a_plan_counts_these_rows(name: str):
    model = net()
    opt = getattr(lw.optim, name)(model, lr=1e-3, **MEMBERS[name])
    train(opt, model, range(2))
    (duty,) = [duty for duty in opt.plan_for(1).duties if duty.layer == "0"]
    counted = sum(x.numel() for k, x in large(opt).items() if k not in ("fresh", "graft_steps"))
    assert duty.state == counted


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("before", ["a checkpoint with all rows", "another member"])
def test_a_layer_without_a_gradient_keeps_the_rows_that_are_wanted(
    before: str, sync: bool, monkeypatch: pytest.MonkeyPatch
):
    """At the first step after loading, of two layers of one shape."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda _: sync))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.ModuleList([nn.Linear(I, O), nn.Linear(I, O)])
    old = lw.optim.Shampoo(model, refresh_every=100)
    for layer in model:
        layer(randn(8, I)).square().mean().backward()
    old.step()
    state = old.state_dict()
    new = lw.optim.Shampoo if before != "another member" else lw.optim.SOAP
    rows = moment_rows(O, I, own_momentum=new is lw.optim.SOAP)
    kept = by_layer(state)["1"]["graft_v"].clone()
    for moments in by_layer(state).values() if before != "another member" else ():
        if moments["graft_v"].shape[1] < O:
            moments["graft_v"] = torch.zeros(1, O, I).index_copy_(1, torch.arange(0, O, 5), moments["graft_v"])
    opt = new(model, refresh_every=100)
    opt.load_state_dict(state)
    opt.zero_grad()
    model[0](randn(8, I, seed=2)).square().mean().backward()
    idle = model[1].weight.clone()
    opt.step()
    after = by_layer(opt.state_dict())["1"]
    assert torch.equal(model[1].weight, idle)
    assert (after["graft_m"].shape[1], after["graft_v"].shape[1]) == rows
    if before != "another member":
        assert torch.equal(after["graft_v"], kept)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(
    "classes", [slice(0, O, 2), slice(0, O, 5), slice(1, 3)], ids=["half", "those seen", "none seen"]
)
@pytest.mark.parametrize("name", ["Muon", "SOAP", "FOOF"])
def test_rows_without_a_gradient_do_not_count(name: str, classes: slice, sync: bool, monkeypatch: pytest.MonkeyPatch):
    """As of classes that are masked: the update is about as long as one whose norm is of all rows, and never zero."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda _: sync))
    masked = torch.full((O,), -torch.inf)
    masked[classes] = 0.0
    ways = []
    for least in (update.LEAST_ENTRIES, 10**9):
        monkeypatch.setattr(update, "LEAST_ENTRIES", least)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = nn.Linear(I, O, bias=False)
        opt = getattr(lw.optim, name)(model, lr=1e-3, **MEMBERS[name])
        for step in range(3):
            opt.zero_grad()
            before = model.weight.detach().clone()
            y = torch.arange(O)[classes].repeat(64)[:64]
            nn.functional.cross_entropy(model(randn(64, I, seed=step)) + masked, y).backward()
            assert int((model.weight.grad.abs().amax(1) > 0).sum()) <= len(range(O)[classes])
            opt.step()
        ways.append(float((model.weight.detach() - before).norm()))
    some, whole = ways
    assert 0.3 < some / whole < 3 if classes.stop == 3 else some == pytest.approx(whole, rel=0.1)
