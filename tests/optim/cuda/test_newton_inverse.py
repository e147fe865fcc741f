"""Inverses by products against LAPACK, their flags, and Newton's iteration near and far from its goal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.foundations.errors import InputError
from layerwise.optim.cuda.linalg.newton_inverse import (
    RESIDUAL_LIMIT,
    accepted,
    inverse_errors,
    probe_columns,
    product_inverse,
    refined_inverse,
    series_inverse,
    triangular_inverse,
)
from layerwise.optim.cuda.linalg.products import HALF_PAIRS, TorchProducts


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


def counting(calls):
    def matmul(A, B):
        calls.append(A.shape)
        return A @ B

    return matmul


def covariance(M, samples, seed):
    """Of draws from a Gaussian whose covariance is M."""
    values, vectors = torch.linalg.eigh(M)
    A = vectors * values.clamp(min=0).sqrt() @ torch.randn(len(M), samples, generator=generator(seed), dtype=M.dtype)
    return A @ A.mT / samples


def damped(M, damping=1e-3):
    return M + damping * M.diagonal().mean() * torch.eye(len(M), dtype=M.dtype)


def applied_error(X, M, v):
    truth = torch.linalg.solve(M, v)
    return float((X @ v - truth).norm() / truth.norm())


def larger_error(X, M, seed=3):
    """On random vectors, and on such as gradients are."""
    Z = torch.randn(len(M), 64, generator=generator(seed), dtype=M.dtype)
    values, vectors = torch.linalg.eigh(M)
    return max(applied_error(X, M, v) for v in (Z, vectors * values.clamp(min=0).sqrt() @ vectors.mT @ Z))


def test_products_are_the_given_ones():
    M, calls = definite(130, 10), []
    product_inverse(M, 64, TorchProducts(counting(calls)))
    assert len(calls) == 2 * 2 + 1  # two levels, and the last
    calls.clear()
    refined_inverse(M, torch.linalg.inv(M), 3, TorchProducts(counting(calls)))
    assert len(calls) == 2 * 3


def test_newton_squares_its_error():
    M = definite(50, 1e3)
    found = [refined_inverse(M, 0.9 * torch.linalg.inv(M), steps)[1:] for steps in range(4)]
    residuals, radii = ([float(x) for x in numbers] for numbers in zip(*found, strict=True))
    assert radii == pytest.approx([0.1, 1e-2, 1e-4, 1e-8], rel=1e-3)
    assert residuals == pytest.approx([x / (1 - x) for x in radii], rel=1e-6)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_a_series_multiplies_as_many_remainders(order):
    """Order 2 is one step of Newton's, order 4 two; in halves rounding is added, which the residual tells."""
    M, last = definite(50, 1e3), definite(50, 1e3, seed=1)
    guess = torch.linalg.inv(0.9 * M + 0.1 * (M @ last @ M + M) / 2)
    X, _, _, before = series_inverse(M, guess, order)
    T = torch.eye(50) - guess @ M
    torch.testing.assert_close(torch.eye(50) - X @ M, torch.linalg.matrix_power(T, order), rtol=0, atol=1e-9)
    torch.testing.assert_close(before, T.norm() / 50**0.5)
    if order != 3:
        torch.testing.assert_close(X, refined_inverse(M, guess, order // 2)[0], rtol=0, atol=1e-9)
    X, residual, _, found = series_inverse(M.float(), guess.float(), order, HALF_PAIRS)
    assert torch.equal(X, X.mT)
    assert residual / 3 < larger_error(X.double(), M) < 3 * residual
    torch.testing.assert_close(found, before.float(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("n", [24, 96])
@pytest.mark.parametrize("samples", [0.25, 1, 10])
def test_residual_predicts_the_error_after_a_drift(n, samples):
    """A running mean of sample covariances, its last inverse refined once."""
    population = definite(n, 1e6, seed=n)
    last = covariance(population, 10 * n, 1)
    M = damped(0.95 * last + 0.05 * covariance(population, int(samples * n), 2))
    X, residual, radius = refined_inverse(M, torch.linalg.inv(damped(last)))
    assert residual / 3 < larger_error(X, M) < 2 * residual
    before = torch.linalg.eigvals(torch.eye(n) - torch.linalg.inv(damped(last)) @ M).abs().max()
    assert float(before) ** 2 / 2 < radius < 2 * float(before) ** 2


def test_residual_counts_what_rounding_left():
    """Half-precision products leave an error that a float32 residual sees."""
    M = definite(64, 1e3, dtype=torch.float32)

    def rough(A, B):
        return A.bfloat16().float() @ B.bfloat16().float()

    for products in (TorchProducts(rough), TorchProducts(roughly=rough), HALF_PAIRS):
        X, residual, _ = refined_inverse(M, torch.linalg.inv(M), 1, products)
        assert residual > (1e-2 if products == TorchProducts(rough) else 0)
        assert residual / 3 < larger_error(X.double(), M.double()) < 3 * residual


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.sampled_from([4, 16, 40]),
    decades=st.floats(0, 6),
    damping=st.sampled_from([1e-6, 1e-4, 1e-2]),
    rank=st.sampled_from([0.25, 0.5, 1.0]),
    weight=st.sampled_from([0.001, 0.05, 0.5]),
    steps=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_what_is_accepted_is_right(seed, n, decades, damping, rank, weight, steps, dtype):
    """A part of the matrix is replaced by something unrelated: a step may diverge, and then the numbers say so."""
    last = definite(n, 10**decades, seed=seed)
    other = torch.randn(n, max(1, int(rank * n)), generator=generator(seed + 1), dtype=torch.float64)
    other = other @ other.mT * last.trace() / other.square().sum()
    M = damped((1 - weight) * last + weight * other, damping)
    X, residual, radius = refined_inverse(M.to(dtype), torch.linalg.inv(damped(last, damping)).to(dtype), steps)
    error = larger_error(X.double(), M, seed + 2)
    assert not accepted(residual, radius) or error < 3 * RESIDUAL_LIMIT
    if error > 0.1:
        assert residual > 1e-2


def test_a_plain_step_diverges_when_a_part_is_unrelated():
    last = definite(40, 1e6)
    M = damped(0.95 * last + 0.05 * last.trace() / 40 * torch.eye(40))
    X, residual, radius = refined_inverse(M, torch.linalg.inv(damped(last)))
    assert applied_error(X, M, torch.ones(40, 1, dtype=M.dtype)) > 1
    assert residual > 1
    assert radius > 1
    assert not accepted(residual, radius)


@pytest.mark.parametrize("steps", [0, 1, 8, 60])
def test_what_is_not_a_number_is_infinitely_far(steps):
    M = definite(8, 1e4, batch=(3,), dtype=torch.float32)
    guess = torch.linalg.inv(M)
    M[1, 0, 0] = torch.nan
    guess[2, 0, 0] = torch.inf
    _, residual, radius = refined_inverse(M, guess, steps)
    assert residual[1:].tolist() == radius[1:].tolist() == [torch.inf] * 2
    assert accepted(residual, radius).tolist() == [True, False, False]


def test_what_overflows_is_infinitely_far():
    M = definite(8, 1e2, dtype=torch.float32)
    assert not accepted(*refined_inverse(M, 1e3 * torch.eye(8), 40)[1:])


def test_a_missed_direction_is_infinitely_far():
    """``X v`` has no part in it, and so no error that X could see."""
    values = torch.logspace(0, -2, 16, dtype=torch.float64)
    M, X = torch.diag(values), torch.diag(1 / values)
    X[3, 3] = 0
    residual, radius = inverse_errors(M, X)
    assert residual == torch.inf
    assert radius == pytest.approx(1)


def test_an_exact_inverse_has_no_residual():
    assert inverse_errors(torch.eye(5), torch.eye(5)) == (0, 0)


def test_probes_are_signs_without_a_pattern():
    v = probe_columns(3072, 8, like=torch.zeros(1, dtype=torch.float64))
    assert (v.abs() == 1).all()
    assert (v.mean(0).abs() < 0.06).all()
    assert ((v.mT @ v / 3072 - torch.eye(8)).abs() < 0.08).all()
    shifted = (v[1:] * v[:-1]).mean(0)
    assert (shifted.abs() < 0.06).all()


def test_probes_may_be_given():
    M = torch.diag(torch.tensor([1.0, 2.0]))
    residual, radius = inverse_errors(M, 0.4 * torch.eye(2), torch.tensor([[0.0], [1.0]]))
    assert (float(residual), float(radius)) == pytest.approx((0.25, 0.2))


def test_steps_are_checked():
    with pytest.raises(InputError, match="steps=-1"):
        refined_inverse(torch.eye(2), torch.eye(2), -1)
    with pytest.raises(InputError, match="order=1"):
        series_inverse(torch.eye(2), torch.eye(2), 1)
