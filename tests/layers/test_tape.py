"""`Tape`: what is recorded, what is pulled back, and what is left behind."""

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from layerwise.foundations.errors import InputError
from layerwise.layers.capture.tape import Tape, batched_grad
from layerwise.layers.table import LayerTable
from layerwise.testing import case

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _mlp(activation: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), activation or nn.Tanh(), nn.Linear(5, 2)).double()


def _record(model: nn.Module, x: Tensor = X) -> tuple[Tape, Tensor]:
    with Tape(model, LayerTable.from_model(model)) as tape:
        f = model(x)
    return tape, f


def _example_gradients(model: nn.Module, v: Tensor) -> dict[str, Tensor]:
    """{parameter: [N, *shape]} by one backward an example."""
    parameters = dict(model.named_parameters())
    rows = []
    for n in range(len(X)):
        rows.append(torch.autograd.grad(model(X[n : n + 1]), list(parameters.values()), v[n : n + 1]))
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(parameters)}


def _params(tape: Tape, ios) -> dict[str, Tensor]:
    return tape.table.to_params({name: io.rows() for name, io in ios.items()})


def _assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert max(float((a[k] - b[k]).abs().max()) for k in a) < 1e-10


def test_pull_gives_every_examples_gradient_for_every_cotangent():
    model = _mlp()
    tape, f = _record(model)
    v = torch.randn(3, *f.shape, dtype=torch.float64)
    rows = _params(tape, tape.pull(f, v))
    for i in range(3):
        _assert_same({k: t[i] for k, t in rows.items()}, _example_gradients(model, v[i]))


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)])
def test_an_in_place_activation_does_not_change_what_the_layer_gets(activation: nn.Module):
    model = _mlp(activation)
    v = torch.randn(4, 2, dtype=torch.float64)
    expected = _example_gradients(model, v)
    tape, f = _record(model)
    _assert_same({k: t[0] for k, t in _params(tape, tape.pull(f, v.unsqueeze(0), retain_graph=True)).items()}, expected)
    streamed = {}
    tape.stream(f, v, lambda spec, io: streamed.__setitem__(spec.name, io), retain_graph=True)
    _assert_same({k: t[0] for k, t in _params(tape, streamed).items()}, expected)
    tape.listen()
    f.backward(v)
    _assert_same({k: t[0] for k, t in _params(tape, tape.heard()).items()}, expected)


def test_listening_hears_what_pulling_gets_and_leaves_the_gradient_alone():
    model = _mlp()
    y = torch.tensor([0, 1, 1, 0])
    tape, f = _record(model)
    tape.listen()
    F.cross_entropy(f, y).backward()
    heard = _params(tape, tape.heard())
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert (heard[name][0].sum(0) - p.grad).abs().max() < 1e-12
    again, f = _record(model)
    v = torch.autograd.grad(F.cross_entropy(f, y), f, retain_graph=True)[0]
    _assert_same(heard, _params(again, again.pull(f, v.unsqueeze(0))))


def test_listening_adds_up_two_backwards():
    model = _mlp()
    tape, f = _record(model)
    tape.listen()
    f[:, 0].sum().backward(retain_graph=True)
    f[:, 1].sum().backward()
    heard = _params(tape, tape.heard())
    _assert_same({k: t[0] for k, t in heard.items()}, _example_gradients(model, torch.ones(4, 2, dtype=torch.float64)))


def test_a_backward_that_nobody_listens_to_is_not_heard():
    model = _mlp()
    tape, f = _record(model)
    f.sum().backward(retain_graph=True)
    tape.listen()
    rows = _params(tape, tape.heard())
    assert not any(bool(t.any()) for t in rows.values())


@pytest.mark.parametrize(
    "name", ["mlp", "repeated_linear", "tied_weights", "residual_cnn", "attention", "inplace_relu"]
)
def test_streaming_equals_pulling(name: str):
    model, x, _ = case(name).make()
    with Tape(model, LayerTable.from_model(model)) as tape:
        f = model(x)
    v = torch.randn_like(f)
    pulled = tape.pull(f, v.unsqueeze(0), retain_graph=True)
    order = []
    streamed = {}

    def consume(spec, io) -> None:
        order.append(spec.name)
        streamed[spec.name] = io.rows()

    tape.stream(f, v, consume)
    assert sorted(order) == sorted(pulled)
    assert len(order) == len(set(order))
    _assert_same(streamed, {k: io.rows() for k, io in pulled.items()})
    assert all(event.grad is None for event in tape.events)


