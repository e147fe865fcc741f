"""Constants, correlations and the rank-one step of the single-index model, against draws of the model itself."""

import numpy as np
import pytest

from layerwise import theory
from layerwise.foundations.errors import InputError


def target(z):
    return z + (z**2 - 1) / 2**0.5


def target_slope(z):
    return 1 + 2**0.5 * z


CONSTANTS = theory.hermite_constants(target, target_slope, 1.0)


def draw(dx, n, e, rng, noise=1.0):
    """x, y and β⋆ of eq. (12) with covariance (14)."""
    values = np.repeat(theory.two_level_spectrum(e)[0], dx // 2)
    X = rng.standard_normal((n, dx)) * np.sqrt(values)
    beta = rng.standard_normal(dx) / dx**0.5
    return X, target(X @ beta) + noise * rng.standard_normal(n), beta


def directions(X, y, dampings):
    """SGD's Xᵀy/n, then KFAC's (Sx + λ)⁻¹Xᵀy/n for each λ."""
    n, dx = X.shape
    S, b = X.T @ X / n, X.T @ y / n
    return [b] + [np.linalg.solve(S + lam * np.eye(dx), b) for lam in dampings]


def cosine(a, b):
    return abs(a @ b) / np.linalg.norm(a) / np.linalg.norm(b)


def test_constants_equal_those_known():
    assert (CONSTANTS.c1, CONSTANTS.cs2, CONSTANTS.cperp2) == pytest.approx((1, 2, 1), abs=1e-12)
    cubic = theory.hermite_constants(lambda z: z**3, lambda z: 3 * z**2, 2.0)
    assert (cubic.c1, cubic.cs2, cubic.cperp2) == pytest.approx((6, 120, 48), rel=1e-12)


def test_constants_equal_monte_carlo():
    z = 0.7**0.5 * np.random.default_rng(0).standard_normal(1_000_000)
    c = theory.hermite_constants(np.sin, np.cos, 0.7)
    assert c.c1 == pytest.approx(np.cos(z).mean(), abs=5e-3)
    assert c.cs2 == pytest.approx((np.sin(z) ** 2).mean(), abs=5e-3)
    slope = (z @ np.sin(z)) / (z @ z)
    assert c.cperp2 == pytest.approx(np.mean((np.sin(z) - slope * z) ** 2), abs=2e-3)
    assert theory.hermite_constants(np.sin, None, 0.7).c1 == pytest.approx(c.c1, rel=1e-12)


def test_kinked_target_is_taken_when_it_is_centred():
    c = theory.hermite_constants(lambda z: np.maximum(z, 0) - (2 * np.pi) ** -0.5, lambda z: (z > 0) * 1.0, 1.0)
    assert (c.c1, c.cs2) == pytest.approx((0.5, 0.5 - 1 / (2 * np.pi)), abs=2e-3)


def test_target_that_is_not_centred_is_refused():
    with pytest.raises(InputError, match=r"E\[σ⋆\(z\)\] = 1 .*Subtract the mean"):
        theory.hermite_constants(lambda z: z**2, lambda z: 2 * z, 1.0)
    with pytest.raises(InputError, match="not finite"):
        theory.hermite_constants(lambda z: np.full_like(z, np.inf), None, 1.0)


def test_wrong_derivative_and_wrong_variance_are_refused():
    with pytest.raises(InputError, match="the derivative of the function"):
        theory.hermite_constants(np.sin, np.sin, 1.0)
    with pytest.raises(InputError, match="variance="):
        theory.hermite_constants(np.sin, np.cos, 0.0)
    with pytest.raises(InputError, match="a spectrum of mean 2"):
        theory.correlation_sgd(CONSTANTS, 1.0, 0.1, [2.0])
    with pytest.raises(InputError, match="a spectrum of mean 2"):
        theory.correlation_kfac(CONSTANTS, 1.0, 0.1, 1.0, [2.0])


def test_negative_slope_has_the_same_correlation():
    turned = theory.hermite_constants(lambda z: -target(z), lambda z: -target_slope(z), 1.0)
    at = (1.0, 0.2, *theory.two_level_spectrum(0.5))
    assert theory.correlation_sgd(turned, *at) == theory.correlation_sgd(CONSTANTS, *at) > 0


@pytest.mark.parametrize("e", [0.0, 0.3, 0.8, 0.95])
@pytest.mark.parametrize("ratio", [0.01, 1 / 30, 0.5])
def test_two_level_closed_form(ratio, e):
    sgd, kfac = theory.two_level_correlations(CONSTANTS, 0.7, ratio, e)
    spectrum = theory.two_level_spectrum(e)
    assert theory.correlation_sgd(CONSTANTS, 0.7, ratio, *spectrum) == pytest.approx(sgd, rel=1e-12)
    assert theory.correlation_kfac(CONSTANTS, 0.7, ratio, 0, *spectrum) == pytest.approx(kfac, rel=1e-12)
    assert theory.correlation_kfac(CONSTANTS, 0.7, ratio, 1e-9, *spectrum) == pytest.approx(kfac, rel=1e-6)


def test_undamped_kfac_falls_below_sgd_beyond_966():
    below, above = (theory.two_level_correlations(CONSTANTS, 1.0, 1 / 30, e) for e in (0.965, 0.967))
    assert below[1] > below[0]
    assert above[1] < above[0]
    assert theory.two_level_correlations(CONSTANTS, 1.0, 1 / 30, 1)[1] == 0
    with pytest.raises(InputError, match="dx/n in"):
        theory.two_level_correlations(CONSTANTS, 1.0, 1.5, 0.5)


@pytest.mark.parametrize("spectrum", [([1.0], None), ([0.5, 1.5], None), ([0.1, 1.0, 7.0], [0.5, 0.45, 1 / 14])])
def test_limits_of_the_damping_and_the_ratio(spectrum):
    t, w = spectrum
    mean = np.average(t, weights=w)
    c = theory.hermite_constants(np.sin, np.cos, mean)
    sgd = theory.correlation_sgd(c, 0.5, 0.3, t, w)
    assert theory.correlation_kfac(c, 0.5, 0.3, 1e10, t, w) == pytest.approx(sgd, rel=1e-8)
    assert theory.correlation_kfac(c, 0.5, 1e-10, 1e-10, t, w) == pytest.approx(1, abs=1e-7)
    assert theory.correlation_kfac(c, 0.5, 0.0, 0.0, t, w) == pytest.approx(1, abs=1e-12)


def test_values_of_figure_3():
    """Numbers of an independent reproduction: dx/n = 900/5000 at e = ½ over λ, and 200/6000 over e."""
    spectrum = theory.two_level_spectrum(0.5)
    known = {1e-3: 0.7944, 0.01: 0.7963, 0.1: 0.8089, 0.3: 0.8169, 1: 0.8078, 3: 0.7836, 10: 0.7621}
    for lam, rho in known.items():
        assert theory.correlation_kfac(CONSTANTS, 1, 0.18, lam, *spectrum) == pytest.approx(rho, abs=6e-5)
    over_e = {0: (0.9535, 0.9672), 0.4: (0.8909, 0.9613), 0.8: (0.7581, 0.9161), 0.95: (0.7067, 0.7653)}
    for e, (sgd, kfac) in over_e.items():
        spectrum = theory.two_level_spectrum(e)
        assert theory.correlation_sgd(CONSTANTS, 1, 1 / 30, *spectrum) == pytest.approx(sgd, abs=6e-5)
        assert theory.correlation_kfac(CONSTANTS, 1, 1 / 30, 1e-6, *spectrum) == pytest.approx(kfac, abs=6e-5)


@pytest.mark.parametrize(("dx", "n", "e", "trials"), [(200, 1000, 0.5, 60), (200, 2000, 0.8, 60), (300, 200, 0.5, 200)])
def test_correlations_equal_simulation(dx, n, e, trials):
    """Within 4 standard errors of the mean over the trials, and a bias that vanishes as 1/dx."""
    rng, dampings = np.random.default_rng(1), [0.1, 0.5, 3.0]
    found = []
    for _ in range(trials):
        X, y, beta = draw(dx, n, e, rng)
        found.append([cosine(b, beta) for b in directions(X, y, dampings)])
    mean, error = np.mean(found, axis=0), np.std(found, axis=0, ddof=1) / trials**0.5
    spectrum = theory.two_level_spectrum(e)
    expected = [theory.correlation_sgd(CONSTANTS, 1, dx / n, *spectrum)]
    expected += [theory.correlation_kfac(CONSTANTS, 1, dx / n, lam, *spectrum) for lam in dampings]
    assert np.all(error < 0.006)
    assert np.all(np.abs(mean - expected) < 4 * error + 0.5 / dx), (mean, expected, error)


def test_the_printed_sign_of_the_derivative_would_be_wrong():
    """With m′ < 0 in the true derivative's place, Ψ₂ and Ψ₃ miss the traces that they stand for by far."""
    rng, lam, dx, n = np.random.default_rng(2), 0.3, 400, 1200
    X, _, _ = draw(dx, n, 0.5, rng)
    values = np.linalg.eigvalsh(X.T @ X / n)
    r = theory.resolvent(theory.two_level_spectrum(0.5)[0], ratio=dx / n, ridge=lam)
    psi2, psi3 = np.mean((values / (values + lam)) ** 2), np.mean(values / (values + lam) ** 2)
    assert (r.psi2, r.psi3) == pytest.approx((psi2, psi3), rel=1e-2)
    assert abs(r.m + lam * r.derivative - psi3) > 0.5 * psi3
    assert abs(1 - 2 * lam * r.m - lam**2 * r.derivative - psi2) > 0.5 * psi2


@pytest.mark.parametrize("damping", [None, 0.3])
def test_step_is_rank_one_with_the_coefficient(damping):
    """Theorem 3.9: ‖G₁ − G₀ − aηf₀β̂ᵀ‖ / ‖aηf₀β̂ᵀ‖ falls as n grows with dx and dh, and a is the best coefficient."""
    a = theory.rank_one_coefficient(lambda z: 1 / np.cosh(z) ** 2, 1.0)
    relative = [step_error(dx, damping, a) for dx in (100, 400)]
    assert relative[1][0] < 0.75 * relative[0][0]
    assert relative[1][0] < 0.1
    assert relative[1][1] == pytest.approx(a, rel=0.02)


def step_error(dx, damping, a):
    """Relative error of the rank-one form and the coefficient that fits best; averages of three draws, η = 1."""
    rng, out = np.random.default_rng(3), []
    for _ in range(3):
        n, dh = 5 * dx, dx
        X, y, _ = draw(dx, n, 0.5, rng)
        f0, G = rng.standard_normal(dh) / dh**0.5, rng.standard_normal((dh, dx)) / dx**0.5
        f, H = f0 / dh**0.5, X @ G.T
        residual = np.tanh(H) @ f - y
        grad = (residual[:, None] * (1 - np.tanh(H) ** 2) * f).T @ X / n
        beta = X.T @ y / n
        if damping is not None:
            M = np.linalg.inv(X.T @ X / n + damping * np.eye(dx))
            grad, beta = grad @ M, M @ beta
        step, form = -(dh**0.5) * grad, np.outer(f0, beta)
        out.append((np.linalg.norm(step - a * form, 2) / np.linalg.norm(a * form, 2), np.vdot(step, form)))
        out[-1] = (out[-1][0], out[-1][1] / np.vdot(form, form))
    return np.mean(out, axis=0)


def test_single_index_correlation_is_that_of_the_lemmas():
    t, w = theory.two_level_spectrum(0.8)
    options = {"n": 600, "link": target, "noise": 0.5}
    sgd = theory.single_index_correlation("sgd", np.repeat(t, 50), **options)
    assert sgd == pytest.approx(theory.correlation_sgd(CONSTANTS, 0.5, 100 / 600, t, w), rel=1e-12)
    kfac = theory.single_index_correlation("kfac", t, weights=w, dx=100, ridge=0.2, **options)
    assert kfac == pytest.approx(theory.correlation_kfac(CONSTANTS, 0.5, 100 / 600, 0.2, t, w), rel=1e-12)
    assert kfac > sgd


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("kafc", {}, "Did you mean|kfac"),
        ("sgd", {"ridge": 0.1}, "SGD inverts nothing"),
        ("kfac", {"n": 0}, "n=0"),
        ("kfac", {"weights": [0.5, 0.5]}, "no dx"),
        ("kfac", {"n": 2}, "has an inverse"),
    ],
)
def test_single_index_correlation_refuses(method, options, says):
    with pytest.raises(InputError, match=says):
        theory.single_index_correlation(method, [0.5, 1.5], **({"n": 20, "link": target} | options))


