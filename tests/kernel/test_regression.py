"""Kernel regression: three ways to one solution, and the linear model that it stands for."""

import pytest
import torch
from kernel_tools import close, convnet, features, gaussian, mlp, refused
from torch import Tensor

import layerwise as lw
from layerwise.foundations.errors import InputError, NumericalError, UnsupportedError

N, M, P, RIDGE = 9, 4, 3, 0.3
MODEL, X, NEW, Y = mlp(4, 5, P), gaussian(N, 4), gaussian(M, 4, seed=1), gaussian(N, P, seed=2)


@pytest.fixture(scope="module")
def J() -> Tensor:
    return features(MODEL, X)


def _inverse(J: Tensor, ridge: float = RIDGE) -> Tensor:
    return torch.linalg.inv(J @ J.mT + ridge * torch.eye(len(J), dtype=J.dtype))


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("method", ["auto", "dense", "cg"])
def test_every_method_gives_the_solution(J: Tensor, method: str):
    expected = (_inverse(J) @ Y.flatten()).view(N, P)
    K = lw.ntk(MODEL, X)
    close(K.solve(Y, RIDGE, method=method), expected, 1e-9)
    close(K.solve(Y.flatten(), RIDGE, method=method), expected.flatten(), 1e-9)
    columns = gaussian(N * P, 4)
    close(K.solve(columns, RIDGE, method=method), _inverse(J) @ columns, 1e-9)
    assert K.has_matrix() == (method != "cg")


@pytest.mark.usefixtures("untyped")
def test_conjugate_gradients_need_no_matrix_that_fits(J: Tensor):
    K = lw.ntk(MODEL, X, memory=5_000)
    assert not K.fits()
    alpha = K.solve(Y, RIDGE, method="cg")
    close(alpha.flatten(), _inverse(J) @ Y.flatten(), 1e-9)
    close(K.predict(NEW, alpha).flatten(), features(MODEL, NEW) @ J.mT @ alpha.flatten())


def test_large_kernels_are_solved_by_products(monkeypatch: pytest.MonkeyPatch, J: Tensor):
    monkeypatch.setattr("layerwise.kernel.kernel.DENSE_EIGH", 10)
    K = lw.ntk(MODEL, X)
    close(K.solve(Y, RIDGE).flatten(), _inverse(J) @ Y.flatten(), 1e-9)
    assert not K.has_matrix()


def test_predictions_are_those_of_the_linear_model(J: Tensor):
    """w minimizes ‖y − J w‖² + ridge ‖w‖²: solved in parameter space."""
    K, J_new = lw.ntk(MODEL, X), features(MODEL, NEW)
    alpha = K.solve(Y, RIDGE)
    d = J.shape[1]
    w = torch.linalg.solve(J.mT @ J + RIDGE * torch.eye(d, dtype=J.dtype), J.mT @ Y.flatten())
    close((lw.jacobian(MODEL, X).T @ alpha).flat(), w, 1e-9)
    close(K.predict(NEW, alpha).flatten(), J_new @ w, 1e-9)
    close(K.predict(NEW, alpha).flatten(), K.cross(NEW).matrix() @ alpha.flatten())
    close(K.predict(X, alpha).flatten(), K.matrix() @ alpha.flatten())


def test_predictions_in_every_form():
    K = lw.ntk(MODEL, X)
    alpha = K.solve(Y, RIDGE)
    assert K.predict(NEW, alpha).shape == (M, P)
    close(K.predict(NEW, alpha.flatten()), K.predict(NEW, alpha).flatten())
    close(K.predict(NEW, alpha.view(-1, 1)).squeeze(1), K.predict(NEW, alpha).flatten())
    close(K.predict([NEW[:1], NEW[1:]], alpha), K.predict(NEW, alpha))


def test_without_ridge_the_targets_are_met():
    model, x = convnet(), gaussian(5, 2, 6, 6)  # 15 functions of some 300 parameters
    y = gaussian(5, 3, seed=3)
    K = lw.ntk(model, x)
    close(K.predict(x, K.solve(y, 0.0)), y, 1e-9)


def test_a_linear_model_is_fitted_as_by_least_squares():
    model, x, y = torch.nn.Linear(4, 1).double(), gaussian(N, 4), gaussian(N, 1, seed=4)
    A = torch.cat([x, torch.ones(N, 1, dtype=x.dtype)], 1)
    w = torch.linalg.solve(A.mT @ A + RIDGE * torch.eye(5, dtype=x.dtype), A.mT @ y)
    K = lw.ntk(model, x)
    new = gaussian(M, 4, seed=5)
    close(K.predict(new, K.solve(y, RIDGE)), torch.cat([new, torch.ones(M, 1, dtype=x.dtype)], 1) @ w, 1e-9)


def test_centred_and_normalized_kernels_can_be_solved():
    for K in (lw.ntk(MODEL, X).centered(), lw.ntk(MODEL, X).normalized(), lw.ntk(MODEL, X).per_layer()["0"]):
        ridged = K.matrix() + RIDGE * torch.eye(N * P, dtype=torch.float64)
        close(K.solve(Y, RIDGE).flatten(), torch.linalg.solve(ridged, Y.flatten()), 1e-9)
        close(K.solve(Y, RIDGE, method="cg").flatten(), torch.linalg.solve(ridged, Y.flatten()), 1e-8)


def test_float32_targets_and_kernels():
    model, x = mlp(4, 5, P).float(), X.float()
    K = lw.ntk(model, x)
    expected = _inverse(features(model, x)) @ Y.flatten()
    for method in ("dense", "cg"):
        found = K.solve(Y.float(), RIDGE, method=method)
        assert found.dtype == torch.float32
        close(found.flatten(), expected, 1e-3)


# --- what is refused ----------------------------------------------------------------------------------------


def test_a_singular_kernel_asks_for_ridge():
    K = lw.ntk(MODEL, torch.cat([X, X]))
    with refused(NumericalError, "not positive definite", "ridge >"):
        K.solve(torch.cat([Y, Y]), 0.0)


def test_too_few_iterations_are_said():
    with pytest.warns(UserWarning, match="conjugate gradients stopped after 2"):
        lw.ntk(MODEL, X).solve(Y, 1e-6, method="cg", max_iterations=2)


@pytest.mark.parametrize("ridge", [-1.0, float("nan"), float("inf")])
def test_ridges_that_are_none(ridge: float):
    with refused(InputError, f"ridge={ridge}", "≥ 0"):
        lw.ntk(MODEL, X).solve(Y, ridge)


def test_other_arguments():
    K = lw.ntk(MODEL, X)
    with refused(InputError, "method='chol'", "dense"):
        K.solve(Y, RIDGE, method="chol")
    with refused(InputError, "(9, 2)", "(9, 3), (27,) or (27, columns)"):
        K.solve(Y[:, :2], RIDGE)
    with refused(InputError, "(8, 3)", "(9, 3)"):
        K.predict(NEW, Y[:8])
    with refused(InputError, "solve()", "between two sets"):
        lw.ntk(MODEL, X, NEW).solve(Y, RIDGE)
    with refused(UnsupportedError, "given as a matrix"):
        K.per_layer()["0"].predict(NEW, Y)
