"""The tangent kernel: every order of contraction, on every case, equals autodiff alone."""

from typing import Any

import pytest
import torch
from kernel_tools import TYPED, close, convnet, count, gaussian, mlp, name_of, relative, some
from torch import Tensor, nn

import layerwise as lw
from layerwise.testing import CASES, Case, case, oracles

ALGORITHMS = ("auto", "gram", "chain", "product", "rows")
TOLERANCE = 1e-10


def in_turn(first: int) -> list[Any]:
    """All cases, of which `make test` has every second one, and one for each kind of rule."""
    kept = {*(c.name for c in CASES[first::2]), *TYPED}
    return [pytest.param(c, marks=() if c.name in kept else pytest.mark.slow) for c in CASES]


def _bad(errors: dict[Any, float]) -> dict[Any, str]:
    return {k: f"{e:.1e}" for k, e in errors.items() if not e <= TOLERANCE}


@pytest.mark.parametrize("c", CASES, ids=name_of)
def test_every_order_equals_the_oracle(c: Case, request: pytest.FixtureRequest):
    if c.name not in TYPED:
        request.getfixturevalue("untyped")
    model, x, _ = c.make()
    expected, errors = oracles.ntk(model, x), {}
    for algorithm in ALGORITHMS:
        K = lw.ntk(model, x, algorithm=algorithm)
        errors[algorithm] = relative(K.matrix(), expected)
        assert torch.equal(K.matrix(), K.matrix().mT)
        if algorithm != "auto":
            assert {layer.order for layer in K.plan().layers if not layer.sizes.bare} <= {algorithm}
    assert not _bad(errors)


