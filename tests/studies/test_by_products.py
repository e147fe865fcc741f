"""Orthonormal rows, distances and solves by products alone, as on a GPU, against QR, SVD and Cholesky."""

import numpy as np
import pytest
import torch

from layerwise.studies.feature_learning import measures
from layerwise.studies.feature_learning.batch import looked_up, random_octets, shifted_out, substituted
from layerwise.studies.feature_learning.by_products import largest_singular_value, orthonormal_by_products
from layerwise.studies.feature_learning.two_layer import orthonormal_rows

EPS = torch.finfo(torch.float64).eps


def conditioned(condition, k=8, dx=30, count=12, seed=0):
    """Matrices with singular values from 1 to 1/condition."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(count, *size, generator=generator, dtype=torch.float64)  # noqa: E731
    U, V = torch.linalg.qr(draw(k, k))[0], torch.linalg.qr(draw(dx, k))[0]
    return (U * torch.logspace(0, -np.log10(condition), k, dtype=torch.float64)) @ V.mT


def off_orthonormal(Q):
    return float((Q @ Q.mT - torch.eye(Q.shape[-2], dtype=Q.dtype)).abs().max())


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6, 1e10, 1e13])
@pytest.mark.parametrize("dx", [8, 30])
def test_rows_are_those_of_qr(condition, dx):
    G = conditioned(condition, dx=dx)
    found = orthonormal_by_products(G)
    assert off_orthonormal(found) < 20 * EPS
    torch.testing.assert_close(found, orthonormal_rows(G), rtol=0, atol=20 * condition * EPS)


def test_rows_err_no_more_than_those_of_qr():
    """Against Gram–Schmidt in extended precision: a condition of 1e6 costs QR six digits as well."""
    G = conditioned(1e6)
    exact = G.numpy().astype(np.longdouble)
    for place in range(len(G)):
        Q = exact[place]
        for i in range(8):
            for _ in range(2):
                Q[i] -= Q[:i].T @ (Q[:i] @ Q[i])
            Q[i] /= np.sqrt(Q[i] @ Q[i])
    error, by_qr = (float(np.abs(f(G).numpy() - exact).max()) for f in (orthonormal_by_products, orthonormal_rows))
    assert 1e-13 < by_qr < 1e-9
    assert error < 5 * by_qr


@pytest.mark.parametrize("scale", [1e-300, 1e-12, 1e200, 1e300])
def test_size_of_rows_does_not_matter(scale):
    G = conditioned(100.0)
    rows = torch.ones(8, 1).double()
    rows[::2] = scale
    torch.testing.assert_close(orthonormal_by_products(rows * G), orthonormal_by_products(G), rtol=0, atol=1e-12)


def test_dependent_rows_are_made_orthonormal_and_leave_the_others_alone():
    G = conditioned(10.0, count=5)
    G[0, 3] = G[0, 1]
    G[1, 2] = 0
    G[2] = 0
    G[3] = conditioned(1e18, count=1)[0]
    found = orthonormal_by_products(G)
    assert off_orthonormal(found) < 1e-7
    torch.testing.assert_close(found[4], orthonormal_rows(G[4]), rtol=0, atol=1e-13)
    torch.testing.assert_close(found[0, :3], orthonormal_rows(G[0, :3]), rtol=0, atol=1e-13)


def test_what_is_not_finite_stays_so_and_harms_nobody():
    G = conditioned(10.0, count=4)
    G[1, 2, 3], G[2, 0, 0] = torch.nan, torch.inf
    found = orthonormal_by_products(G)
    assert found.isfinite().flatten(1).all(1).tolist() == [True, False, False, True]
    torch.testing.assert_close(found[[0, 3]], orthonormal_rows(G[[0, 3]]), rtol=0, atol=1e-13)


def test_single_precision_is_that_of_the_input():
    for condition in (1e2, 1e12):
        found = orthonormal_by_products(conditioned(condition).float())
        assert found.dtype == torch.float32
        assert off_orthonormal(found) < 1e-6
    torch.testing.assert_close(
        orthonormal_by_products(conditioned(1e2).float()), orthonormal_rows(conditioned(1e2).float()), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("gap", [0.0, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 0.5])
def test_largest_singular_value_whatever_the_gap(gap):
    generator = torch.Generator().manual_seed(1)
    s = torch.rand(9, 8, generator=generator, dtype=torch.float64)
    s[:, :2] = torch.tensor([1.0, 1.0 - gap])
    U, V = conditioned(1.0, count=9, seed=2).mT, conditioned(1.0, dx=8, count=9, seed=3)
    A = (U * s.unsqueeze(1)) @ V * torch.logspace(0, -15, 9, dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(largest_singular_value(A), torch.linalg.svdvals(A)[:, 0], rtol=1e-14, atol=0)


def test_largest_singular_value_of_nothing_and_of_no_numbers():
    A = torch.zeros(3, 5, 2).double()
    A[1, 0, 0], A[2, 0, 0] = torch.nan, 2.0
    found = largest_singular_value(A)
    assert found[[0, 2]].tolist() == [0.0, 2.0]
    assert found[1].isnan()


def test_distances_are_those_of_qr_and_svd(monkeypatch):
    """From 1 down to 1e-13, of rows that are far from orthonormal, and of runs that are no numbers."""
    target = conditioned(1.0, count=1)
    outside = torch.linalg.qr(torch.cat([target[0], conditioned(1.0, count=1, seed=5)[0]]).mT)[0].mT[8:]
    tilts = torch.logspace(0, -13, 14, dtype=torch.float64)[:, None, None]
    G = conditioned(1e4, dx=8, count=14, seed=6) @ (target + tilts * outside * torch.linspace(0, 1, 8)[:, None])
    G[3, 1, 1] = torch.nan
    expected = measures.subspace_distance(G, target)
    monkeypatch.setattr(measures, "_sine", measures._sine_by_products)
    found = measures.subspace_distance(G, target)
    assert found[3] == 1.0
    assert float(expected[-1]) < 1e-11
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_two_triangular_solves_are_a_cholesky_solve():
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(4, 1, 9, 6, generator=generator, dtype=torch.float64)
    B = torch.randn(4, 3, 6, 5, generator=generator, dtype=torch.float64)
    L = torch.linalg.cholesky(A.mT @ A)
    torch.testing.assert_close(substituted(B, L), torch.cholesky_solve(B, L.expand(4, 3, 6, 6)), rtol=1e-9, atol=1e-9)


def test_signs_by_bits_are_those_of_the_table():
    octets = torch.arange(256, dtype=torch.uint8).view(2, 128)
    assert torch.equal(shifted_out(octets), looked_up(octets))


@pytest.mark.parametrize("count", [1, 4, 5, 8, 31, 90, 1283])
def test_octets_are_those_of_numpy_and_leave_the_stream_where_it_was(count):
    ours, numpys = (np.random.Generator(np.random.SFC64(7)) for _ in range(2))
    assert random_octets(count, ours).tobytes() == numpys.bytes(count)
    assert (ours.standard_normal(3) == numpys.standard_normal(3)).all()


def test_many_values_alike_in_single_precision():
    """As at the start of a run, where all sines are near 1: their powers must not vanish."""
    A = torch.linalg.qr(torch.randn(900, 450, generator=torch.Generator().manual_seed(0)))[0]
    assert float(largest_singular_value(A)) == pytest.approx(1.0, abs=1e-5)
    assert float(largest_singular_value(1e-15 * A)) == pytest.approx(1e-15, rel=1e-5)
