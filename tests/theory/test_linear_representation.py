"""SGD's lower bound, KFAC's contraction, noise floors and transfer, against runs of the algorithms themselves."""

import numpy as np
import pytest

from layerwise import theory
from layerwise.foundations.errors import InputError


def haar(rows, columns, rng):
    return np.linalg.qr(rng.standard_normal((columns, rows)))[0].T


def near(target, distance, rng):
    """Orthonormal rows at about the given distance from a representation."""
    k, dx = target.shape
    outside = rng.standard_normal((k, dx))
    outside -= outside @ target.T @ target
    return np.linalg.qr((target + distance * outside / np.linalg.norm(outside, 2)).T)[0].T


def kfac_step(G, tasks, lr):
    """Two-stage preconditioning, eqs. (20)–(22), with heads by least squares; one task is the stylised KFAC."""
    D, P = np.zeros_like(G), np.zeros((G.shape[0], G.shape[0]))
    for (XA, YA), (XB, YB) in tasks:
        Z = XB @ G.T
        F = np.linalg.solve(Z.T @ Z, Z.T @ YB).T
        S = XA.T @ XA / len(XA)
        grad = F.T @ (F @ G @ S - YA.T @ XA / len(XA))
        D += np.linalg.solve(S, grad.T).T
        P += F.T @ F
    return np.linalg.qr((G - lr * np.linalg.solve(P, D)).T)[0].T


def batches(head, target, roots, noise, n, rng):
    """For each of two halves: inputs with covariance root², labels F⋆G⋆x + noise."""
    out = []
    for _ in range(2):
        X = rng.standard_normal((n, target.shape[1])) * roots
        out.append((X, X @ (head @ target).T + noise * rng.standard_normal((n, head.shape[0]))))
    return out


@pytest.mark.parametrize("form", ["slow", "unstable"])
@pytest.mark.parametrize(("k", "dx"), [(2, 3), (3, 7)])
def test_scalar_recursion_is_that_of_the_matrices(form, k, dx):
    p = theory.lower_bound_problem(0.07, 0.3, form, k, dx)
    level = 0.07 if form == "slow" else 0.93
    G, c = p.start, 0.3
    for _ in range(20):
        G, c = theory.sgd_population_step(G, p.gram, p.target, 1.5), theory.sgd_scalar_step(c, 1.5, level)
        assert theory.subspace_distance(G, p.target) == pytest.approx(abs(c), abs=1e-13)
        assert np.allclose(G @ G.T, np.eye(k), atol=1e-13)


def test_population_step_is_sgd_on_many_samples():
    rng = np.random.default_rng(0)
    p = theory.lower_bound_problem(0.2, 0.5)
    head, n = np.sqrt(p.gram), 400_000
    X = rng.standard_normal((n, 3))
    Y = X @ (head @ p.target).T + 0.1 * rng.standard_normal((n, 2))
    Z = X @ p.start.T
    F = np.linalg.solve(Z.T @ Z, Z.T @ Y).T
    G = p.start - 0.8 * F.T @ ((F @ p.start) @ (X.T @ X) - Y.T @ X) / n
    found = theory.subspace_distance(np.linalg.qr(G.T)[0].T, p.target)
    exact = theory.subspace_distance(theory.sgd_population_step(p.start, p.gram, p.target, 0.8), p.target)
    assert found == pytest.approx(exact, abs=5e-3)
    assert abs(exact - 0.5) > 0.02


@pytest.mark.parametrize("least", [0.01, 0.1, 0.19])
@pytest.mark.parametrize("distance", [0.05, 0.5, 0.95])
def test_sgd_obeys_its_lower_bound_at_every_step(least, distance):
    for lr in np.linspace(0.1, theory.sgd_stability_limit(least), 40):
        c = distance
        for number in range(100):
            following = theory.sgd_scalar_step(c, lr, least)
            assert following >= (1 - lr * least) * c - 1e-15 >= theory.sgd_lower_bound(least, 1, c) - 2e-15
            assert following >= theory.sgd_lower_bound(least, number + 1, distance) - 1e-15
            c = following