@pytest.mark.parametrize("c", in_turn(0), ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_cross_kernels_are_blocks_of_square_ones(c: Case):
    """Split into one example and the others, and the other way round: also where a model is met with one example."""
    model, x, _ = c.make()
    whole, n = oracles.ntk(model, x), count(x)
    P = len(whole) // n
    first, others = some(x, 0, 1), some(x, 1, n)
    errors = {"turned": relative(lw.ntk(model, others, first).matrix(), whole[P:, :P])}
    for algorithm in ALGORITHMS if c.name in TYPED else ("auto",):
        errors[algorithm] = relative(lw.ntk(model, first, others, algorithm=algorithm).matrix(), whole[:P, P:])
    assert not _bad(errors)


@pytest.mark.parametrize("name", ["mlp", "conv2d_grouped", "embedding", "lstm"])
def test_cross_kernels_with_annotations_checked(name: str):
    model, x, _ = case(name).make()
    first, others = some(x, 0, 1), some(x, 1, count(x))
    close(lw.ntk(model, first, others).matrix(), oracles.ntk(model, first, others))


@pytest.mark.parametrize("c", CASES, ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_layers_add_up(c: Case):
    model, x, _ = c.make()
    expected, J = oracles.ntk(model, x), oracles.jacobian(model, x).flatten(0, -2)
    K = lw.ntk(model, x)
    parts = K.per_layer()
    errors: dict[Any, float] = {"sum": relative(sum(part.matrix() for part in parts.values()), expected)}
    for spec in K.first.recorder.table.layers:
        own = J[:, _columns(model, spec)]
        errors[spec.name] = relative(parts[spec.name].matrix(), own @ own.mT, float(expected.norm()))
    assert not _bad(errors)


def _columns(model: nn.Module, spec: Any) -> Tensor:
    """Where a layer's numbers are in a flat vector."""
    slices, found = oracles.parameter_slices(model), []
    for part in spec.form.parts:
        where = slices[part.name]
        places = torch.arange(where.start, where.stop).view(part.shape)
        found.append((places if part.rows is None else places[slice(*part.rows)]).flatten())
    return torch.cat(found)


@pytest.mark.parametrize("c", in_turn(1), ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_what_needs_no_matrix_equals_what_the_matrix_gives(c: Case):
    model, x, _ = c.make()
    expected = oracles.ntk(model, x)
    K = lw.ntk(model, x)
    U = gaussian(len(expected), 2)
    shaped = U[:, 0].view(K.n, *K.out_shape)
    errors = {
        "diag": relative(K.diag(), expected.diagonal()),
        "trace": relative(K.trace(), expected.trace()),
        "flat": relative(K @ U[:, 0], expected @ U[:, 0]),
        "columns": relative(K @ U, expected @ U),
        "shaped": relative(K @ shaped, (expected @ U[:, 0]).view_as(shaped)),
    }
    assert not K.has_matrix()
    K.matrix()
    assert K.has_matrix()
    errors |= {
        "diag, formed": relative(K.diag(), expected.diagonal()),
        "columns, formed": relative(K @ U, expected @ U),
        "shaped, formed": relative(K @ shaped, (expected @ U[:, 0]).view_as(shaped)),
        "norm": relative(K.frobenius(), expected.norm()),
    }
    assert not _bad(errors)


@pytest.mark.parametrize("name", ["mlp", "conv2d", "language_model", "attention_padded", "lstm", "squeezed_output"])
def test_products_with_a_cross_kernel_need_no_matrix(name: str):
    model, x, _ = case(name).make()
    n = count(x)
    first, second = some(x, 0, 1), some(x, 1, n)
    K, expected = lw.ntk(model, first, second), oracles.ntk(model, first, second)
    U = gaussian(expected.shape[1], 2)
    close(K @ U, expected @ U)
    shaped = K @ U[:, 0].view(n - 1, *K.out_shape)
    assert shaped.shape == (1, *K.out_shape)
    close(shaped.flatten(), expected @ U[:, 0])
    assert not K.has_matrix()


class TimeFirst(nn.Module):
    """[T, N, 3] to [T, N, 2]: examples are the second axis of inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh().cumsum(0))


def test_examples_on_the_second_axis():
    model, x = TimeFirst().double(), gaussian(5, 4, 3)
    J = oracles.jacobian(model, x).transpose(0, 1).flatten(0, 2)
    K = lw.ntk(model, x, example_axis=1)
    close(K.matrix(), J @ J.mT)
    close(K.diag(), (J @ J.mT).diagonal())
    close(lw.ntk(model, x[:, :1], x[:, 1:], example_axis=1).matrix(), (J @ J.mT)[:10, 10:])
    close(lw.jacobian(model, x, example_axis=1).to_dense(), J)


def test_sets_of_different_sequence_lengths():
    model, long, short = mlp(4, 5, 3), gaussian(3, 5, 4), gaussian(2, 2, 4, seed=1)
    total = lambda f: f.sum(1)  # noqa: E731
    J, J2 = (oracles.jacobian(model, x).sum(1).flatten(0, 1) for x in (long, short))
    for algorithm in ALGORITHMS:
        close(lw.ntk(model, long, short, outputs=total, algorithm=algorithm).matrix(), J @ J2.mT)


def test_an_order_for_each_pattern_of_names():
    model, x = convnet(), gaussian(4, 2, 6, 6)
    K = lw.ntk(model, x, algorithm={"0": "chain", "[2-9]": "product"})
    assert [layer.order for layer in K.plan().layers] == ["chain", "product", "product"]
    close(K.matrix(), oracles.ntk(model, x))
    free = lw.ntk(model, x, algorithm={"0": "gram"}).plan()
    assert free.by_name["0"].order == "gram"


def test_selected_layers_alone():
    model, x = mlp(3, 4, 2), gaussian(5, 3)
    K, parts = lw.ntk(model, x, select="2"), lw.ntk(model, x).per_layer()
    close(K.matrix(), parts["2"].matrix())
    close(lw.ntk(model, x, x[:2], select="2").matrix(), parts["2"].matrix()[:, :4])
    close(K @ gaussian(10), parts["2"].matrix() @ gaussian(10))


def test_layers_of_a_cross_kernel_add_up():
    model, x = convnet(), gaussian(5, 2, 6, 6)
    parts = lw.ntk(model, x[:2], x[2:]).per_layer()
    assert list(parts) == ["0", "2", "5"]
    assert not any(K.is_square for K in parts.values())
    close(sum(K.matrix() for K in parts.values()), oracles.ntk(model, x[:2], x[2:]))


def test_one_example():
    model, x = mlp(3, 4, 2), gaussian(1, 3)
    K = lw.ntk(model, x)
    close(K.matrix(), oracles.ntk(model, x))
    close(K.diag(), oracles.ntk(model, x).diagonal())
    assert K.shape == (2, 2)


def test_cross_of_a_kernel_takes_new_points_against_its_second_set():
    model, x = mlp(3, 4, 2), gaussian(6, 3)
    K = lw.ntk(model, x[:2], x[2:4])
    new = K.cross(x[4:])
    close(new.matrix(), oracles.ntk(model, x[4:], x[2:4]))
    close(lw.ntk(model, x[:2]).cross(x[2:]).matrix(), oracles.ntk(model, x[2:], x[:2]))
    assert new.shape == (4, 4)
    assert not new.is_square
