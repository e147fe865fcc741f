"""Graphs of operations: when two forwards are the same, and which of them have to be verified at every batch."""

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.layers.capture import recorder
from layerwise.layers.capture.graph import Graph, parameter_names
from layerwise.testing import cases

MOVED = {
    "a mask": lambda h: h[h.detach().sum(-1) > 0],
    "an index": lambda h: h.index_select(0, h.detach().sum(-1).argsort()),
    "a sort": lambda h: h.sort(0).values,
    "a permutation as a matrix": lambda h: torch.eye(len(h))[h.detach().sum(-1).argsort()] @ h,
}


def _key(model: nn.Module, x: Tensor) -> int:
    return Graph.of(model(x)).key(parameter_names(model.named_parameters()))


def test_the_same_operations_have_one_key():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(5, 3)
    assert _key(model, x) == _key(model, torch.randn(5, 3))
    before = _key(model, x)
    with torch.no_grad():
        model[0].weight.zero_()
    assert _key(model, x) == before


@pytest.mark.parametrize("change", ["a layer more", "another parameter", "another activation", "a scale", "an axis"])
def test_other_operations_have_another(change: str):
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    x, names = torch.randn(4, 3, 3), parameter_names([("a", a.weight), ("b", b.weight), ("c", a.bias), ("d", b.bias)])
    pairs = {
        "a layer more": (a(x), a(a(x))),
        "another parameter": (a(x), b(x)),
        "another activation": (a(x).tanh(), a(x).sigmoid()),
        "a scale": (torch.add(a(x), b(x), alpha=1), torch.add(a(x), b(x), alpha=2)),
        "an axis": (a(x).softmax(1), a(x).softmax(2)),
    }
    first, second = (Graph.of(f).key(names) for f in pairs[change])
    assert first != second


@pytest.mark.parametrize("how", MOVED)
def test_rows_that_move_by_the_data_are_not_steady(how: str):
    layer, x = nn.Linear(3, 3), torch.randn(6, 3)
    assert Graph.of(layer(x).tanh()).steady
    assert not Graph.of(MOVED[how](layer(x))).steady


class Twice(torch.autograd.Function):
    """Anything may happen in it."""

    @staticmethod
    def forward(ctx, h):
        return 2 * h

    @staticmethod
    def backward(ctx, g):
        return 2 * g


def test_a_function_of_one_s_own_is_not_steady():
    assert not Graph.of(Twice.apply(nn.Linear(3, 3)(torch.randn(6, 3)))).steady


def test_uses_are_counted():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    uses = Graph.of(layer(layer(x)) + nn.functional.linear(x, layer.weight)).uses()
    assert uses[id(layer.weight)] == 3
    assert uses[id(layer.bias)] == 2


def test_a_weight_norm_is_given_no_further_axes():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    scale = nn.Parameter(torch.ones(3))
    found = Graph.of(model(torch.randn(2, 3)) * scale[:3]).broadcasts()
    assert id(scale) in found
    assert id(model.parametrizations.weight.original0) not in found


PLAIN = ("mlp", "conv2d", "residual_cnn", "transformer", "attention", "language_model", "layer_norm", "embedding")


@pytest.mark.parametrize("name", PLAIN)
def test_a_known_graph_is_not_verified_again(name: str, monkeypatch: pytest.MonkeyPatch):
    """Two backwards saved, on the models that people have."""
    case = cases.case(name)
    model, x, y = case.make()
    asked, verify = [], recorder.verify
    monkeypatch.setattr(recorder, "verify", lambda *args: asked.append(1) or verify(*args))

    def call(**options: str) -> None:
        lw.fisher(model, (x, y), case.likelihood, structure="diag", **case.options, **options)

    call()
    first = len(asked)
    call()
    assert len(asked) == first >= 1
    call(check="always")  # compares gradients in the backward that it makes anyway: see test_explain
    call(check="never")
    assert len(asked) == first
