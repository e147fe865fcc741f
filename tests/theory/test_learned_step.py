"""Closed forms of learned step sizes against the computation that they bound or predict."""

import math

import jaxtyping
import numpy as np
import pytest
import torch

from error_sentences import THREE
from layerwise import theory
from layerwise.foundations.errors import InputError
from layerwise.meta import LeastSquares, Quadratic


@pytest.fixture(scope="module")
def problems():
    return Quadratic.random(5, 8, torch.Generator().manual_seed(100)).normalized()


def each(problems):
    return [(problems.eigenvalues[i].numpy(), problems.c[i].numpy(), i) for i in range(len(problems.c))]


@pytest.mark.parametrize("steps", [5, 40])
def test_bounds_of_the_naive_derivative_hold(problems, steps):
    for lam, c, i in each(problems):
        L = lam.max()
        for share in (0.05, 0.5, 0.95):
            found = abs(float(problems.naive_gradient(share * 2 / L, steps)[i]))
            assert found <= theory.naive_gradient_bound(lam, share * 2 / L, steps) * (1 + 1e-9)
        for times in (1.2, 3.0):
            found = abs(float(problems.naive_gradient(times * 2 / L, steps)[i]))
            assert found >= theory.naive_gradient_floor(lam, c, times * 2 / L, steps) * (1 - 1e-9)


def test_bounds_of_the_log_derivative_hold_and_the_floor_is_below(problems):
    best = problems.best_step(20)
    for lam, c, i in each(problems):
        L, alpha = lam.max(), lam.min()
        bound = theory.log_gradient_bound(lam, c)
        far = 2 / alpha
        floor = theory.log_gradient_floor(lam, c, distance=0.5 / L, largest=far)
        assert floor > 0
        for eta in np.geomspace(1e-3 / L, far, 30):
            found = abs(float(problems.gradient(float(eta), 20)[i]))
            assert found <= bound * (1 + 1e-9)
            if abs(eta - float(best[i])) >= 0.5 / L:
                assert found >= floor * (1 - 1e-9)


@pytest.mark.parametrize(("n", "d"), [(6, 10), (15, 10)])
def test_error_of_descent_is_the_mean_over_signals_and_noise(n, d):
    """Over all signals and draws of noise at fixed inputs: bias and variance are exact, not sampled."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    eta, steps, noise = 0.1, 7, 0.8
    A = torch.eye(d, dtype=torch.float64) - eta * x.T @ x / n
    power = torch.linalg.matrix_power(A, steps)
    taken = sum(torch.linalg.matrix_power(A, k) for k in range(steps)) @ x.T * eta / n  # w_t = taken @ y
    expected = float((power**2).sum()) / d + noise**2 * float((taken**2).sum())
    lam = torch.linalg.eigvalsh(x.T @ x / n)[-min(n, d) :].numpy()
    assert theory.descent_error(lam, eta, steps, n=n, d=d, noise=noise) == pytest.approx(expected, rel=1e-12)


def test_converged_error_is_what_long_descent_ends_at():
    tasks = LeastSquares.draw(tasks=60, n=20, d=60, noise=1.0, generator=torch.Generator().manual_seed(100))
    found = tasks.error(tasks.descend(0.2, 2000).weights).mean()
    assert float(found) == pytest.approx(theory.converged_error(20, 60, 1.0), rel=0.15)
    assert theory.converged_error(60, 60, 1.0) == math.inf
    assert theory.converged_error(100, 60, 2.0) == pytest.approx(4 * 60 / 39)


def test_what_is_without_noise_is_not_infinite_and_what_diverges_is():
    assert theory.converged_error(100, 100, 0.0) == theory.converged_error(101, 100, 0.0) == 0
    assert theory.converged_error(99, 100, 0.0) == pytest.approx(0.01)
    assert theory.descent_error(np.ones(4) * 5, 1.0, 4000, n=4, d=8, noise=0.0) == math.inf
    assert theory.log_gradient_bound(np.array([1.0, 2.0]), np.array([0.0, 1.0])) == math.inf


def test_validation_step_minimises_the_expected_error():
    tasks = LeastSquares.draw(tasks=1, n=100, d=400, noise=8.0, generator=torch.Generator().manual_seed(100))
    lam = tasks.eigenvalues[0].numpy()
    predicted = theory.validation_step(100, 400, 8.0, 50)
    grid = predicted * np.geomspace(0.3, 3, 61)
    errors = [theory.descent_error(lam, float(eta), 50, n=100, d=400, noise=8.0) for eta in grid]
    assert grid[int(np.argmin(errors))] == pytest.approx(predicted, rel=0.08)


def test_training_step_is_where_both_edges_fall_alike():
    eta, (least, largest) = theory.training_step(50, 200), theory.spectrum_edges(50, 200)
    assert 1 - eta * least == pytest.approx(eta * largest - 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.naive_gradient_bound(np.array([1.0, 2.0]), 1.5, 3),
        lambda: theory.naive_gradient_floor(np.array([1.0, 2.0]), np.array([0.6, 0.8]), 0.5, 3),
        lambda: theory.naive_gradient_bound(np.array([1.0, 2.0]), 0.5, 0),
        lambda: theory.log_gradient_bound(np.array([1.0, 1.0]), np.array([0.6, 0.8])),
        lambda: theory.log_gradient_bound(np.array([1.0, 2.0]), np.array([3.0, 4.0])),
        lambda: theory.log_gradient_bound(np.array([1.0, 2.0]), np.array([1.0])),
        lambda: theory.log_gradient_floor(np.array([1.0, 2.0]), np.array([0.6, 0.8]), 0.1, 0.5),
        lambda: theory.log_gradient_floor(np.array([1.0, 2.0]), np.array([0.6, 0.8]), 0.6, 2.0),
        lambda: theory.descent_error(np.ones(3), 0.1, 5, n=4, d=8, noise=1.0),
        lambda: theory.descent_error(np.ones(4), 0.0, 5, n=4, d=8, noise=1.0),
        lambda: theory.converged_error(0, 4, 1.0),
    ],
)
def test_what_the_formulas_are_not_for(call, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user has it
    with pytest.raises(InputError, match=THREE):
        call()