@pytest.mark.parametrize("ratio", [-0.18, -5.0, float("nan"), float("inf")])
@pytest.mark.parametrize("noise", [1.0])
def test_ratios_that_are_none_are_refused(ratio, noise):
    for function in (theory.correlation_sgd, lambda *a: theory.correlation_kfac(*a[:3], 0.1, *a[3:])):
        with pytest.raises(InputError, match="ratio="):
            function(CONSTANTS, noise, ratio, [1.0])


def test_noise_variance_and_nodes_are_checked():
    with pytest.raises(InputError, match="noise=-1"):
        theory.correlation_sgd(CONSTANTS, -1.0, 0.1, [1.0])
    with pytest.raises(InputError, match="variance=-1"):
        theory.gaussian_mean(np.cos, -1.0)
    with pytest.raises(InputError, match="nodes=0"):
        theory.rank_one_coefficient(np.cos, 1.0, nodes=0)
    flat = theory.HermiteConstants(c1=0.0, cs2=1.0, cperp2=1.0, variance=1.0)
    with pytest.raises(InputError, match="linear part"):
        theory.correlation_sgd(flat, 0.0, 0.0, [1.0])


def test_a_mean_of_a_twentieth_is_refused():
    with pytest.raises(InputError, match="Subtract the mean"):
        theory.hermite_constants(lambda z: np.sin(z) + 0.05, None, 1.0)


