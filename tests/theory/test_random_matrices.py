"""Stieltjes transform and derivative: closed form, finite differences, limits, and random matrices themselves."""

import numpy as np
import pytest

from layerwise import theory
from layerwise.foundations.errors import InputError

SPECTRA = [([1.0], None), ([0.5, 1.5], None), ([1e-3, 1.0, 50.0], [0.2, 0.5, 0.3]), ([0.0, 2.0], None)]
RIDGES = [1e-6, 1e-3, 0.1, 1.0, 10.0, 1e4]
RATIOS = [0.0, 0.05, 0.5, 0.999, 1.0, 2.0, 20.0]


def sampled(dx, n, eigenvalues, ridges, seed):
    """tr (Sx + λ)⁻¹/dx and tr (Sx + λ)⁻²/dx of one drawn sample covariance, over λ."""
    X = np.random.default_rng(seed).standard_normal((n, dx)) * np.sqrt(np.resize(eigenvalues, dx))
    values = np.linalg.eigvalsh(X.T @ X / n)
    return [(np.mean(1 / (values + lam)), np.mean(1 / (values + lam) ** 2)) for lam in ridges]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("ridge", RIDGES)
def test_identity_equals_the_closed_form(ridge, ratio):
    expected = theory.marchenko_pastur(ratio=ratio, ridge=ridge)
    assert theory.stieltjes([1.0], ratio=ratio, ridge=ridge) == pytest.approx(expected, rel=1e-10)


def test_closed_form_equals_the_integral_over_the_density():
    """m = ∫ f(x)/(x + λ) dx with the Marchenko–Pastur density, which knows nothing of the quadratic equation."""
    phi, lam = 0.3, 0.2
    low, high = (1 - phi**0.5) ** 2, (1 + phi**0.5) ** 2
    angle = (np.arange(4000) + 0.5) * np.pi / 4000
    x = (low + high) / 2 + (high - low) / 2 * np.cos(angle)
    density = np.sqrt((high - x) * (x - low)) / (2 * np.pi * phi * x)
    weight = density * (high - low) / 2 * np.sin(angle) * np.pi / 4000
    assert weight.sum() == pytest.approx(1, abs=1e-9)
    m, derivative = theory.marchenko_pastur(ratio=phi, ridge=lam)
    assert m == pytest.approx(np.sum(weight / (x + lam)), rel=1e-9)
    assert derivative == pytest.approx(np.sum(weight / (x + lam) ** 2), rel=1e-9)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("ratio", [0.05, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("ridge", [1e-3, 0.1, 1.0, 10.0])
def test_derivative_is_that_of_the_transform(ridge, ratio, spectrum):
    h = 1e-5 * ridge
    eigenvalues, weights = spectrum
    low, at, high = (
        theory.stieltjes(eigenvalues, ratio=ratio, ridge=z, weights=weights) for z in (ridge - h, ridge, ridge + h)
    )
    assert at.derivative == pytest.approx((low.m - high.m) / (2 * h), rel=1e-6)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("ridge", RIDGES)
def test_silverstein_equation_holds(ridge, ratio, spectrum):
    """1/v = λ + φ∫ t/(1 + tv) dH for v = s/λ, the equation as the paper has it."""
    r = theory.resolvent(spectrum[0], ratio=ratio, ridge=ridge, weights=spectrum[1])
    t = np.array(spectrum[0])
    w = np.full(t.size, 1 / t.size) if spectrum[1] is None else np.array(spectrum[1])
    v = r.s / ridge
    assert 1 / v == pytest.approx(ridge + ratio * np.sum(w * t / (1 + t * v)), rel=1e-8)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("ratio", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("ridge", [1e-2, 1.0, 5.0])
def test_psi_equal_their_definitions(ridge, ratio, spectrum):
    r = theory.resolvent(spectrum[0], ratio=ratio, ridge=ridge, weights=spectrum[1])
    assert r.psi1 == pytest.approx(1 - ridge * r.m, abs=1e-12)
    assert r.psi2 == pytest.approx(1 - 2 * ridge * r.m + ridge**2 * r.derivative, abs=1e-12)
    assert r.psi3 == pytest.approx(r.m - ridge * r.derivative, rel=1e-9)


def test_limits():
    t, w = np.array([0.2, 1.0, 4.0]), np.array([0.5, 0.3, 0.2])
    large = 1e7

    def at(ridge, ratio):
        return theory.stieltjes(t, ratio=ratio, ridge=ridge, weights=w)

    assert large * at(large, 0.7).m == pytest.approx(1, rel=1e-6)
    assert large**2 * at(large, 0.7).derivative == pytest.approx(1, rel=1e-6)
    assert at(0.3, 1e-9).m == pytest.approx(np.sum(w / (t + 0.3)), rel=1e-7)
    assert at(0.3, 0).derivative == pytest.approx(np.sum(w / (t + 0.3) ** 2), rel=1e-12)
    assert at(0, 0.4).m == pytest.approx(np.sum(w / t) / 0.6, rel=1e-12)
    assert at(0, 0.4) == pytest.approx(at(1e-9, 0.4), rel=1e-6)


@pytest.mark.parametrize(("dx", "n"), [(300, 900), (400, 200)])
@pytest.mark.parametrize("eigenvalues", [[1.0], [0.5, 1.5], [0.1, 1.0, 5.0, 20.0]])
def test_random_matrices(dx, n, eigenvalues):
    """Linear statistics fluctuate by O(1/dx) and are biased by O(1/dx): 2 % at these sizes, 1 % in the slow test."""
    ridges = [0.05, 0.5, 5.0]
    for lam, (m, derivative) in zip(ridges, sampled(dx, n, eigenvalues, ridges, seed=0), strict=True):
        found = theory.stieltjes(eigenvalues, ratio=dx / n, ridge=lam)
        assert found == pytest.approx((m, derivative), rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1000, 6000])
@pytest.mark.parametrize("eigenvalues", [[1.0], [0.5, 1.5], [0.1, 1.0, 5.0, 20.0]])
def test_random_matrices_of_2000_dimensions(n, eigenvalues):
    ridges = [1e-3, 1e-2, 0.1, 1.0, 10.0]
    for lam, (m, derivative) in zip(ridges, sampled(2000, n, eigenvalues, ridges, seed=1), strict=True):
        found = theory.stieltjes(eigenvalues, ratio=2000 / n, ridge=lam)
        assert found == pytest.approx((m, derivative), rel=1e-2)


@pytest.mark.parametrize(
    ("eigenvalues", "options", "says"),
    [
        ([1.0], {"ridge": -1.0}, "ridge=-1.0"),
        ([1.0], {"ridge": float("nan")}, "ridge=nan"),
        ([1.0], {"ratio": -0.5}, "ratio=-0.5"),
        ([1.0], {"ratio": float("inf")}, "ratio=inf"),
        ([1.0], {"ridge": 0.0, "ratio": 1.0}, "has an inverse"),
        ([0.0, 1.0], {"ridge": 0.0}, "has an inverse"),
        ([], {}, "eigenvalues of shape"),
        ([-1.0], {}, "eigenvalues of shape"),
        ([1.0, 2.0], {"weights": [1.0]}, "weights of shape"),
        ([1.0, 2.0], {"weights": [0.0, 0.0]}, "weights of shape"),
    ],
)
def test_bad_input_is_named(eigenvalues, options, says):
    with pytest.raises(InputError, match=says):
        theory.stieltjes(eigenvalues, **({"ratio": 0.5, "ridge": 1.0} | options))
