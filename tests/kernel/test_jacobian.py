"""`lw.jacobian`: products in both directions, layers, rows, and the identities that bind them."""

import pytest
import torch
from kernel_tools import TYPED, close, convnet, features, gaussian, mlp, name_of, relative
from torch import nn

import layerwise as lw
from layerwise.kernel import jacobian as module
from layerwise.testing import CASES, Case, case, oracles


@pytest.mark.parametrize("c", CASES, ids=name_of)
def test_everything_equals_the_dense_jacobian(c: Case, request: pytest.FixtureRequest):
    if c.name not in TYPED:
        request.getfixturevalue("untyped")
    model, x, _ = c.make()
    dense = features(model, x)
    J = lw.jacobian(model, x)
    rows, d = J.shape
    v, w, u = gaussian(d), gaussian(d, 3, seed=1), gaussian(rows, 3, seed=2)
    errors = {
        "dense": relative(J.to_dense(), dense),
        "push": relative(J @ v, dense @ v),
        "push columns": relative(J @ w, dense @ w),
        "pull": relative(J.T @ u[:, 0], dense.mT @ u[:, 0]),
        "pull columns": relative(J.T @ u, dense.mT @ u),
        "adjoint": relative((J @ v) @ u[:, 1], v @ (J.T @ u[:, 1])),
    }
    assert not {k: e for k, e in errors.items() if not e <= 1e-10}


@pytest.mark.parametrize("c", CASES, ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_layers_add_up_to_the_whole(c: Case):
    model, x, _ = c.make()
    J = lw.jacobian(model, x)
    d = J.shape[1]
    v, u, parts = lw.ParamVector.from_flat(gaussian(d), model), gaussian(J.shape[0]), J.per_layer()
    pushed = sum(part @ _own(part, v) for part in parts.values())
    close(pushed, J @ v)
    assert sum(part.shape[1] for part in parts.values()) == d
    pulled = torch.stack([(part.T @ u).square().sum() for part in parts.values()])
    close(pulled.sum(), (J.T @ u).square().sum())


def _own(part: lw.Jacobian, v: lw.ParamVector) -> dict[str, torch.Tensor]:
    """The part of a vector that belongs to a layer."""
    assert part.parts is not None
    return {name: own.of(v.dict()) for name, own in zip(part.shapes, part.parts, strict=True)}


@pytest.mark.parametrize("name", ["mlp", "attention", "lstm", "tied_weights", "conv_transpose2d"])
@pytest.mark.usefixtures("untyped")
def test_rows_of_one_layer(name: str):
    model, x, _ = case(name).make()
    J, dense = lw.jacobian(model, x), features(model, x)
    for spec in J.recorder.table.layers:
        part = J.layer(spec.name)
        own = part.to_dense()
        assert own.shape == part.shape
        v, u = gaussian(part.shape[1]), gaussian(part.shape[0], seed=1)
        close(part @ v, own @ v)
        close(part.T @ u, own.mT @ u)
    total = sum(part.to_dense() @ part.to_dense().mT for part in J.per_layer().values())
    close(total, dense @ dense.mT)


def test_vectors_in_every_form():
    model, x = mlp(3, 4, 2), gaussian(5, 3)
    J, v, u = lw.jacobian(model, x), lw.ParamVector.randn(model, 0), gaussian(5, 2)
    close(J @ v, (J @ v.flat()).view(5, 2))
    close(J @ v.dict(), J @ v)
    pulled = J.T @ u
    assert isinstance(pulled, lw.ParamVector)
    close(pulled.flat(), J.T @ u.flatten())
    close((J @ v).flatten() @ u.flatten(), v @ pulled)
    assert (J.T.shape, J.T.T is J) == ((26, 10), True)
    assert "10 × 26" in repr(J)
    assert "10 × 26" in repr(J.T)


def test_sequences_keep_the_shape_of_the_output():
    model, x, _ = case("sequence_linear").make()
    J = lw.jacobian(model, x)
    assert (J @ lw.ParamVector.randn(model, 0)).shape == model(x).shape
    assert J.out_shape == (5, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_dtype_of_the_vector(dtype: torch.dtype):
    model, x = mlp(3, 4, 2), gaussian(5, 3)
    J = lw.jacobian(model, x)
    assert (J @ gaussian(26).to(dtype)).dtype == dtype
    assert (J.T @ gaussian(10).to(dtype)).dtype == dtype
    assert J.dtype == torch.float64


def test_rows_come_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """Two examples, and two of the three functions, at a time."""
    model, x = convnet(), gaussian(5, 2, 6, 6)
    J, dense = lw.jacobian(model, x), features(model, x)
    monkeypatch.setattr(module, "COTANGENT_BYTES", 2 * J.functions * J.shape[1] * 8)
    monkeypatch.setattr(lw.Jacobian, "cotangents_at_once", lambda self, size: 2)
    blocks = list(J.blocks())
    assert [len(rows) for rows in blocks] == [6, 6, 3]
    close(torch.cat(blocks), dense)


def test_many_columns_are_pulled_back_in_parts():
    model, x = mlp(3, 4, 2), gaussian(5, 3)
    J, dense, u = lw.jacobian(model, x, memory=8 * 26 * 4 * 3), features(model, x), gaussian(10, 7)
    close(J.T @ u, dense.mT @ u)


def test_small_memory_cuts_the_examples():
    model, x = convnet(), gaussian(7, 2, 6, 6)
    J, dense = lw.jacobian(model, x, memory=40_000), features(model, x)
    assert len(J.examples.blocks) > 1
    close(J @ gaussian(J.shape[1]), dense @ gaussian(J.shape[1]))
    close(J.T @ gaussian(21), dense.mT @ gaussian(21))
    assert J.examples.blocks[0].start == 0
    assert J.examples.blocks[-1].stop == 7


def test_only_trainable_parameters_take_part():
    model, x, _ = case("frozen_layer").make()
    J = lw.jacobian(model, x)
    assert J.shape[1] == oracles.flat_parameters(model).numel()
    assert not any(name.startswith("0.") for name in J.shapes)


def test_a_model_that_is_linear_in_its_parameters():
    """J v is the whole output for v = θ."""
    model, x = nn.Linear(3, 2).double(), gaussian(5, 3)
    v = lw.ParamVector({k: p.detach() for k, p in model.named_parameters()})
    close(lw.jacobian(model, x) @ v, model(x))
