"""Proposition D.2: which norm's steepest descent a preconditioned step is, by minimising the objective itself."""

import numpy as np
import pytest
from scipy.optimize import minimize

from layerwise import theory
from layerwise.foundations.errors import InputError

LR = 0.7


def instance(seed=0, m=3, n=4):
    rng = np.random.default_rng(seed)
    A, B = rng.standard_normal((m, m)), rng.standard_normal((n, n))
    return rng.standard_normal((m, n)), A @ A.T + np.eye(m), B @ B.T + np.eye(n)


def objective(norm, g, P, Q):
    return lambda M: np.vdot(g, M.reshape(g.shape)) + norm(M.reshape(g.shape), P, Q) ** 2 / (2 * LR)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("norm", "descent"),
    [
        (theory.preconditioned_norm, theory.preconditioned_descent),
        (theory.printed_norm, theory.printed_descent),
    ],
)
def test_descent_is_the_minimiser_found_by_search(norm, descent, seed):
    g, P, Q = instance(seed)
    found = minimize(objective(norm, g, P, Q), np.zeros(g.size), method="BFGS", options={"gtol": 1e-7})
    step = descent(g, P, Q, LR)
    assert np.linalg.norm(found.x.reshape(g.shape) - step) < 1e-4 * np.linalg.norm(step)


def test_printed_norm_does_not_give_the_claimed_direction():
    for seed in range(5):
        g, P, Q = instance(seed)
        claimed, printed = theory.preconditioned_descent(g, P, Q, LR), theory.printed_descent(g, P, Q, LR)
        cosine = np.vdot(claimed, printed) / np.linalg.norm(claimed) / np.linalg.norm(printed)
        assert cosine < 0.99
        value = objective(theory.printed_norm, g, P, Q)
        best = min(value((c * claimed).ravel()) for c in np.geomspace(1e-3, 10, 200))
        assert best > 0.98 * value(printed.ravel())  # both are negative: no length of the claimed step is as low


@pytest.mark.parametrize("seed", range(3))
def test_dual_norm_and_optimal_value(seed):
    g, P, Q = instance(seed)
    step = theory.preconditioned_descent(g, P, Q, LR)
    dual = theory.preconditioned_dual_norm(g, P, Q)
    assert objective(theory.preconditioned_norm, g, P, Q)(step.ravel()) == pytest.approx(-LR / 2 * dual**2)
    rng = np.random.default_rng(seed + 10)
    directions = [rng.standard_normal(g.shape) for _ in range(200)]
    reached = max(np.vdot(g, U) / theory.preconditioned_norm(U, P, Q) for U in directions)
    assert 0.3 * dual < reached <= dual
    assert -np.vdot(g, step) / theory.preconditioned_norm(step, P, Q) == pytest.approx(dual)


@pytest.mark.parametrize("seed", range(3))
def test_mahalanobis_norm_is_induced_and_its_descent_optimal(seed):
    g, P, Q = instance(seed)
    rng = np.random.default_rng(seed + 20)
    x = rng.standard_normal((20_000, 4))
    image = x @ g.T
    ratio = np.sqrt(np.sum((image @ P) * image, 1) / np.sum(np.linalg.solve(Q, x.T).T * x, 1))
    norm = theory.mahalanobis_norm(g, P, Q)
    assert 0.95 * norm < ratio.max() <= norm * (1 + 1e-12)
    step = theory.mahalanobis_descent(g, P, Q, LR)
    value = objective(theory.mahalanobis_norm, g, P, Q)
    values, V = np.linalg.eigh(P)
    left = (V / np.sqrt(values)) @ V.T
    values, V = np.linalg.eigh(Q)
    nuclear = np.linalg.norm(left @ g @ (V / np.sqrt(values)) @ V.T, "nuc")
    assert value(step.ravel()) == pytest.approx(-LR / 2 * nuclear**2)
    for size in (1e-3, 1e-1, 1.0):
        for _ in range(50):
            assert value(step.ravel() + size * rng.standard_normal(step.size)) > value(step.ravel())


def test_matrices_that_are_no_preconditioners_are_refused():
    g, P, Q = instance()
    with pytest.raises(InputError, match="positive definite"):
        theory.preconditioned_descent(g, -P, Q)
    with pytest.raises(InputError, match="not symmetric"):
        theory.preconditioned_norm(g, P, Q + np.triu(np.ones((4, 4)), 1))
