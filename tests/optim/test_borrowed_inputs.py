"""Statistics that must be those of what a layer saw, and counts that must be those of what was done."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import rows
from layerwise.optim.cuda.rows import Rows, average_rows_, together
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import Context
from random_tensors import randn


def one_step(model: nn.Module, opt: lw.optim.Layerwise, x: Tensor) -> None:
    opt.zero_grad()
    model(x).square().sum(1).mean().backward()
    opt.step()


# --- counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_the_first_basis_of_soap_is_counted_once(monkeypatch: pytest.MonkeyPatch, waits: bool):
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: waits))
    model = nn.Sequential(nn.Linear(5, 5))
    opt = lw.optim.SOAP(model, lr=0.01, scale="formula")
    one_step(model, opt, randn(6, 5))
    assert opt.health().refreshes == 1


def test_nothing_to_refresh_is_not_counted():
    model = nn.Sequential(nn.Linear(5, 5))
    opt = lw.optim.KFAC(model, lr=0.01, max_factor=2, scale="formula")
    one_step(model, opt, randn(6, 5))
    assert opt.health().refreshes == 0


# --- which layers ------------------------------------------------------------------------------------------


def test_a_loaded_group_may_change_who_is_observed():
    def built(update: str) -> tuple[nn.Module, lw.optim.Layerwise]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
        return model, lw.optim.KFAC(model, lr=0.01, overrides={"2": {"update": update}}, scale="formula")

    model, opt = built("fallback")
    one_step(model, opt, randn(6, 5))
    other, source = built("rule")
    one_step(other, source, randn(6, 5))
    opt.load_state_dict(source.state_dict())
    model.load_state_dict(other.state_dict())
    for step in range(2):
        one_step(model, opt, randn(6, 5, seed=step))
        one_step(other, source, randn(6, 5, seed=step))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


# --- tensors that change ------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [False, True])
def test_a_leaf_that_is_written_over_between_backward_and_step(monkeypatch: pytest.MonkeyPatch, view: bool):
    """As in adversarial training: the input itself has a gradient, and is moved before the step."""
    monkeypatch.setattr(rows, "waits_for_step", rows.has_plain_rows)
    results = []
    for moved in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        opt = lw.optim.KFAC(model, lr=0.01, scale="formula")
        for step in range(3):
            x = randn(1, 6, 16, seed=step).requires_grad_()
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                f = model(x[0] if view else x)
            f.float().square().sum(-1).mean().backward()
            if moved:
                with torch.no_grad():
                    x += 10 * x.grad.sign()
            opt.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


class Graphed(torch.autograd.Function):
    """As `torch.cuda.make_graphed_callables` makes them: one place for all outputs, and no version tells."""

    place: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        Graphed.place.data.copy_(2 * x)
        return Graphed.place.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * g


class AfterGraph(nn.Module):
    def __init__(self, graphed: bool) -> None:
        super().__init__()
        self.graphed, self.first, self.second = graphed, nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(Graphed.apply(h) if self.graphed else 2 * h)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_what_a_graph_leaves_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    """Statistics that would wait are taken in at once where the next replay writes over the inputs."""
    monkeypatch.setattr(rows, "waits_for_step", rows.has_plain_rows)
    Graphed.place = torch.zeros(6, 16, dtype=torch.bfloat16)
    results = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = AfterGraph(graphed)
        opt = lw.optim.KFAC(model, lr=0.01, factor_every=3, refresh_every=3, statistics_over=3, scale="formula")
        for step in range(8):
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                f = model(randn(6, 16, seed=step))
            f.float().square().sum(-1).mean().backward()
            opt.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scaling", ["batch", "running"])
def test_ekfac_with_one_buffer_for_all_batches(scaling: str):
    results = []
    for shared in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        opt = lw.optim.EKFAC(model, lr=0.01, accumulate=2, scaling=scaling, scale="formula")
        buffer = torch.empty(6, 8)
        for step in range(3):
            opt.zero_grad()
            for b in range(2):
                x = randn(6, 8, seed=10 * step + b)
                x = buffer.copy_(x) if shared else x
                (model(x).square().sum(1).mean() / 2).backward()
            opt.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_no_rows_at_all():
    """Layers whose rows are none: as moments, a mean of zeros; never a division by zero."""
    stack = together([Rows(torch.ones(0, 16).bfloat16(), torch.bfloat16)], [0])
    mean = torch.eye(16)[None]
    if stack is not None:
        average_rows_(mean, torch.ones(1), stack, 0.9, Context(1, 0.0, 0.0, False, {}))
    assert torch.isfinite(mean).all()
