"""Inputs of every kind, random forwards, and a model that is left as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_tools import close, convnet, features, gaussian, mlp, refused, relative, unchanged
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import layerwise as lw
from layerwise.foundations.errors import InputError, InteractionError, LayerwiseError
from layerwise.kernel.ntk import squared_norms
from layerwise.testing import case, oracles

N = 7
MODEL, X = mlp(4, 5, 3), gaussian(N, 4)


def _batches() -> dict[str, Any]:
    labels = torch.arange(N)
    return {
        "list": [X[:3], X[3:4], X[4:]],
        "list with labels": [(X[:3], labels[:3]), (X[3:], labels[3:])],
        "loader": DataLoader(TensorDataset(X), batch_size=2),
        "loader with labels": DataLoader(TensorDataset(X, labels), batch_size=3),
        "generator": (part for part in X.split(2)),
        "tuple": (X,),
        "mapping": {"input": X},
    }


@pytest.mark.parametrize("kind", list(_batches()))
@pytest.mark.usefixtures("untyped")
def test_batches_equal_one_tensor(kind: str):
    expected, u = oracles.ntk(MODEL, X), gaussian(3 * N)
    K = lw.ntk(MODEL, _batches()[kind])
    assert K.n == N
    close(K @ u, expected @ u)
    close(K.diag(), expected.diagonal())
    close(K.matrix(), expected)
    close(lw.ntk(MODEL, X[:2], _batches()[kind]).matrix(), expected[:6])
    close(lw.ntk(MODEL, _batches()[kind], X[:2]).matrix(), expected[:, :6])
    close(lw.jacobian(MODEL, _batches()[kind]).to_dense(), features(MODEL, X))
    close(lw.ntk(MODEL, X[:2]).cross(_batches()[kind]).matrix(), expected[:, :6])


@pytest.mark.usefixtures("untyped")
def test_batches_are_tiled_too():
    model, x = convnet(), gaussian(N, 2, 6, 6)
    K = lw.ntk(model, [x[:3], x[3:]], memory=60_000)
    assert K.plan().tiles > 1
    close(K.matrix(), oracles.ntk(model, x))


@pytest.mark.parametrize("name", ["attention_padded", "attention_cross", "two_inputs"])
@pytest.mark.usefixtures("untyped")
def test_small_memory_cuts_inputs_of_several_tensors(name: str):
    model, x, _ = case(name).make()
    expected = oracles.ntk(model, x)
    memory = next(m for m in (4_000, 8_000, 16_000, 32_000, 64_000, 128_000) if lw.ntk(model, x, memory=m).fits())
    K = lw.ntk(model, x, memory=memory)
    close(K.matrix(), expected)
    close(K.diag(), expected.diagonal())


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (3, ("int", "a tensor, a tuple")),
        ([], ("without a single batch",)),
        (X[:0], ("0 examples",)),
        (X * float("nan"), ("NaN",)),
        ([X[:2], X[2:] * float("inf")], ("batch 1", "NaN or infinite")),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_inputs_that_are_none(x: Any, words: tuple[str, ...]):
    for make in (lw.ntk, lw.jacobian, lambda model, x: lw.ntk(model, X, x), lambda model, x: lw.ntk(model, X).cross(x)):
        with unchanged(MODEL), refused(InputError, *words):
            make(MODEL, x)


# --- random forwards ----------------------------------------------------------------------------------------


def _dropout(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    wide = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Dropout(0.5), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))
    return wide.double().train()


BUDGETS = [None, 100_000, 205_000]
"""Examples are cut into blocks of several sizes, and into groups."""


@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("algorithm", ["auto", "rows"])
@pytest.mark.usefixtures("untyped")
def test_one_seed_is_one_draw_of_dropout(memory: int | None, algorithm: str):
    """Products, the diagonal, rows and the matrix are all of the same network, in whatever order they are asked for."""
    model, x, u = _dropout(), gaussian(23, 3), gaussian(46)
    K = lw.ntk(model, x, memory=memory, algorithm=algorithm, seed=3)
    product, diagonal = K @ u, K.diag()
    M = K.matrix()
    assert torch.equal(M, M.mT)
    assert float(torch.linalg.eigvalsh(M)[0]) > -1e-10 * float(M.norm())
    close(product, M @ u)
    close(diagonal, M.diagonal())
    close(squared_norms(K.first), M.diagonal())  # and after the matrix
    close(lw.ntk(model, x, memory=memory, algorithm=algorithm, seed=3).matrix(), M)


@pytest.mark.parametrize("memory", [None, 205_000])
@pytest.mark.usefixtures("untyped")
def test_parts_of_a_random_network_are_of_one_draw(memory: int | None):
    model, x = _dropout(), gaussian(23, 3)
    K = lw.ntk(model, x, memory=memory, algorithm="rows", seed=3)
    M = K.matrix()
    close(sum(part.matrix() for part in K.per_layer().values()), M)
    close(K.cross(x).matrix(), M)
    close(K.first.push(K.first.pull(gaussian(1, 46)))[0], M @ gaussian(1, 46)[0])


def test_another_seed_is_another_draw():
    model, x = _dropout(), gaussian(6, 3)
    first, second = (lw.ntk(model, x, seed=seed).matrix() for seed in (1, 2))
    assert relative(first, second) > 0.01
    assert relative(lw.ntk(model.eval(), x, seed=1).matrix(), first) > 0.01
    close(lw.ntk(model, x, seed=1).matrix(), lw.ntk(model, x, seed=2).matrix())


def test_a_jacobian_of_dropout_is_one_matrix():
    model, x = _dropout(), gaussian(6, 3)
    J = lw.jacobian(model, x, seed=1)
    dense, v, u = J.to_dense(), gaussian(J.shape[1]), gaussian(12)
    close(J @ v, dense @ v)
    close(J.T @ u, dense.mT @ u)


# --- the model is left as it was ----------------------------------------------------------------------------


class Everything(nn.Module):
    """Attention, a norm, dropout, a bare parameter, spectral norm in train mode, a frozen bias, a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.drop, self.scale = nn.LayerNorm(4), nn.Dropout(0.2), nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 2)
        self.head.bias.requires_grad_(False)
        self.norm.weight.grad = torch.ones(4)
        self.head.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.cell(x))
        return self.head(self.drop(self.mix(h, h, h)[0] * self.scale))


