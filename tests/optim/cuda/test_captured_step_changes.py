"""Captured steps: what a user changes between steps, and what graphs keep."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_graphs import captured, here
from optim_tools import member as any_member
from test_captured_step import assert_same, captured_of, net, replays, trained
from torch import Tensor, nn

from layerwise.optim.cuda import captured_step, executor, gradient_sizes, graphs
from layerwise.optim.cuda.graphs import Graphs
from layerwise.optim.engine import Layerwise

pytestmark = pytest.mark.usefixtures("untyped")
CAPTURING = []


@pytest.fixture(autouse=True)
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with graphs that note operations."""

    def noted(owner: Any, call: Callable[[], None]) -> Callable[[], None]:
        CAPTURING.append(call)
        try:
            return captured(owner, call)
        finally:
            CAPTURING.pop()

    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    monkeypatch.setattr(Graphs, "_graph_of", noted)
    monkeypatch.setattr(graphs, "beside", here)
    monkeypatch.setattr(captured_step, "capturable", lambda device: True)


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


def test_a_missing_gradient_exchanges_nothing_that_graphs_read(monkeypatch: pytest.MonkeyPatch):
    """Which sizes belong together is sent to the device outside of graphs, and stays where they read it."""
    made = gradient_sizes._index
    sent: list[Tensor] = []

    def index(*args: Any) -> Tensor:
        assert not CAPTURING
        sent.append(made(*args))
        return sent[-1]

    monkeypatch.setattr(gradient_sizes, "_index", index)
    monkeypatch.setattr(executor, "multiplies_in_fp16", lambda stack: True)

    def edit(opt: Layerwise, model: nn.Module, step: int) -> None:
        if step == 5:  # between the step that a graph is like and its capture
            model.get_parameter("2.weight").grad = model.get_parameter("2.bias").grad = None

    _, opt = trained("KFAC", True, edit, factor_every=1, momentum=0.0)
    assert all(replays(opt))
    whole = captured_of(opt)._places_of_sizes[torch.device("cpu")]["index"]
    before = whole.data_ptr()
    model = opt.model
    for _ in range(2):
        opt.zero_grad()
        model(torch.randn(24, 5)).square().mean().backward()
        edit(opt, model, 5)
        opt.step()
    assert captured_of(opt)._places_of_sizes[torch.device("cpu")]["index"].data_ptr() == before


def test_batches_of_many_sizes_do_not_fill_the_memory():
    model = net()
    opt = any_member("EKFAC running", model, lr=1e-2, cuda_graphs=True)
    assert isinstance(opt, Layerwise)
    for step in range(3 * 24 + 6):
        opt.zero_grad()
        model(torch.randn(5 + step % 24, 5)).square().mean().backward()
        opt.step()
    assert replays(opt) == (captured_step.KEPT, captured_step.KEPT)
    assert len(captured_of(opt)._made) == captured_step.KEPT


def test_state_that_is_turned_in_place_is_elsewhere():
    """Memory is used again: the same address may hold another order."""
    _, opt = trained("Muon", cuda_graphs=True)
    assert captured_of(opt)._lies_as_before()
    state = opt._executor.stacks[0].state
    name = next(
        name for name, X in state.items() if isinstance(X, Tensor) and X.ndim == 3 and X.stride() != X.mT.stride()
    )
    state[name] = state[name].mT
    assert not captured_of(opt)._lies_as_before()


def test_replays_are_on_the_callers_stream(monkeypatch: pytest.MonkeyPatch):
    """Only what is not captured yet has a stream of its own."""
    _, opt = trained("EKFAC running", cuda_graphs=True)
    calls, made, device = captured_of(opt)._gathering, list[str](), torch.device("cpu")
    (key,) = calls._captured

    def beside(_: torch.device) -> Any:
        made.append("a stream")
        return here(device)

    monkeypatch.setattr(graphs, "beside", beside)
    assert calls.run(key, lambda: made.append("a call"), device)
    assert not made
    assert not calls.run(key, lambda: made.append("a call"), device, capture=False)
    assert made == ["a stream", "a call"]


def test_a_step_like_the_last_has_its_key():
    _, opt = trained("KFAC", cuda_graphs=True)
    step, stacks = captured_of(opt), opt._stacks or []

    def key() -> captured_step.Key:
        return step._key([opt._context(stack, 24) for stack in stacks], 1.0)

    before = key()
    assert key() is before
    opt.param_groups[0]["damping"] *= 2
    after = key()
    assert after != before
    opt.param_groups[0]["damping"] /= 2
    assert key() == before
    assert hash(key()) == hash(before)


def test_steps_that_copy_the_gradients_of_other_parameters_have_another_key():
    """Of as many parameters alike, into the same memory: those that are not copied are read where they lie."""
    _, opt = trained("KFAC", cuda_graphs=True)
    step, stacks = captured_of(opt), opt._stacks or []
    contexts, keys = [opt._context(stack, 24) for stack in stacks], list[captured_step.Key]()
    first, second, *_ = step._params
    for copied in ([first], [second], [first]):
        step._copied = copied
        keys.append(step._key(contexts, 1.0))
    assert keys[0] == keys[2] != keys[1]


def test_fallbacks_of_one_group_are_told_the_same():
    """Without the momentum of the optimizer's own rule; what changes in the group is seen at the next step."""
    _, opt = trained("KFAC", cuda_graphs=True, separate_bias=True)
    fallbacks, known = [stack for stack in opt._stacks or [] if stack.fallback], dict[int, dict[str, Any]]()
    contexts = [opt._context(stack, 24, known) for stack in fallbacks]
    assert len(contexts) > 1
    assert all(c.options == opt._context(stack, 24).options for stack, c in zip(fallbacks, contexts, strict=True))
    assert not any("momentum" in c.options for c in contexts)
    opt.param_groups[0]["weight_decay"] = 0.7
    assert all(opt._context(stack, 24, {}).options["weight_decay"] == 0.7 for stack in fallbacks)
