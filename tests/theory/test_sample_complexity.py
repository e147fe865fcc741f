"""Samples that one step needs: against closed forms, brute force over φ and λ, and draws of the model."""

import math

import numpy as np
import pytest

from layerwise.foundations.errors import InputError
from layerwise.theory.sample_complexity import (
    best_damping,
    correlation_limit,
    one_step_correlation,
    samples_needed,
)
from layerwise.theory.single_index import HermiteConstants

LINK = HermiteConstants(c1=1.3, cs2=1.3**2 + 0.7, cperp2=0.7, variance=1.0)
NOISE = 0.8
SPREAD = (LINK.cperp2 + NOISE**2) / LINK.c1**2
SPECTRA = ([1.0], [1.6, 0.4], [0.1, 0.5, 2.4])


def needed(correlation, spectrum, damping):
    return samples_needed(correlation, LINK, noise=NOISE, eigenvalues=spectrum, damping=damping)


def rho(phi, damping, spectrum):
    return one_step_correlation(LINK, noise=NOISE, ratio=phi, damping=damping, eigenvalues=spectrum)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("correlation", [0.3, 0.7, 0.95])
def test_closed_forms(spectrum, correlation):
    t = np.array(spectrum)
    room = 1 / correlation**2 - (t**2).mean()  # mean one
    sgd = (LINK.cs2 + NOISE**2) / LINK.c1**2 / room if room > 0 else math.inf
    assert needed(correlation, spectrum, math.inf) == pytest.approx(sgd, rel=1e-9)
    r = 1 / correlation**2 - 1
    assert needed(correlation, spectrum, 0) == pytest.approx(1 + SPREAD * (1 / t).mean() / r, rel=1e-9)
    assert needed(correlation, spectrum, 1e-9) == pytest.approx(needed(correlation, spectrum, 0), rel=1e-4)
    if len(spectrum) == 1:
        assert needed(correlation, spectrum, None) == pytest.approx(correlation**2 + SPREAD / r, rel=1e-9)


@pytest.mark.parametrize("spectrum", SPECTRA[1:])
@pytest.mark.parametrize("damping", [0.02, 0.5, math.inf, None])
def test_it_is_the_edge(spectrum, damping):
    """With a little more samples the correlation is reached, with a little less it is not."""
    for target in (0.4, 0.7):
        phi = 1 / needed(target, spectrum, damping)
        for factor, reached in ((0.999, True), (1.001, False)):
            at = best_damping(LINK, noise=NOISE, ratio=phi * factor) if damping is None else damping
            assert (rho(phi * factor, at, spectrum) >= target) == reached


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("phi", [0.05, 0.5, 3.0])
def test_best_damping_is_best_on_a_grid(spectrum, phi):
    best = best_damping(LINK, noise=NOISE, ratio=phi)
    grid = [best * 10**exponent for exponent in np.linspace(-3, 3, 61)]
    values = [rho(phi, damping, spectrum) for damping in grid]
    assert int(np.argmax(values)) == 30
    # ρ² = Ψ₁ there, from the identity of the docstring.
    s = 1 - phi * values[30] ** 2
    assert (np.array(spectrum) * s / (np.array(spectrum) * s + best)).mean() == pytest.approx(values[30] ** 2)


def test_best_needs_least():
    for spectrum in SPECTRA:
        fixed = [needed(0.7, spectrum, damping) for damping in (1e-6, 0.03, 0.1, 0.3, 1.0, 3.0, math.inf)]
        assert needed(0.7, spectrum, None) <= min(fixed)


@pytest.mark.parametrize("damping", [0, 0.1, 1.0, math.inf])
def test_limit_is_that_of_many_samples(damping):
    for spectrum in SPECTRA:
        assert correlation_limit(damping, spectrum) == pytest.approx(rho(1e-9, damping, spectrum), rel=1e-6)
    assert correlation_limit(0, [2.0, 0.0]) == pytest.approx(0.5**0.5)
    for e in (0.0, 0.4, 0.9):
        assert correlation_limit(math.inf, [1 + e, 1 - e]) == pytest.approx(1 / (1 + e * e) ** 0.5)


