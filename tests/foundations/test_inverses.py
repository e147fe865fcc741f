"""Inverses by products against LAPACK, their flags, and Newton's iteration near and far from its goal."""

import pytest
import torch

from layerwise.foundations.errors import InputError
from layerwise.foundations.linalg.inverses import product_inverse, refined_inverse, triangular_inverse


def generator(seed):
    return torch.Generator().manual_seed(seed)


def definite(n, condition, seed=0, batch=(), dtype=torch.float64):
    """Random basis, log-spaced eigenvalues from 1 down to 1/condition."""
    Q = torch.linalg.qr(torch.randn(*batch, n, n, generator=generator(seed), dtype=torch.float64))[0]
    values = torch.logspace(0, -torch.log10(torch.tensor(float(condition))), n, dtype=torch.float64)
    return ((Q * values) @ Q.mT).to(dtype)


def norm(A):
    return torch.linalg.matrix_norm(A, ord=2)


@pytest.mark.parametrize("n", [1, 2, 5, 63, 64, 65, 130, 200, 257])
@pytest.mark.parametrize("leaf", [1, 8, 64])
def test_triangular_inverse_equals_substitution(n, leaf):
    L = torch.linalg.cholesky(definite(n, 10, seed=n, batch=(2, 3)))
    expected = torch.linalg.solve_triangular(L, torch.eye(n, dtype=L.dtype).expand_as(L), upper=False)
    found = triangular_inverse(L, leaf)
    assert torch.allclose(found, expected, atol=1e-12)
    assert torch.equal(found, found.tril())


def test_upper_triangle_is_not_read():
    L = torch.linalg.cholesky(definite(130, 10))
    dirty = L + torch.randn(130, 130, generator=generator(1), dtype=L.dtype).triu(1)
    assert torch.allclose(triangular_inverse(dirty), triangular_inverse(L))


@pytest.mark.parametrize("n", [3, 100, 300])
def test_product_inverse(n):
    M = definite(n, 1e4, batch=(4,))
    X, good = product_inverse(M)
    assert good.all()
    assert (norm(X @ M - torch.eye(n, dtype=M.dtype)) < 1e-9).all()
    assert torch.allclose(X, X.mT)


def test_float32_is_as_good_as_the_condition_allows():
    M = definite(300, 1e4)
    X, good = product_inverse(M.float())
    assert good
    assert norm(X.double() @ M - torch.eye(300)) < 1e4 * 300 * torch.finfo(torch.float32).eps


def test_what_is_not_definite_is_flagged_alone():
    M = definite(70, 10, batch=(3,))
    M[1] -= 0.5 * torch.eye(70)
    M[2, 0, 0] = torch.nan
    assert product_inverse(M)[1].tolist() == [True, False, False]


@pytest.mark.parametrize("condition", [1e1, 1e4])
def test_newton_follows_a_matrix_that_drifts(condition):
    """As factors do under a running mean: two steps bring the last inverse near the new one."""
    M, target = definite(60, condition, batch=(2,)), definite(60, condition, seed=3, batch=(2,))
    shift = 1e-2 * torch.eye(60, dtype=M.dtype)
    X = torch.linalg.inv(M + shift)
    for _ in range(5):
        M = 0.998 * M + 0.002 * target
        before = refined_inverse(M + shift, X, steps=0)[1]
        X, distance = refined_inverse(M + shift, X, steps=2)
        assert (distance < 0.3 * before).all()
    assert (norm(X - torch.linalg.inv(M + shift)) < 1e-2 * norm(X)).all()


def test_newton_squares_its_distance():
    M = definite(50, 1e3)
    distances = [refined_inverse(M, 0.9 * torch.linalg.inv(M), steps)[1] for steps in range(4)]
    assert [float(d) / 50**0.5 for d in distances] == pytest.approx([0.1, 1e-2, 1e-4, 1e-8], rel=1e-3)


def test_newton_says_when_it_diverges():
    """A guess for another matrix: the distance is large or infinite, never small."""
    M, other = definite(40, 1e4), definite(40, 1e4, seed=7)
    for steps in (1, 8, 30):
        assert refined_inverse(M, torch.linalg.inv(other), steps)[1] > 1


def test_distance_bounds_the_error_of_what_it_is_applied_to():
    M = definite(50, 1e3)
    X, distance = refined_inverse(M, torch.linalg.inv(M) * 1.05, steps=1)
    v = torch.randn(50, 8, generator=generator(2), dtype=M.dtype)
    truth = torch.linalg.solve(M, v)
    assert ((X @ v - truth).norm(dim=0) <= distance * truth.norm(dim=0) * (1 + 1e-9)).all()


def test_steps_are_checked():
    with pytest.raises(InputError, match="steps=-1"):
        refined_inverse(torch.eye(2), torch.eye(2), -1)