class Idle(nn.Module):
    """A layer that is called but does not matter, one that is never called, and one that does the work."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.never, self.work = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return self.work(x)


@pytest.mark.parametrize("vectors", [1, 3])
def test_a_layer_the_output_does_not_depend_on_has_gradient_zero(vectors: int):
    model = Idle().double()
    tape, f = _record(model)
    ios = tape.pull(f, torch.ones(vectors, *f.shape, dtype=torch.float64), retain_graph=True)
    assert set(ios) == {"idle", "work"}
    assert ios["idle"].rows().shape == (vectors, 4, 1, 2, 4)
    assert not ios["idle"].rows().any()
    streamed = {}
    tape.stream(f, torch.ones_like(f), lambda spec, io: streamed.__setitem__(spec.name, io.rows()))
    assert set(streamed) == {"idle", "work"}
    assert not streamed["idle"].any()
    assert streamed["work"].any()
    tape, f = _record(model)
    left = list[str]()
    tape.stream(f, torch.ones_like(f), lambda spec, io: left.append(spec.name), forgetting=True)
    assert left == ["work"]


class Branches(nn.Module):
    """Two layers side by side, a residual branch, and one layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = (self.a(x) + self.b(x.flip(0))).tanh()
        return self.d(h + self.c(h))


def test_a_streamed_backward_asks_for_the_gradients_of_the_first_layers_alone(monkeypatch: pytest.MonkeyPatch):
    """Those of others are handed over as they come, and kept by nobody."""
    tape, f = _record(Branches().double())
    asked, grad = list[int](), torch.autograd.grad

    def counted(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(len(inputs))
        return grad(outputs, inputs, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    streamed = list[str]()
    tape.stream(f, torch.ones_like(f), lambda spec, io: streamed.append(spec.name))
    assert asked == [2]
    assert sorted(streamed) == ["a", "b", "c", "d"]


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        out = self.second(h.detach())
        h.detach().add_(1.0)
        return out + h


def test_an_in_place_change_of_an_input_is_refused_by_name():
    tape, f = _record(ChangesItsInput().double())
    v = torch.ones_like(f)
    with pytest.raises(InputError, match="in-place change of the input of layer 'second'"):
        tape.pull(f, v.unsqueeze(0), retain_graph=True)
    with pytest.raises(InputError, match="layer 'second'"):
        tape.stream(f, v, lambda spec, io: None, retain_graph=True)
    with pytest.raises(InputError, match="layer 'second'"):
        tape.heard()


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(self.mix(x, x, x)[0])
        if h.shape[1] == 3:
            raise RuntimeError("three is too many")
        return h


@pytest.fixture(params=[True, False])
def fast_path(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The flag that fused attention goes by, on or off for one test."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(request.param)
    yield request.param
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("length", [2, 3])
def test_hooks_patches_and_the_fast_path_are_put_back(length: int, fast_path: bool):
    model = Fails()
    tape = Tape(model, LayerTable.from_model(model))
    try:
        with tape:
            assert "forward" in vars(model.mix)
            assert model.head._forward_hooks
            assert not torch.backends.mha.get_fastpath_enabled()
            model(torch.randn(2, length, 4))
    except RuntimeError as error:
        assert length == 3 and "too many" in str(error)  # noqa: PT017, PT018
    assert "forward" not in vars(model.mix)
    assert all(not m._forward_hooks and not m._forward_hooks_with_kwargs for m in model.modules())
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    before = len(tape.events)
    model(torch.randn(2, 2, 4))
    assert len(tape.events) == before


def test_hooks_of_others_stay():
    model = _mlp()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    _record(model)
    model(X)
    assert len(calls) == 2
    assert len(model[0]._forward_hooks) == 1


def test_layers_called_by_name_are_recorded():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(input=x)

    tape, f = _record(Named().double())
    assert [event.site.module_name for event in tape.events] == ["fc"]
    assert tape.pull(f, torch.ones(1, *f.shape, dtype=torch.float64))["fc"].rows().any()


def test_a_batch_of_another_kind_names_the_layer():
    tape, _ = _record(_mlp())
    with pytest.raises(InputError, match=r"layer '0' called on an input of shape \(4, 3\)"):
        tape.io(tape.table.spec("0"), 1, 3)


class NoBatchingRule(torch.autograd.Function):
    """vmap cannot go through this."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:  # type: ignore[override]
        return torch.from_numpy(2 * g.numpy())


def test_an_operation_without_a_batching_rule_gets_one_backward_a_vector():
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    f = NoBatchingRule.apply(w * X)
    v = torch.randn(5, 4, 3, dtype=torch.float64)
    unused = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grad, nothing = batched_grad(f, [w, unused], v, retain_graph=False)
    assert nothing is None
    assert grad is not None
    assert (grad - 2 * (v * X).sum(1)).abs().max() < 1e-12


class _Saved:
    """Stands in the graph for a tensor that it saves."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_a_recorded_graph_is_freed_with_its_tape():
    """Autograd holds the hooks and an event holds its node: a cycle that Python's collector does not see."""
    model, saved = _mlp(), []

    def pack(tensor: Tensor) -> _Saved:
        saved.append(weakref.ref(kept := _Saved(tensor.detach())))
        return kept

    with Tape(model, LayerTable.from_model(model)) as tape, saved_tensors_hooks(pack, lambda kept: kept.tensor):
        f = model(X)
    tape.pull(f, torch.ones(2, *f.shape, dtype=f.dtype), retain_graph=True)
    assert saved
    assert all(ref() is not None for ref in saved)
    del tape, f
    gc.collect()
    assert all(ref() is None for ref in saved)
