"""Layers of one shape of which some take no part in some steps."""

import copy

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.engine import Layerwise
from random_tensors import randn


class Routed(nn.Module):
    """Two layers alike, of which the second is used only when asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.both = nn.Linear(5, 5), nn.Linear(5, 5), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).tanh()
        return self.b(x) if self.both else x


def one_step(model: nn.Module, opt: lw.optim.Layerwise, x: Tensor) -> None:
    opt.zero_grad()
    model(x).square().sum(1).mean().backward()
    opt.step()


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("solver", ["auto", "products"])
def test_a_layer_that_is_never_called_holds_no_other_up(monkeypatch: pytest.MonkeyPatch, sync: bool, solver: str):
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: sync))
    model = Routed()
    opt = lw.optim.KFAC(model, lr=0.01, refresh_every=1, solver=solver, scale="formula")
    for step in range(4):
        one_step(model, opt, randn(6, 5, seed=step))
    assert opt.health().refreshes > 0


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("solver", ["auto", "products"])
def test_soap_goes_on_where_it_was_saved(monkeypatch: pytest.MonkeyPatch, sync: bool, solver: str):
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: sync))
    model = Routed()
    opt = lw.optim.SOAP(model, lr=0.01, solver=solver, refresh_every=5, scale="formula")
    for step in range(4):
        model.both = step > 0  # the second layer joins at the second step
        one_step(model, opt, randn(6, 5, seed=step))
    other = copy.deepcopy(model)
    again = lw.optim.SOAP(other, lr=0.01, solver=solver, refresh_every=5, scale="formula")
    again.load_state_dict(opt.state_dict())
    for m, o in ((model, opt), (other, again)):
        one_step(m, o, randn(6, 5, seed=9))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["Shampoo", "SOAP", "KFAC", "EKFAC"])
def test_a_layer_that_joins_late(monkeypatch: pytest.MonkeyPatch, name: str):
    """It moves as far in eager and in asynchronous steps."""
    moved = []
    for sync in (True, False):
        monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self, sync=sync: sync))
        model = Routed()
        opt = getattr(lw.optim, name)(model, lr=0.01, refresh_every=10, solver="products", scale="formula")
        for step in range(5):
            model.both = step > 3
            before = model.b.weight.detach().clone()
            one_step(model, opt, randn(6, 5, seed=step))
        moved.append(float((model.b.weight.detach() - before).norm()))
    assert moved[1] == pytest.approx(moved[0], rel=0.1)
