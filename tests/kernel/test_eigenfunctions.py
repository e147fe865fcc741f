"""Eigenfunctions and kernel PCA against the features themselves."""

import pytest
import torch
from kernel_tools import align, close, features, gaussian, mlp, refused
from torch import Tensor

import layerwise as lw
from layerwise.foundations.errors import InputError, NumericalError, UnsupportedError

N, M, P, SHOWN = 8, 5, 2, 4
MODEL, X, NEW = mlp(4, 6, P), gaussian(N, 4), gaussian(M, 4, seed=1)


@pytest.fixture(scope="module")
def J() -> Tensor:
    return features(MODEL, X)


@pytest.fixture(scope="module")
def J_new() -> Tensor:
    return features(MODEL, NEW)


def test_at_the_examples_they_are_eigenvectors(J: Tensor):
    values, vectors = torch.linalg.eigh(J @ J.mT)
    found = lw.ntk(MODEL, X).eigenfunctions(SHOWN)
    close(found.eigenvalues(), values.flip(0)[:SHOWN])
    expected = vectors.flip(1)[:, :SHOWN].reshape(N, P, SHOWN)
    close(align(found.at_examples(), expected), expected, 1e-9)
    close(found(X), found.at_examples(), 1e-9)
    U = found.at_examples().flatten(0, 1)
    close(U.mT @ U, torch.eye(SHOWN))


def test_at_new_points_they_are_the_nystrom_extension(J: Tensor, J_new: Tensor):
    found = lw.ntk(MODEL, X).eigenfunctions(SHOWN)
    U = found.at_examples().flatten(0, 1)
    close(found(NEW), (J_new @ J.mT @ U / found.eigenvalues()).view(M, P, SHOWN))


def test_they_are_projections_on_principal_directions(J: Tensor, J_new: Tensor):
    """u_j(x) = ⟨v_j, Φ(x)⟩ / √λ_j with v_j the eigenvectors of JᵀJ."""
    _, S, Vt = torch.linalg.svd(J, full_matrices=False)
    expected = (J_new @ Vt[:SHOWN].mT / S[:SHOWN]).view(M, P, SHOWN)
    found = lw.ntk(MODEL, X).eigenfunctions(SHOWN)(NEW)
    close(align(found, expected), expected, 1e-9)


def test_the_population_is_estimated_by_means_over_examples():
    """λ/N, and functions orthonormal for the mean over examples."""
    found = lw.ntk(MODEL, X).eigenfunctions(SHOWN)
    close(found.eigenvalues(population=True), found.eigenvalues() / N)
    U = found.at_examples(population=True).flatten(0, 1)
    close(U.mT @ U / N, torch.eye(SHOWN))
    close(found(NEW, population=True), N**0.5 * found(NEW))


def test_functions_of_one_number():
    found = lw.ntk(MODEL, X, outputs="sum").eigenfunctions(3)
    assert found.at_examples().shape == (N, 3)
    assert found(NEW).shape == (M, 3)


def test_more_than_there_are_is_refused_with_how_many_there_are():
    twice = torch.cat([X, X])
    with refused(NumericalError, "k=20", "vanish after 16", "Pass k=16"):
        lw.ntk(MODEL, twice).eigenfunctions(20)


# --- kernel PCA ---------------------------------------------------------------------------------------------


def _means(J: Tensor, centering: str) -> Tensor:
    """The mean feature for each function, [P, d]."""
    if centering == "none":
        return torch.zeros(P, J.shape[1], dtype=J.dtype)
    return J.unflatten(0, (-1, P)).mean(0) if centering == "per-output" else J.mean(0).expand(P, -1)


@pytest.mark.parametrize("centering", ["per-output", "global", "none"])
def test_kernel_pca_is_pca_of_the_features(J: Tensor, J_new: Tensor, centering: str):
    mean = _means(J, centering)
    U, S, Vt = torch.linalg.svd(J - mean.repeat(N, 1), full_matrices=False)
    pca = lw.ntk(MODEL, X).kernel_pca(SHOWN, centering)
    expected = (U * S)[:, :SHOWN].reshape(N, P, SHOWN)
    close(align(pca.coordinates, expected), expected, 1e-9)
    close(pca.eigenvalues, S[:SHOWN] ** 2)
    close(pca.explained, S[:SHOWN] ** 2 / S.square().sum())
    signs = torch.sign((pca.coordinates * expected).sum((0, 1)))
    projected = ((J_new - mean.repeat(M, 1)) @ Vt[:SHOWN].mT).view(M, P, SHOWN)
    close(pca.project(NEW) * signs, projected, 1e-9)
    close(pca.project(X), pca.coordinates, 1e-9)


def test_kernel_pca_of_cosines():
    """The normalized, centred kernel of one function, as in card G3."""
    margin = lambda f: f[:, 1] - f[:, 0]  # noqa: E731
    rows = lw.jacobian(MODEL, X, margin).to_dense()
    rows = rows / rows.norm(dim=1, keepdim=True)
    mean = rows.mean(0)
    U, S, Vt = torch.linalg.svd(rows - mean, full_matrices=False)
    pca = lw.ntk(MODEL, X, outputs=margin).normalized().kernel_pca(2)
    expected = (U * S)[:, :2]
    assert pca.coordinates.shape == (N, 2)
    close(align(pca.coordinates, expected), expected, 1e-9)
    close(pca.project(X), pca.coordinates, 1e-9)
    new = lw.jacobian(MODEL, NEW, margin).to_dense()
    new = (new / new.norm(dim=1, keepdim=True) - mean) @ Vt[:2].mT
    close(align(pca.project(NEW), new), new, 1e-9)


def test_distances_between_coordinates_are_distances_between_features(J: Tensor):
    pca = lw.ntk(MODEL, X).kernel_pca(N * P - P)
    coordinates = pca.coordinates.flatten(0, 1)
    centred = J - _means(J, "per-output").repeat(N, 1)
    close(torch.cdist(coordinates, coordinates), torch.cdist(centred, centred), 1e-7)
    close(pca.explained.sum(), 1.0)


def test_what_has_no_components():
    with refused(InputError, "principal components", "between two sets"):
        lw.ntk(MODEL, X, NEW).kernel_pca(2)
    with refused(InputError, "centering='both'"):
        lw.ntk(MODEL, X).kernel_pca(2, "both")
    with refused(NumericalError, "vanish after 14"):
        lw.ntk(MODEL, X).kernel_pca(N * P)  # centring takes P directions away
    with refused(InputError, "k=0"):
        lw.ntk(MODEL, X).kernel_pca(0)
    layer = lw.ntk(MODEL, X).per_layer()["0"]
    with refused(UnsupportedError, "given as a matrix", "lw.ntk"):
        layer.kernel_pca(2).project(NEW)
