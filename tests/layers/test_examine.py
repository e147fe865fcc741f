"""First use: the axis of the examples is found, interaction is refused, unexplained gradients fall back."""

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.cotangents import LossGradient
from layerwise.foundations.errors import InputError, InteractionError
from layerwise.foundations.likelihoods import Categorical
from layerwise.layers.capture.examine import _KEPT, examine, examined_as
from layerwise.layers.capture.recorder import Batch, ModelRecorder
from layerwise.layers.capture.verify import _squares, verify
from layerwise.layers.io.layer_io import Layout
from layerwise.layers.table import LayerTable

N, T, D, C = 3, 5, 4, 2


class Apply(nn.Module):
    """A module between two functions."""

    def __init__(self, net: nn.Module, before: Callable | None = None, after: Callable | None = None) -> None:
        super().__init__()
        self.net, self.before, self.after = net, before, after

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(self.before(x) if self.before else x)
        return self.after(y) if self.after else y


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)).double()


def _x() -> Tensor:
    return torch.randn(N, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _y() -> Tensor:
    return torch.randint(C, (N, T), generator=torch.Generator().manual_seed(2))


def _rows(model: nn.Module, x: Tensor, y: Tensor, **options) -> tuple[ModelRecorder, dict[str, Tensor]]:
    """Per-example gradients of the cross-entropy, {parameter: [N, *shape]}."""
    recorder = ModelRecorder(model, LayerTable.from_model(model), **options)
    law = Categorical()
    with recorder.session():
        recorded = recorder.record(Batch(x, y, None, 0), law)
        v = LossGradient(law).slice(recorded.terms, 0, 1, 0)
        blocks = {name: io.rows() for name, io in recorded.all_layers(v, last=True).items()}
    found = recorder.table.to_params(blocks)
    return recorder, {name: t[0] for name, t in found.items()}


def _expected(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The same for inputs [N, T, D] and a model that keeps examples first, by one backward an example."""
    params = dict(model.named_parameters())
    rows = []
    for n in range(len(x)):
        loss = F.cross_entropy(model(x[n : n + 1]).reshape(-1, C), y[n].reshape(-1), reduction="sum")
        rows.append(torch.autograd.grad(loss, list(params.values())))
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(params)}


def _assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, truth in expected.items():
        found = got[name if name in got else f"net.{name}"]
        assert (found - truth).abs().max() < 1e-10, name


def test_a_time_first_input_is_found_by_the_target():
    """Inputs [T, N, D], labels [N]: only axis 1 can hold the examples."""
    model = Apply(_mlp(), after=lambda z: z.mean(0))
    y = _y()[:, 0]
    expected = _expected(Apply(model.net, after=lambda z: z.mean(1)), _x(), y)
    recorder, got = _rows(model, _x().transpose(0, 1), y)
    assert recorder.findings is not None
    assert recorder.findings.example_axis == 1
    assert set(recorder.findings.layouts.values()) == {Layout(1)}
    _assert_same(got, expected)


def test_a_time_first_input_and_output_with_the_axis_named():
    net = _mlp()
    recorder, got = _rows(net, _x().transpose(0, 1), _y().transpose(0, 1), example_axis=1)
    assert recorder.findings is not None
    assert recorder.findings.output == Layout(1)
    _assert_same(got, _expected(net, _x(), _y()))


LAYOUTS = {
    "flattened": (lambda x: x.flatten(0, 1), lambda z: z.unflatten(0, (-1, T)), Layout(0, "major")),
    "flattened_time_major": (
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda z: z.unflatten(0, (T, -1)).transpose(0, 1),
        Layout(0, "minor"),
    ),
    "time_first_inside": (lambda x: x.transpose(0, 1), lambda z: z.transpose(0, 1), Layout(1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_inside_the_model_are_found(name: str):
    before, after, layout = LAYOUTS[name]
    model = Apply(_mlp(), before, after)
    recorder, got = _rows(model, _x(), _y())
    assert recorder.findings is not None
    assert set(recorder.findings.layouts.values()) == {layout}
    assert all(spec.sites for spec in recorder.table)
    _assert_same(got, _expected(model.net, _x(), _y()))


def test_flattened_outputs():
    model = Apply(_mlp(), after=lambda z: z.flatten(0, 1))
    recorder, got = _rows(model, _x(), _y().flatten())
    assert recorder.findings is not None
    assert recorder.findings.output == Layout(0, "major")
    _assert_same(got, _expected(model.net, _x(), _y()))


class TimeFirstAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.head = nn.MultiheadAttention(D, 2), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(0, 1)
        return self.head(self.mix(h, h, h)[0].tanh()).transpose(0, 1)


def test_time_first_attention():
    model = TimeFirstAttention().double()
    recorder, got = _rows(model, _x(), _y())
    assert recorder.findings is not None
    assert {spec.name for spec in recorder.table if spec.sites} == {"mix.q", "mix.k", "mix.v", "mix.out_proj", "head"}
    assert set(recorder.findings.layouts.values()) == {Layout(1)}
    _assert_same(got, _expected(model, _x(), _y()))


class Positions(nn.Module):
    """A table of positions, sliced or looked up once for all examples."""

    def __init__(self, called: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.position, self.head, self.called = nn.Embedding(T + 2, D), nn.Linear(D, C), called

    def forward(self, x: Tensor) -> Tensor:
        p = self.position(torch.arange(x.shape[1])) if self.called else self.position.weight[: x.shape[1]]
        return self.head((x + p).tanh())


def test_a_sliced_table_of_positions_falls_back_and_is_right():
    model = Positions(called=False).double()
    recorder, got = _rows(model, _x(), _y())
    reason = str(recorder.table.spec("position.weight").reason)
    assert "its weight is used, but its module is never called" in reason
    assert recorder.table.spec("head").sites
    _assert_same(got, _expected(model, _x(), _y()))


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_how_much_calls_leave_unexplained_is_known_beyond_the_range_of_squares(size: float):
    model = nn.Linear(D, C)
    (spec,) = LayerTable.from_model(model).layers
    truth = {name: size * torch.randn_like(p) for name, p in model.named_parameters()}
    own = {part: 0.9 * part.of(truth) for part in spec.form.parts}
    gap, scale = _squares(own, truth, spec, torch.device("cpu")).tolist()
    assert gap / scale == pytest.approx(0.01, rel=1e-4)


def test_a_table_looked_up_once_for_all_examples_stays_a_layer():
    model = Positions(called=True).double()
    recorder, got = _rows(model, _x(), _y())
    assert recorder.findings is not None
    assert recorder.findings.broadcast == {"position"}
    assert recorder.table.spec("position").sites
    _assert_same(got, _expected(model, _x(), _y()))


def test_positions_cost_no_second_verification(monkeypatch: pytest.MonkeyPatch):
    """Five positions are no multiple of three examples: that they are shared is seen from shapes alone."""
    calls = []

    def counted(*given):
        calls.append(given)
        return verify(*given)

    monkeypatch.setattr(sys.modules[examine.__module__], "verify", counted)
    model = Positions(called=True).double()
    notes = examine(model, LayerTable.from_model(model), _x(), _y(), None)
    assert notes.broadcast == {"position"}
    assert len(calls) == 1


class Prototypes(nn.Module):
    """A layer whose input belongs to no example, in a way that cannot be broadcast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.classes, self.fc = nn.Parameter(torch.randn(C, D)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.fc(self.classes).t()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_layer_without_the_examples_falls_back_and_is_right(dropout: float):
    model = Apply(Prototypes(), before=nn.Dropout(dropout)).double().train()
    recorder, got = _rows(model, _x(), _y())
    assert recorder.table.spec("net.fc.weight").reason == "its input has no axis that holds the examples"
    if not dropout:
        _assert_same(got, _expected(model, _x(), _y()))


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.head = nn.Linear(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.fc(x).tanh() * self.fc.weight.mean(0)).tanh())


def test_a_weight_used_outside_its_module_is_demoted_with_the_reason():
    model = Reused().double()
    recorder, got = _rows(model, _x(), _y())
    spec = recorder.table.spec("fc.weight")
    assert not spec.sites
    assert "used elsewhere" in str(spec.reason)
    assert recorder.table.spec("head").sites
    _assert_same(got, _expected(model, _x(), _y()))


class Centered(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.head, self.where = nn.Linear(D, D), nn.Linear(D, C), where

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(0) if self.where == "input" else x
        h = self.fc(x)
        h = h - h.mean(0) if self.where == "hidden" else h
        f = self.head(h.tanh())
        return f - f.mean(0) if self.where == "output" else f


@pytest.mark.parametrize("where", ["hidden", "output"])
def test_interacting_examples_are_refused(where: str):
    model = Centered(where).double()
    x, y = _x()[:, 0], _y()[:, 0]
    with pytest.raises(InteractionError, match=r"batch elements interact \(seen at (fc|head)"):
        lw.fisher(model, (x, y), structure="diag")
    lw.fisher(Centered("nowhere").double(), (x, y), structure="diag")


def test_one_example_first_and_more_later():
    """The first batch of one example tells nothing of the layout; the next one is examined again."""
    before, after, _ = LAYOUTS["flattened_time_major"]
    model = Apply(_mlp(), before, after)
    recorder, law = ModelRecorder(model, LayerTable.from_model(model)), Categorical()
    expected = _expected(model.net, _x(), _y())
    found = []
    with recorder.session():
        for number, part in enumerate((slice(0, 1), slice(1, 3), slice(0, 1))):
            recorded = recorder.record(Batch(_x()[part], _y()[part], None, number), law)
            v = LossGradient(law).slice(recorded.terms, 0, 1, number)
            blocks = {name: io.rows() for name, io in recorded.all_layers(v, last=True).items()}
            found.append({name: t[0] for name, t in recorder.table.to_params(blocks).items()})
    for name, truth in expected.items():
        first, later, again = (rows[f"net.{name}"] for rows in found)
        assert (torch.cat([first, later]) - truth).abs().max() < 1e-10
        assert torch.equal(first, again)


def test_an_empty_batch_and_a_constant_model_are_refused():
    with pytest.raises(InputError, match="0 examples"):
        _rows(_mlp(), _x()[:0], _y()[:0])

    class Constant(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input[..., :C].detach()

    with pytest.raises(InputError, match="no trainable parameter takes part in"):
        _rows(Constant(D, C).double(), _x(), _y())


# --- what was found is remembered --------------------------------------------------------------------------


def test_another_function_in_an_attribute_is_examined_again():
    """The sizes are the same, only the order of rows is not: the layout of before would silently be wrong."""
    before, after, layout = LAYOUTS["flattened"]
    model = Apply(_mlp(), before, after)
    _rows(model, _x(), _y())
    model.before, model.after, layout = LAYOUTS["flattened_time_major"]
    recorder, got = _rows(model, _x(), _y())
    assert recorder.findings is not None
    assert set(recorder.findings.layouts.values()) == {layout}
    _assert_same(got, _expected(model.net, _x(), _y()))


def test_state_that_a_forward_leaves_behind_does_no_harm():
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()

        def forward(self, x: Tensor) -> Tensor:
            self.state = (x.detach() + 1, [x.detach()])
            return self.net(x)

    model = Remembers()
    expected = _expected(model, _x(), _y())
    for _ in range(3):
        _assert_same(_rows(model, _x(), _y())[1], expected)


def test_notes_do_not_hold_the_model_so_that_it_can_be_freed():
    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()
            self.act = self.squash

        def squash(self, x: Tensor) -> Tensor:
            return x.tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.net(x))

    model = Bound()
    _rows(model, _x(), _y())
    signature, notes = _KEPT[model]
    held = _items((signature, dataclasses.astuple(notes)))
    assert any(isinstance(item, str) for item in held)
    assert not any(isinstance(item, nn.Module | Tensor) or inspect.ismethod(item) for item in held)


def test_notes_hold_for_one_device():
    """A model moved in place keeps its parameters, but a GPU's operations may refuse what a CPU's take (GRU)."""
    model = _mlp()
    _rows(model, _x(), _y())
    assert torch.device("cpu") in _items(_KEPT[model][0])


def _items(value: object) -> list[object]:
    """Whatever containers hold, however deep."""
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    if not isinstance(inside, list | tuple | frozenset):
        return [inside]
    return [item for part in inside for item in _items(part)]


def test_examination_leaves_buffers_alone():
    """Spectral norm in train mode changes its own at every forward: results must not depend on what is remembered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(D, C))).double().train()
    first, again = (_rows(model, _x(), _y())[1] for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


class Counted(nn.Sequential):
    """Counts its forwards."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x)


def test_notes_that_had_a_target_serve_a_call_without():
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(5, 4)
    table = LayerTable.from_model(model)
    with_target = examine(model, table, x, torch.zeros(5, dtype=torch.long), None)
    assert examine(model, table, x, None, None) is with_target
    other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    without = examine(other, LayerTable.from_model(other), x, None, None)
    assert examine(other, LayerTable.from_model(other), x, torch.zeros(5, dtype=torch.long), None) is not without


def test_a_copy_is_not_examined_again_but_for_another_kind_of_input():
    model, x = Counted(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(5, 4)
    notes = examine(model, LayerTable.from_model(model), x, None, None)
    copied = copy.deepcopy(model)
    examined_as(copied, notes, x)
    Counted.calls = 0
    assert examine(copied, LayerTable.from_model(copied), torch.randn(7, 4), None, None) is notes
    assert Counted.calls == 0
    examine(copied, LayerTable.from_model(copied), torch.randn(7, 3, 4), None, None)
    assert Counted.calls > 0