def test_two_level_spectrum_stays_within_its_range():
    eigenvalues, weights = theory.two_level_spectrum(0.4)
    assert eigenvalues @ weights == 1
    with pytest.raises(InputError, match="from 0 to 1"):
        theory.two_level_spectrum(1.2)


@pytest.mark.parametrize("variance", [1.0, 0.5])
def test_hermite_coefficients_are_means_of_derivatives(variance):
    """tanh′, tanh‴ written out, against Gauss–Hermite; of ReLU′ and ReLU″ in closed form."""
    t = np.tanh
    by_hand = {1: lambda z: 1 - t(z) ** 2, 3: lambda z: -2 * (1 - t(z) ** 2) * (1 - 3 * t(z) ** 2)}
    for order, derivative in by_hand.items():
        assert theory.hermite_coefficient(t, order, variance) == pytest.approx(
            theory.gaussian_mean(derivative, variance), rel=1e-6
        )
    assert theory.hermite_coefficient(t, 2, variance) == pytest.approx(0.0, abs=1e-12)

    def relu(z):
        return np.maximum(z, 0)

    assert theory.hermite_coefficient(relu, 1, variance) == pytest.approx(0.5, rel=1e-5)
    assert theory.hermite_coefficient(relu, 2, variance) == pytest.approx((2 * np.pi * variance) ** -0.5, rel=1e-5)


@pytest.mark.parametrize("wrong", [{"order": -1}, {"variance": 0.0}, {"points": 100}])
def test_hermite_coefficients_refuse(wrong):
    with pytest.raises(InputError, match="order"):
        theory.hermite_coefficient(np.tanh, **{"order": 1, "variance": 1.0} | wrong)
