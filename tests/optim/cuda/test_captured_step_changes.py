"""Recorded steps: what a user changes between steps, and what recordings keep."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_graphs import captured, here
from optim_tools import member as any_member
from test_captured_step import assert_same, net, replays, trained
from torch import Tensor, nn

from layerwise.optim.cuda import captured_step as recorded
from layerwise.optim.cuda import found_inf as gates
from layerwise.optim.cuda import graphs
from layerwise.optim.cuda.graphs import Graphs
from layerwise.optim.engine import Layerwise
from layerwise.optim.step.stack import Stack

pytestmark = pytest.mark.usefixtures("untyped")
RECORDING = []


@pytest.fixture(autouse=True)
def unwaiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with graphs that note operations."""

    def noted(owner: Any, call: Callable[[], None]) -> Callable[[], None]:
        RECORDING.append(call)
        try:
            return captured(owner, call)
        finally:
            RECORDING.pop()

    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    monkeypatch.setattr(Graphs, "_captured", noted)
    monkeypatch.setattr(graphs, "beside", here)
    monkeypatch.setattr(recorded, "capturable", lambda device: True)


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("Muon", "momentum", 0.3),
        ("Muon", "nesterov", False),
        ("SOAP", "betas", (0.5, 0.6)),
        ("Adam", "betas", (0.5, 0.6)),
        ("EKFAC running", "scaling_decay", 0.1),
    ],
)
def test_a_rule_that_is_changed_while_it_trains(name: str, attribute: str, value: Any):
    def edit(opt: Layerwise, model: nn.Module, step: int) -> None:
        if step == 9:
            setattr(opt.rule, attribute, value)

    assert all(replays(assert_same(name, edit, steps=16)))


def test_a_fallback_that_is_changed_while_it_trains():
    def edit(opt: Layerwise, model: nn.Module, step: int) -> None:
        if step == 9:
            opt.fallback.betas = (0.1, 0.2)  # type: ignore[attr-defined]

    assert_same("KFAC", edit, steps=16)


def test_a_missing_gradient_exchanges_nothing_that_recordings_read(monkeypatch: pytest.MonkeyPatch):
    """Which sizes belong together is sent to the device outside of recordings, and stays where they read it."""
    made = gates._index
    sent: list[Tensor] = []

    def index(*args: Any) -> Tensor:
        assert not RECORDING
        sent.append(made(*args))
        return sent[-1]

    monkeypatch.setattr(gates, "_index", index)
    monkeypatch.setattr(Stack, "splits_gradient", True)

    def edit(opt: Layerwise, model: nn.Module, step: int) -> None:
        if step == 5:  # between the step that a recording is like and the recording
            model.get_parameter("2.weight").grad = model.get_parameter("2.bias").grad = None

    _, opt = trained("KFAC", True, edit, factor_every=1, momentum=0.0)
    assert all(replays(opt))
    whole = opt._recorded._places_of_sizes[torch.device("cpu")]["index"]
    before = whole.data_ptr()
    model = opt.model
    for _ in range(2):
        opt.zero_grad()
        model(torch.randn(24, 5)).square().mean().backward()
        edit(opt, model, 5)
        opt.step()
    assert opt._recorded._places_of_sizes[torch.device("cpu")]["index"].data_ptr() == before


def test_batches_of_many_sizes_do_not_fill_the_memory():
    model = net()
    opt = any_member("EKFAC running", model, lr=1e-2, record=True)
    assert isinstance(opt, Layerwise)
    for step in range(3 * 24 + 6):
        opt.zero_grad()
        model(torch.randn(5 + step % 24, 5)).square().mean().backward()
        opt.step()
    assert replays(opt) == (recorded.KEPT, recorded.KEPT)
    assert len(opt._recorded._made) == recorded.KEPT


def test_state_that_is_turned_in_place_is_elsewhere():
    """Memory is used again: the same address may hold another order."""
    _, opt = trained("Muon", record=True)
    assert opt._recorded._settled()
    state = opt._descent.stacks[0].state
    name = next(name for name, X in state.items() if X.ndim == 3 and X.stride() != X.mT.stride())
    state[name] = state[name].mT
    assert not opt._recorded._settled()