ASKED: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jacobian": lambda model, x: lw.jacobian(model, x).to_dense(),
    "push": lambda model, x: lw.jacobian(model, x) @ lw.ParamVector.randn(model, 0),
    "pull": lambda model, x: lw.jacobian(model, x).T @ torch.ones(4, 5, 2),
    "matrix": lambda model, x: lw.ntk(model, x).matrix(),
    "cross": lambda model, x: lw.ntk(model, x, x[:2]).matrix(),
    "plan": lambda model, x: str(lw.ntk(model, x).plan()),
    "diag": lambda model, x: lw.ntk(model, x).diag(),
    "layers": lambda model, x: lw.ntk(model, x).per_layer(),
    "solve": lambda model, x: lw.ntk(model, x).solve(torch.ones(4, 5, 2), 1.0, method="cg", tol=0.1),
    "pca": lambda model, x: lw.ntk(model, x).kernel_pca(1).project(x),
}


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.usefixtures("untyped")
def test_the_model_is_left_as_it_was(what: str):
    torch.manual_seed(0)
    model, x = Everything().train(), torch.randn(4, 5, 3)
    with unchanged(model):
        ASKED[what](model, x)
    assert x.grad is None
    assert not x.requires_grad


class Fails(Exception):
    pass


@pytest.mark.parametrize("call", [1, 2, 4, 6])
@pytest.mark.parametrize("what", ["jacobian", "pull", "push", "matrix", "diag"])
@pytest.mark.usefixtures("untyped")
def test_also_after_an_exception(what: str, call: int):
    """The head's hook fails the first, second, … time it is called, if there are so many."""
    torch.manual_seed(0)
    model, x, calls = Everything().train(), torch.randn(4, 5, 3), []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            raise Fails

    model.head.register_forward_hook(fail)
    with unchanged(model):
        try:
            ASKED[what](model, x)
        except Fails:
            assert len(calls) == call
        else:
            assert call > 2  # in a trial with parameters of other shapes, where a model may do anything


def test_examples_that_interact_are_refused():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train(), torch.randn(5, 3)
    for make in (lw.ntk, lw.jacobian):
        with unchanged(model), refused(InteractionError, "BatchNorm1d", "eval"):
            made = make(model, x)
            made.matrix() if isinstance(made, lw.Kernel) else made.to_dense()


@pytest.mark.usefixtures("untyped")
def test_a_model_that_rescales_its_own_weights():
    """`max_norm` writes to the weight in every forward: the model has not changed, though its version has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 3, max_norm=0.5), nn.Flatten(), nn.Linear(6, 2)).double()
    x = torch.tensor([[0, 1], [2, 3], [4, 5], [1, 4]])
    with unchanged(model):
        K = lw.ntk(model, x)
        u = gaussian(8)
        product, M = K @ u, K.matrix()
    close(product, M @ u)


def test_no_error_but_ours_for_a_model_without_parameters():
    with refused(LayerwiseError, "trainable"):
        lw.ntk(nn.Tanh(), X)
