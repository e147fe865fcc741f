"""Centred and normalized kernels: with their matrix, without it, and at new points."""

import pytest
import torch
from kernel_tools import close, features, gaussian, mlp, refused
from torch import Tensor

import layerwise as lw
from layerwise.foundations.errors import UnsupportedError
from layerwise.kernel.kernel import MatrixKernel, center
from layerwise.testing import case

N, M, P = 6, 4, 3
MODEL, X, NEW = mlp(4, 5, P), gaussian(N, 4), gaussian(M, 4, seed=1)
CENTERINGS = ("per-output", "global")


def _mean(J: Tensor, centering: str) -> Tensor:
    """What is subtracted from every row of a Jacobian: [1 or P, d]."""
    return J.mean(0, keepdim=True) if centering == "global" else J.unflatten(0, (-1, P)).mean(0)


def _centred(J: Tensor, centering: str, by: Tensor | None = None) -> Tensor:
    """Features minus the mean of their own set, or of another."""
    mean = _mean(J if by is None else by, centering)
    return J - mean.repeat(len(J) // len(mean), 1)


@pytest.mark.parametrize("centering", CENTERINGS)
def test_centring_a_kernel_centres_its_features(centering: str):
    J = _centred(features(MODEL, X), centering)
    K = lw.ntk(MODEL, X).centered(centering)
    close(K.matrix(), J @ J.mT)
    again = K.centered(centering)
    close(again.matrix(), K.matrix())
    assert float(center(K.matrix(), P, centering).sub(K.matrix()).abs().max()) < 1e-12


@pytest.mark.parametrize("centering", CENTERINGS)
def test_everything_without_the_matrix_equals_everything_with_it(centering: str):
    J = _centred(features(MODEL, X), centering)
    expected, u = J @ J.mT, gaussian(N * P, 2)
    base = lw.ntk(MODEL, X)
    K = base.centered(centering)
    for _ in range(2):  # without the matrix, then with it
        close(K.diag(), expected.diagonal())
        close(K.trace(), expected.trace())
        close(K @ u, expected @ u)
        close(K @ u[:, 0].view(N, P), (expected @ u[:, 0]).view(N, P))
        assert K.has_matrix() == base.has_matrix()
        base.matrix()
    close(K.frobenius(), expected.norm())
    close(K.eigenvalues(), torch.linalg.eigvalsh(expected))


@pytest.mark.parametrize("centering", CENTERINGS)
def test_a_sequence_has_a_mean_for_each_of_its_functions(centering: str):
    model, x, _ = case("sequence_linear").make()
    J = features(model, x)
    mean = J.mean(0, keepdim=True) if centering == "global" else J.unflatten(0, (3, 15)).mean(0).repeat(3, 1)
    K = lw.ntk(model, x).centered(centering)
    close(K.diag(), (J - mean).square().sum(1))
    close(K.matrix(), (J - mean) @ (J - mean).mT)


@pytest.mark.parametrize("centering", CENTERINGS)
def test_two_sets_are_each_centred_by_their_own_mean(centering: str):
    first, second = (_centred(features(MODEL, x), centering) for x in (NEW, X))
    K = lw.ntk(MODEL, NEW, X).centered(centering)
    u = gaussian(N * P, 2)
    close(K @ u, first @ (second.mT @ u))
    close(K.matrix(), first @ second.mT)


@pytest.mark.parametrize("centering", CENTERINGS)
def test_new_points_are_centred_by_the_mean_of_the_examples(centering: str):
    J, J2 = features(MODEL, X), features(MODEL, NEW)
    new = lw.ntk(MODEL, X).centered(centering).cross(NEW)
    close(new.matrix(), _centred(J2, centering, by=J) @ _centred(J, centering).mT)
    own = lw.ntk(MODEL, X).centered(centering)
    close(own.cross(X).matrix(), own.matrix())


def test_no_centring_is_the_kernel_itself():
    K = lw.ntk(MODEL, X)
    assert K.centered("none") is K


# --- normalized ---------------------------------------------------------------------------------------------


def _unit(J: Tensor) -> Tensor:
    return J / J.norm(dim=1, keepdim=True)


def test_normalized_entries_are_cosines():
    J, u = _unit(features(MODEL, X)), gaussian(N * P, 2)
    K = lw.ntk(MODEL, X).normalized()
    close(K @ u, J @ (J.mT @ u))
    close(K.diag(), torch.ones(N * P))
    assert not K.has_matrix()
    close(K.matrix(), J @ J.mT)
    close(K.trace(), float(N * P))


def test_normalized_cross_kernels():
    J, J2, u = _unit(features(MODEL, X)), _unit(features(MODEL, NEW)), gaussian(N * P, 2)
    for K in (lw.ntk(MODEL, NEW, X).normalized(), lw.ntk(MODEL, X).normalized().cross(NEW)):
        close(K @ u, J2 @ (J.mT @ u))
        close(K.matrix(), J2 @ J.mT)
        assert not K.is_square
    turned = lw.ntk(MODEL, X, NEW).normalized()
    close(turned.matrix(), J @ J2.mT)


def test_a_feature_that_is_zero_stays_zero():
    values = torch.diag(torch.tensor([4.0, 0.0, 1.0], dtype=torch.float64))
    K = MatrixKernel(values).normalized()
    close(K.matrix(), torch.diag(torch.tensor([1.0, 0.0, 1.0])))
    close(K.diag(), torch.tensor([1.0, 0.0, 1.0]))


@pytest.mark.parametrize("centering", CENTERINGS)
def test_cosines_then_centred(centering: str):
    """As for the kernel PCA of card G3."""
    J, J2 = _unit(features(MODEL, X)), _unit(features(MODEL, NEW))
    K = lw.ntk(MODEL, X).normalized().centered(centering)
    own = _centred(J, centering)
    close(K.matrix(), own @ own.mT)
    close(K.cross(NEW).matrix(), _centred(J2, centering, by=J) @ own.mT)


@pytest.mark.parametrize("centering", CENTERINGS)
def test_centred_then_cosines(centering: str):
    own = _unit(_centred(features(MODEL, X), centering))
    K = lw.ntk(MODEL, X).centered(centering).normalized()
    close(K.matrix(), own @ own.mT)
    close(K.normalized().matrix(), own @ own.mT)


def test_norms_that_are_not_known_are_asked_for():
    """Two sets, and no longer the features themselves."""
    cross = lw.ntk(MODEL, X, NEW)
    for K in (
        cross.centered().normalized(),
        cross.per_layer()["0"].normalized(),
        lw.ntk(MODEL, X).centered().normalized().cross(NEW),
    ):
        with refused(UnsupportedError, "norms of features", "Normalize before centering"):
            K.matrix()