def test_sgd_has_a_wall_and_kfac_has_none():
    """Target 0.8: SGD's wall is at e = 0.75; a fixed λ has one of its own, the best λ none before e = 1."""
    near = needed(0.8, [1.749, 0.251], math.inf)
    assert math.isfinite(near)
    assert near > 100 * needed(0.8, [1.0], math.inf)
    assert needed(0.8, [1.751, 0.249], math.inf) == math.inf
    assert needed(0.8, [1.98, 0.02], 0.3) == math.inf
    assert math.isfinite(needed(0.8, [1.999, 0.001], None))
    assert needed(0.8, [2.0, 0.0], None) == math.inf


def test_small_damping_counts_from_the_side_of_many_samples():
    """ρ(n) has a minimum near n = dx at λ → 0; a low target is met at n < dx already, but not from there on."""
    assert rho(1.0, 1e-8, [1.0]) < 0.3 < min(rho(2.0, 1e-8, [1.0]), rho(0.5, 1e-8, [1.0]))
    assert needed(0.3, [1.0], 1e-8) > 1


def test_against_draws():
    """At the predicted number of samples the estimators have the correlation asked for."""
    rng, dx, e, target = np.random.default_rng(0), 300, 0.6, 0.8
    link = HermiteConstants(c1=1.0, cs2=2.0, cperp2=1.0, variance=1.0)
    root = np.sqrt(np.repeat([1 + e, 1 - e], dx // 2))
    for damping in (math.inf, 1e-6, None):
        per = samples_needed(target, link, noise=1.0, eigenvalues=[1 + e, 1 - e], damping=damping)
        n = round(per * dx)
        at = best_damping(link, noise=1.0, ratio=dx / n) if damping is None else damping
        found = []
        for _ in range(8):
            X, beta = rng.standard_normal((n, dx)) * root, rng.standard_normal(dx) / dx**0.5
            z = X @ beta
            b = X.T @ (z + (z**2 - 1) / 2**0.5 + rng.standard_normal(n)) / n
            if math.isfinite(at):
                b = np.linalg.solve(X.T @ X / n + at * np.eye(dx), b)
            found.append(b @ beta / np.linalg.norm(b) / np.linalg.norm(beta))
        assert np.mean(found) == pytest.approx(target, abs=0.02)


def test_bad_input():
    for correlation in (0.0, 1.0, -0.5, math.nan):
        with pytest.raises(InputError, match="between 0 and 1"):
            needed(correlation, [1.0], None)
    for damping in (-1.0, math.nan):
        with pytest.raises(InputError, match="damping"):
            needed(0.5, [1.0], damping)
    with pytest.raises(InputError, match="tr"):
        needed(0.5, [3.0], 0.1)
    flat = HermiteConstants(c1=0.0, cs2=1.0, cperp2=1.0, variance=1.0)
    assert samples_needed(0.5, flat, noise=1.0, eigenvalues=[1.0]) == math.inf
    with pytest.raises(InputError, match="linear part"):
        best_damping(flat, noise=1.0, ratio=0.1)
    with pytest.raises(InputError, match="ratio=-1"):
        best_damping(LINK, noise=1.0, ratio=-1.0)
    with pytest.raises(InputError, match="damping=-inf"):
        rho(0.1, -math.inf, [1.0])


@pytest.mark.parametrize("spectrum", [[1.0], [1.9, 0.1]])
@pytest.mark.parametrize("damping", [3e-3, 1e-2])
def test_the_dip_near_as_many_samples_as_inputs_is_not_stepped_over(spectrum, damping):
    """Targets just above the least correlation: the answer lies on the side of many samples."""
    phis = np.geomspace(0.5, 3, 2000)
    found = [rho(phi, damping, spectrum) for phi in phis]
    target = min(found) + 1e-3
    last = phis[next(i for i, value in enumerate(found) if value < target)]
    assert needed(target, spectrum, damping) == pytest.approx(1 / last, rel=3e-2)


def test_without_noise_the_best_damping_may_be_zero():
    """c⊥ = noise = 0: y is linear in x, so n ≥ dx samples give everything and fewer the share ρ² = n/dx."""
    exact = HermiteConstants(c1=1.0, cs2=1.0, cperp2=0.0, variance=1.0)
    assert samples_needed(0.8, exact, noise=0.0, eigenvalues=[1.0]) == pytest.approx(0.64, rel=1e-3)
