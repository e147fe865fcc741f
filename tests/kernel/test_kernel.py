"""What every kernel can do: eigenvalues by either way, scipy, shapes, errors that say what to do."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from kernel_tools import align, close, convnet, gaussian, mlp, refused
from scipy.sparse.linalg import eigsh

import layerwise as lw
from layerwise.foundations.errors import InputError, NameLookupError, UnsupportedError
from layerwise.kernel.kernel import MatrixKernel
from layerwise.testing import oracles

N, P = 8, 3
MODEL, X, NEW = mlp(4, 5, P), gaussian(N, 4), gaussian(2, 4, seed=1)
EXPECTED = oracles.ntk(MODEL, X)


def _kernel() -> lw.Kernel:
    return lw.ntk(MODEL, X)


def test_eigenvalues_and_eigenvectors():
    values, vectors = _kernel().eigh()
    close(values, torch.linalg.eigvalsh(EXPECTED))
    close(vectors * values @ vectors.mT, EXPECTED)
    top, some = _kernel().eigh(3)
    close(top, values[-3:])
    close(align(some, vectors[:, -3:]), vectors[:, -3:], 1e-9)
    close(_kernel().eigenvalues(2), values[-2:])


def test_a_few_eigenvalues_of_a_large_kernel_come_from_products(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("layerwise.kernel.kernel.DENSE_EIGH", 4)
    K = _kernel()
    values, vectors = K.eigh(3)
    assert not K.has_matrix()
    close(values, torch.linalg.eigvalsh(EXPECTED)[-3:], 1e-8)
    close(EXPECTED @ vectors, vectors * values, 1e-6)
    again, _ = _kernel().eigh(3)
    assert torch.equal(values, again)
    K.eigh()
    assert K.has_matrix()


def test_scipy_takes_it_as_an_operator():
    K = _kernel()
    operator = K.to_scipy()
    u = gaussian(N * P, 2).numpy()
    close(operator @ u, EXPECTED.numpy() @ u)
    close(operator @ u[:, 0], EXPECTED.numpy() @ u[:, 0])
    close(operator.T @ u[:, 0], EXPECTED.numpy() @ u[:, 0])
    values = eigsh(operator, 2, return_eigenvectors=False, v0=np.ones(N * P))
    close(np.sort(values), torch.linalg.eigvalsh(EXPECTED)[-2:], 1e-8)
    assert not K.has_matrix()
    cross = lw.ntk(MODEL, NEW, X).to_scipy()
    assert cross.shape == (6, 24)
    close(cross @ u, oracles.ntk(MODEL, NEW, X).numpy() @ u)


def test_products_in_every_form():
    K, u = _kernel(), gaussian(N, P)
    close(K @ u, (EXPECTED @ u.flatten()).view(N, P))
    close(K @ u.flatten(), EXPECTED @ u.flatten())
    close(K @ u.reshape(-1, 1), EXPECTED @ u.reshape(-1, 1))
    assert (K @ u.float()).dtype == torch.float32


def test_a_matrix_is_formed_once():
    K = _kernel()
    assert K.matrix() is K.matrix()
    assert K.centered().matrix() is not K.matrix()
    centred = K.centered()
    assert centred.matrix() is centred.matrix()


def test_a_kernel_from_a_matrix():
    K = MatrixKernel(EXPECTED, (P,))
    assert (K.n, K.m, K.functions, K.shape) == (N, N, P, (24, 24))
    close(K @ gaussian(N, P), _kernel() @ gaussian(N, P))
    close(K.centered().matrix(), _kernel().centered().matrix())
    with refused(InputError, "(24, 24)", "a multiple of 5"):
        MatrixKernel(EXPECTED, (5,))
    with refused(InputError, "(24, 12)", "as many rows as columns"):
        MatrixKernel(EXPECTED[:, :12], (P,))


def test_representations_name_sizes():
    assert "24 × 24" in repr(_kernel())
    assert "6 × 24" in repr(lw.ntk(MODEL, NEW, X))
    assert "24 × 24" in repr(_kernel().centered())
    assert "formed in 36 tiles" in repr(lw.ntk(convnet(), gaussian(N, 2, 6, 6), memory=40_000))


# --- errors -------------------------------------------------------------------------------------------------

SQUARE: dict[str, Callable[[lw.Kernel], object]] = {
    "the diagonal": lambda K: K.diag(),
    "eigenvalues": lambda K: K.eigh(),
    "principal components": lambda K: K.kernel_pca(1),
    "solve()": lambda K: K.solve(gaussian(N, P), 1.0),
}


@pytest.mark.parametrize("what", SQUARE)
def test_what_only_one_set_has(what: str):
    cross = lw.ntk(MODEL, X, NEW)
    for K in (cross, cross.centered(), cross.normalized(), cross.per_layer()["0"]):
        with refused(InputError, what, "between two sets (8 and 2 examples)", "Leave out x2="):
            SQUARE[what](K)


@pytest.mark.parametrize("shape", [(), (N,), (N, P + 1), (N + 1, P), (N * P + 1,), (N * P + 1, 2), (N, P, 1), (0,)])
def test_vectors_of_another_shape(shape: tuple[int, ...]):
    u = torch.ones(shape)
    for K in (_kernel(), _kernel().centered(), _kernel().normalized(), MatrixKernel(EXPECTED, (P,))):
        with refused(InputError, f"a tensor of shape {shape}", "(8, 3), (24,) or (24, columns)", "example-major"):
            K @ u
    with refused(InputError, f"a tensor of shape {shape}", "(8, 3), (24,) or (24, columns)"):
        lw.jacobian(MODEL, X).T @ u


@pytest.mark.usefixtures("untyped")
def test_vectors_of_another_type():
    for u in ([1.0], None, np.ones(24), "u"):
        with refused(InputError, f"a {type(u).__name__}", "(24,)"):
            _kernel() @ u
        with refused(InputError, f"a {type(u).__name__}", "(24,)"):
            lw.jacobian(MODEL, X).T @ u


@pytest.mark.parametrize("k", [0, -1, 25])
def test_numbers_of_eigenvalues(k: int):
    for ask in (_kernel().eigh, _kernel().eigenvalues, _kernel().eigenfunctions, _kernel().kernel_pca):
        with refused(InputError, f"k={k}", "from 1 to 24"):
            ask(k)


def test_what_a_derived_kernel_does_not_know():
    for K in (_kernel().centered(), _kernel().normalized(), MatrixKernel(EXPECTED)):
        with refused(UnsupportedError, "per_layer()", "lw.ntk"):
            K.per_layer()
        with refused(UnsupportedError, "plan()", "lw.ntk"):
            K.plan()
    with refused(UnsupportedError, "new points", "lw.ntk"):
        MatrixKernel(EXPECTED).cross(NEW)
    with refused(InputError, "centering='row'"):
        _kernel().centered("row")


def test_layers_and_vectors_of_a_jacobian():
    J = lw.jacobian(MODEL, X)
    with refused(NameLookupError, "'7'", "Available: 0, 2"):
        J.layer("7")
    with refused(InputError, "layer() of one layer's"):
        J.layer("0").layer("0")
    with refused(InputError, "(7,)", "(43,) or (43, columns)"):
        J @ torch.ones(7)
    with refused(InputError, "2.bias"):
        J @ {k: v for k, v in lw.ParamVector.randn(MODEL, 0).dict().items() if k != "2.bias"}
    with refused(NameLookupError, "'5'", "Available: 0, 2"):
        lw.ntk(MODEL, X, select="5")


@pytest.mark.parametrize("memory", [0, -1, float("inf"), float("nan")])
def test_memory_that_is_none(memory: float):
    for make in (lw.ntk, lw.jacobian):
        with refused(InputError, f"memory={memory}", "positive"):
            make(MODEL, X, memory=memory)


def test_a_model_that_has_changed_since():
    """Nothing is computed before it is asked for."""
    model = mlp(4, 5, P)
    K, formed, J = lw.ntk(model, X), lw.ntk(model, X), lw.jacobian(model, X)
    formed.matrix()
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    for ask in (K.matrix, K.diag, K.per_layer, lambda: K @ gaussian(24), lambda: J.T @ gaussian(24), J.to_dense):
        with refused(InputError, "'0.weight' has been changed since", "build it again"):
            ask()
    close(formed.matrix(), EXPECTED)
