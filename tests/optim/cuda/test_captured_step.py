"""Captured steps: the same as steps that are taken as they are, whatever changes between them."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_graphs import captured, here
from optim_tools import batches, flat, squares
from optim_tools import member as any_member
from torch import Tensor, nn

from layerwise.optim.cuda import captured_step, graphs
from layerwise.optim.cuda.captured_step import CapturedStep
from layerwise.optim.cuda.executor import AsynchronousExecutor
from layerwise.optim.cuda.graphs import Graphs
from layerwise.optim.elementwise import AdamRule
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import Requirements

pytestmark = pytest.mark.usefixtures("untyped")
STEPS = 12
MEMBERS = {
    "Muon": {"momentum": 0.9, "orthogonalize": "newton_schulz"},
    "KFAC": {"refresh_every": 3, "factor_every": 2, "momentum": 0.9, "clip": 1e-3},
    "KFAC sampled": {"refresh_every": 3, "graft": "adam", "nesterov": True, "momentum": 0.9},
    "EKFAC": {"refresh_every": 2, "factor_every": 3},
    "EKFAC running": {"refresh_every": 2},
    "FOOF": {"refresh_every": 2, "clip": ("norm", 0.1)},
    "Shampoo": {"refresh_every": 3, "factor_every": 2, "graft": "gradient"},
    "SOAP": {"refresh_every": 3, "factor_every": 2},
    "SGD": {"momentum": 0.9},
    "Adam": {},
}
Edit = Callable[[Layerwise, nn.Module, int], None]


@pytest.fixture(autouse=True)
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with graphs that note operations."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    monkeypatch.setattr(Graphs, "_graph_of", captured)
    monkeypatch.setattr(graphs, "beside", here)
    monkeypatch.setattr(captured_step, "capturable", lambda device: True)


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def nothing(opt: Layerwise, model: nn.Module, step: int) -> None:
    """All steps are alike."""


def trained(name: str, cuda_graphs: bool | None, edit: Edit = nothing, steps: int = STEPS, **options: Any):
    """The model after some steps with a rate that falls, and its optimizer."""
    model = net()
    opt = any_member(name, model, lr=1e-2, weight_decay=0.1, cuda_graphs=cuda_graphs, **{**MEMBERS[name], **options})
    assert isinstance(opt, Layerwise)
    for step, (x, y) in enumerate(batches(steps, 5, n=24)):
        for group in opt.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        opt.zero_grad()
        squares(model(x.float()), y).backward()
        edit(opt, model, step)
        opt.step()
    return model, opt


def captured_of(opt: Layerwise) -> CapturedStep:
    """The optimizer's graphs."""
    executor = opt._executor
    assert isinstance(executor, AsynchronousExecutor)
    return executor.captured


def replays(opt: Layerwise) -> tuple[int, int]:
    """How many graphs of each kind there are."""
    step = captured_of(opt)
    return len(step._gathering._captured), len(step._descending._captured)


def assert_same(name: str, edit: Edit = nothing, **options: Any) -> Layerwise:
    expected, _ = trained(name, False, edit, **options)
    found, opt = trained(name, True, edit, **options)
    start = flat(net())
    assert float((flat(found) - flat(expected)).norm()) <= 1e-5 * float((flat(expected) - start).norm())
    return opt


@pytest.mark.parametrize("name", MEMBERS)
def test_captured_steps_are_the_same(name: str):
    opt = assert_same(name)
    assert all(replays(opt)), (captured_of(opt)._gathering.failed, captured_of(opt)._descending.failed)


def test_deferred_examples_are_looked_at_beside_the_graphs():
    opt = assert_same("EKFAC", examples_over=3)
    assert all(replays(opt))
    assert opt._executor.examples.over == 3


def test_what_changes_between_steps_is_noticed():
    """Weights that move elsewhere, momentum, decay, damping, a gradient that is missing, state that is loaded."""

    def edit(opt: Layerwise, model: nn.Module, step: int) -> None:
        first = model.get_parameter("0.weight")
        if step == 6:
            first.data = first.data.clone()
        if step == 7:
            opt.param_groups[0]["momentum"] = 0.5
        if step == 8:
            opt.param_groups[0]["weight_decay"] = 0.3
        if step == 9:
            opt.param_groups[0]["damping"] = 0.3
        if step == 11:
            model.get_parameter("2.weight").grad = None
        if step == 13:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))

    opt = assert_same("KFAC", edit, steps=22)
    assert all(replays(opt))