def test_printed_intermediate_inequality_is_reversed():
    """c₂₊ > c₂(1 − wc₁²) is printed; division by a norm above 1 makes it smaller."""
    for lr in (0.5, 2.0, 4.0):
        w = lr * 0.19
        assert theory.sgd_scalar_step(0.5, lr, 0.19) < 0.5 * (1 - w * 0.75)


@pytest.mark.parametrize("least", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("distance", [1e-3, 0.1, 0.7])
def test_beyond_the_stability_limit_sgd_stays_away(least, distance):
    lr = 1.05 * theory.sgd_stability_limit(least)
    c, seen = distance, []
    for _ in range(400):
        c = theory.sgd_scalar_step(c, lr, 1 - least)
        seen.append(abs(c))
    assert max(seen[200:]) >= 0.5
    c = distance
    for _ in range(400):  # and well within it, the same form converges
        c = theory.sgd_scalar_step(c, 1.0, 1 - least)
    assert abs(c) < 1e-6


def test_bound_says_nothing_from_one_fifth_on():
    assert theory.sgd_lower_bound(0.2) == pytest.approx(0, abs=1e-15)
    assert theory.sgd_lower_bound(0.1, 3, 0.5) == pytest.approx(0.5 * (5 / 9) ** 3)


@pytest.mark.parametrize("condition", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("lr", [0.3, 0.9])
def test_kfac_contracts_by_the_factor_whatever_the_condition(condition, lr):
    rng = np.random.default_rng(1)
    target = haar(3, 12, rng)
    head = haar(3, 6, rng).T * np.geomspace(condition, 1, 3)
    eigenvalues = np.geomspace(1, condition, 12)
    expected = theory.kfac_contraction(lr, head, eigenvalues)
    assert expected.basin == pytest.approx(0.01 / condition**2)
    G = near(target, expected.basin, rng)
    before = theory.subspace_distance(G, target)
    G = kfac_step(G, [batches(head, target, np.sqrt(eigenvalues), 0.0, 200, rng)], lr)
    ratio = theory.subspace_distance(G, target) / before
    assert ratio == pytest.approx(expected.limit, rel=2e-3)
    assert ratio <= expected.factor


def settled(lr, tasks, n, noise=0.3, dx=30, k=3, dy=6):
    """Mean distance after KFAC has settled, and what the theory expects; heads with all singular values 1."""
    rng = np.random.default_rng(2)
    target, found = haar(k, dx, rng), []
    heads = [haar(k, dy, rng).T for _ in range(tasks)]
    G = near(target, 0.05, rng)
    burn = int(6 / lr)
    for number in range(burn + 60):
        G = kfac_step(G, [batches(F, target, np.ones(dx), noise, n, rng) for F in heads], lr)
        if number >= burn:
            found.append(theory.subspace_distance(G, target))
    return np.mean(found), theory.kfac_contraction(lr, heads[0], np.ones(dx), noise, n, tasks=tasks)


@pytest.mark.parametrize("lr", [0.2, 0.8])
def test_noise_floor_is_that_of_simulation(lr):
    """‖k × dx Gaussian‖ lies between √dx and √dx + √k, and Sx⁻¹ adds n/(n − dx)."""
    found, expected = settled(lr, tasks=1, n=400)
    assert 1.0 < found / expected.floor < (1 + 0.1**0.5) * (400 / 370) ** 0.5 * 1.05
    assert expected.floor <= expected.noise / lr
    assert expected.samples == pytest.approx(30 + np.log(100))


def test_noise_falls_with_the_root_of_samples_times_tasks():
    base, more_samples, more_tasks = (settled(0.5, *at) for at in ((1, 300), (1, 1200), (4, 300)))
    for found, expected in (more_samples, more_tasks):
        assert expected.floor == pytest.approx(base[1].floor / 2)
        assert expected.noise == pytest.approx(base[1].noise / 2)
        assert expected.factor == base[1].factor
        assert found / base[0] == pytest.approx(0.5, abs=0.07)


def refitted(dist, noise, n, seed):
    """Excess of a refitted head on one draw of a target task, and its bound."""
    rng = np.random.default_rng(seed)
    target, head, roots = haar(3, 20, rng), rng.standard_normal((5, 3)), np.sqrt(np.geomspace(0.1, 4, 20))
    G = near(target, dist, rng)
    (X, Y), _ = batches(head, target, roots, noise, n, rng)
    Z = X @ G.T
    excess = np.sum(((np.linalg.solve(Z.T @ Z, Z.T @ Y).T @ G - head @ target) * roots) ** 2)
    return excess, theory.transfer_bound(head, 4.0, theory.subspace_distance(G, target), noise, n, failure=0.05)


@pytest.mark.parametrize(("dist", "noise"), [(0.0, 1.0), (0.03, 0.0), (0.03, 1.0), (0.3, 0.0), (0.3, 1.0)])
@pytest.mark.parametrize("n", [60, 1000])
def test_transfer_stays_below_its_bound(dist, n, noise):
    for seed in range(40):
        excess, bound = refitted(dist, noise, n, seed)
        assert excess <= bound.total(), (excess, bound)


def test_transfer_terms_are_what_simulation_scales_with():
    noise_only = np.mean([refitted(0.0, 0.5, 1000, seed)[0] for seed in range(100)])
    assert noise_only == pytest.approx(0.25 * 15 / 1000, rel=0.1)
    one, three = (np.mean([refitted(d, 0.0, 5000, seed)[0] for seed in range(5)]) for d in (0.01, 0.03))
    assert three / one == pytest.approx(9, rel=0.05)
    bound = refitted(0.01, 0.0, 5000, 0)[1]
    assert bound.variance == 0
    assert refitted(0.02, 0.0, 5000, 0)[1].bias == pytest.approx(4 * bound.bias, rel=1e-3)


def test_transfer_bias_is_reached_where_inputs_are_isotropic():
    """With Σ = I, k = 1 and many samples the excess is ‖F⋆‖² dist² itself: the bound's bias has no slack there."""
    rng = np.random.default_rng(3)
    target, head = haar(1, 10, rng), rng.standard_normal((4, 1))
    G = near(target, 0.4, rng)
    (X, Y), _ = batches(head, target, np.ones(10), 0.0, 50_000, rng)
    Z = X @ G.T
    excess = np.sum((np.linalg.solve(Z.T @ Z, Z.T @ Y).T @ G - head @ target) ** 2)
    bound = theory.transfer_bound(head, 1.0, theory.subspace_distance(G, target), 0.0, 50_000)
    assert excess == pytest.approx(bound.bias, rel=2e-3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: theory.sgd_lower_bound(0.6), "least=0.6"),
        (lambda: theory.sgd_lower_bound(0.1, steps=-1), "steps=-1"),
        (lambda: theory.lower_bound_problem(0.1, 1.0), "distance=1.0"),
        (lambda: theory.lower_bound_problem(0.1, form="fast"), "slow, unstable"),
        (lambda: theory.lower_bound_problem(0.1, k=3, dx=3), "2 ≤ k < dx"),
        (lambda: theory.kfac_contraction(1.5, np.eye(2), np.ones(3)), "lr=1.5"),
        (lambda: theory.kfac_contraction(0.5, np.ones((2, 2)), np.ones(3)), "full column rank"),
        (lambda: theory.kfac_contraction(0.5, np.ones((1, 2)), np.ones(3)), "full column rank"),
        (lambda: theory.kfac_contraction(0.5, np.eye(2), np.ones(3), tasks=0), "tasks=0"),
        (lambda: theory.kfac_contraction(0.5, np.eye(2), np.ones(3), samples=0), "samples=0"),
        (lambda: theory.transfer_bound(np.eye(2), 1.0, 2.0, 0.1, 10), "distance=2.0"),
        (lambda: theory.transfer_bound(np.eye(2), 1.0, 0.1, -0.1, 10), "noise=-0.1"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(InputError, match=says):
        call()