def test_where_a_gradient_is_not_finite_nothing_moves_and_it_is_counted():
    kept = {}

    def edit(opt: Layerwise, model: nn.Module, step: int) -> None:
        if step == 9:
            grad = model.get_parameter("0.weight").grad
            assert grad is not None
            grad[0, 0] = torch.nan
            kept["before"] = flat(model)
        if step == 10:
            kept["after"] = flat(model)

    opt = assert_same("SOAP", edit)
    assert torch.equal(kept["before"], kept["after"])
    assert opt.health().skipped_steps == 1
    assert opt.health().skipped_steps == 1


def test_numbers_that_change_at_every_step_are_not_kept():
    """A batch of another size at every step: nothing is captured, and nothing piles up."""
    model = net()
    opt = any_member("EKFAC running", model, lr=1e-2, cuda_graphs=True)
    assert isinstance(opt, Layerwise)
    for step in range(12):
        opt.zero_grad()
        model(torch.randn(5 + step, 5)).square().mean().backward()
        opt.step()
    assert replays(opt) == (0, 0)
    assert not captured_of(opt)._made


@pytest.mark.parametrize("name", ["MahalanobisSpectral", "LocoProp", "NGD"])
def test_rules_that_do_not_say_so_are_not_captured(name: str):
    model = net()
    opt = any_member(name, model, cuda_graphs=True)
    assert isinstance(opt, Layerwise)
    for x, y in batches(5, 5, n=24):
        opt.zero_grad()
        squares(model(x.float()), y).backward()
        opt.step()
    assert not captured_of(opt)._possible()


def test_who_is_captured():
    """Rules that say so."""
    assert AdamRule().requirements().capturable
    assert not Requirements().capturable
    _, small = trained("Muon", cuda_graphs=True, steps=1)
    assert captured_of(small)._possible()
    _, own_choice = trained("Muon", cuda_graphs=None, steps=1)
    assert captured_of(own_choice)._possible()
    _, refused = trained("Muon", cuda_graphs=False, steps=1)
    assert not captured_of(refused)._possible()
    _, polar = trained("Muon", True, steps=1, orthogonalize="polar")
    assert not captured_of(polar)._possible()


def test_autograd_hears_of_replayed_steps():
    model, opt = trained("Muon", cuda_graphs=True)
    assert all(replays(opt))
    version = next(model.parameters())._version
    model(torch.randn(4, 5)).square().mean().backward()
    opt.step()
    assert next(model.parameters())._version > version


def test_a_call_that_asks_the_device_is_not_captured():
    found, calls = Graphs(), []

    def call() -> None:
        calls.append(float(torch.ones(()) + 1))

    cpu = torch.device("cpu")
    assert [found.run("key", call, cpu) for _ in range(3)] == [False] * 3
    assert found.failed and calls == [2.0] * 3  # noqa: PT018


def test_graphs_replay_what_was_captured():
    x, total = torch.ones(3), torch.zeros(3)
    found = Graphs()

    def call() -> None:
        total.add_(torch.where(x > 0, 2 * x, 0.0).cumsum(0))

    kinds = []
    for step in range(5):
        x.fill_(float(step))
        kinds.append(found.run("key", call, torch.device("cpu")))
    assert kinds == [False, True, True, True, True]
    expected: Tensor = sum(torch.full((3,), 2.0 * s).cumsum(0) for s in range(5))  # type: ignore[assignment]
    assert torch.equal(total, expected)


def test_nothing_is_collected_while_a_call_is_captured():
    """A dead optimizer's graphs would be destroyed, which a capture does not survive."""
    found, collecting = Graphs(), []

    def call() -> None:
        collecting.append(gc.isenabled())

    for _ in range(2):
        found.run("key", call, torch.device("cpu"))
    assert collecting == [True, False]
    assert gc.isenabled()


@pytest.mark.parametrize(("name", "expected"), [("KFAC", 1), ("EKFAC running", 1), ("Shampoo", 2), ("SOAP", 2)])
def test_statistics_beside_the_graphs_need_no_graphs_of_their_own(name: str, expected: int):
    """Those of inputs and output gradients; Shampoo's and SOAP's are of the gradient, in the graph of such steps."""
    assert replays(assert_same(name, factor_every=2, steps=STEPS + 8)) == (expected, expected)
