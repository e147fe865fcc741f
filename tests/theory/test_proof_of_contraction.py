"""Lemmas B.3–B.5 and B.8, Propositions B.6 and B.7: the steps of Theorem 3.6's proof, and where each stops holding.

Written with numpy alone; `tests/theory/test_linear_representation.py` has Lemmas B.1 and B.2.
"""

import numpy as np
import pytest

DELTA = 0.05


def haar(rows, columns, rng):
    return np.linalg.qr(rng.standard_normal((columns, rows)))[0].T


def turned(target, sine, rng):
    """Orthonormal rows at exactly that distance from a representation, all of them turned."""
    k, dx = target.shape
    V = rng.standard_normal((k, dx))
    V = np.linalg.qr((V - V @ target.T @ target).T)[0].T
    return (1 - sine**2) ** 0.5 * target + sine * V


def power(S, exponent):
    values, V = np.linalg.eigh(S)
    return (V * values**exponent) @ V.T


def norm(A):
    return float(np.linalg.norm(A, 2))


def logdet(A):
    return float(np.linalg.slogdet(A)[1])


@pytest.mark.parametrize(("dv", "dw", "n"), [(3, 1, 20), (10, 4, 15), (40, 2, 200)])
def test_self_normalised_noise_is_below_lemma_b3(dv, dw, n):
    """‖Σ w vᵀ (Q + Σ̂)^−½‖² ≤ 4σ² log det(Q + Σ̂)/det Q + 13 dw σ² + 8σ² log 1/δ, at a fixed Q."""
    rng = np.random.default_rng(0)
    Q, sigma, beyond, log_only = n * np.diag(np.geomspace(0.3, 3, dv)), 0.7, 0, 0
    for _ in range(200):
        V = rng.standard_normal((n, dv)) * np.sqrt(np.geomspace(1, 4, dv))
        W = sigma * rng.standard_normal((n, dw))
        S = V.T @ V
        found = norm(W.T @ V @ power(Q + S, -0.5)) ** 2
        grown = 4 * sigma**2 * (logdet(Q + S) - logdet(Q))
        beyond += found > grown + 13 * dw * sigma**2 + 8 * sigma**2 * np.log(1 / DELTA)
        log_only += found > grown / 8
    assert beyond <= 200 * DELTA
    assert log_only > 0  # an eighth of the first term alone does not do


@pytest.mark.parametrize(("dv", "dw"), [(5, 1), (20, 6)])
def test_gaussian_noise_is_below_lemma_b4(dv, dw):
    """‖Σ w vᵀ Σ̂^−½‖² ≤ 8 dv log(2/(1 − c)) σ² + 26 dw σ² + 16 σ² log 1/δ, and λ_min(Σ̂/n) ≥ (1 − c) λ_min(Σ)."""
    rng, c = np.random.default_rng(1), 0.5
    n, sigma = int(np.ceil(9 / c**2 * (dv + np.log(1 / DELTA)))), 0.3
    Sigma = np.diag(np.geomspace(0.01, 1, dv))
    found, least = [], []
    for _ in range(200):
        V, W = rng.standard_normal((n, dv)) @ np.sqrt(Sigma), sigma * rng.standard_normal((n, dw))
        S = V.T @ V
        found.append(norm(W.T @ V @ power(S, -0.5)) ** 2)
        least.append(np.linalg.eigvalsh(S / n)[0] / Sigma[0, 0])
    bound = 8 * dv * np.log(2 / (1 - c)) * sigma**2 + 26 * dw * sigma**2 + 16 * sigma**2 * np.log(1 / DELTA)
    assert np.mean(np.array(found) > bound) <= DELTA
    assert np.mean(np.array(least) < 1 - c) <= DELTA
    # it is a Gaussian matrix of dw × dv whatever n is, so its square norm lies between dv σ² and (√dv + √dw)² σ²
    assert 0.9 * dv < np.mean(found) / sigma**2 < (dv**0.5 + dw**0.5) ** 2


def fitted(dist, n, sigma, roots, rng, k=3, dx=20, dy=6, condition=4.0):
    """G⋆, F⋆, G at a distance, the head fitted there, and a batch of its own for the representation."""
    target, values = haar(k, dx, rng), np.geomspace(1, 1 / condition, k)
    head = (haar(k, dy, rng).T * values) @ haar(k, k, rng)
    G = turned(target, dist, rng)

    def batch():
        X, E = rng.standard_normal((n, dx)) * roots, sigma * rng.standard_normal((n, dy))
        return X, X @ (head @ target).T + E, E

    X, Y, _ = batch()
    F = np.linalg.lstsq(X @ G.T, Y, rcond=None)[0].T
    return target, head, G, F, batch()


ROOTS = np.sqrt(np.geomspace(0.2, 1, 20))


def inverse_of_the_head(dist, n, sigma, roots=ROOTS, dy=6):
    """‖F⁺‖ s_min(F⋆), which Lemma B.5 has below 2."""
    rng = np.random.default_rng(2)
    return np.array([0.25 / np.linalg.svd(fitted(dist, n, sigma, roots, rng, dy=dy)[3])[1][-1] for _ in range(100)])


def test_the_fitted_head_is_as_well_conditioned_as_lemma_b5_says():
    edge = 0.2 / (4 * 5)  # of dist ≤ 0.2/(κ(F⋆)κ(Σ))
    sigma_bar = 0.25 * ROOTS.min()  # the σ with σ̄ = 1
    assert np.mean(inverse_of_the_head(edge, 300, sigma_bar) > 2) <= DELTA
    # too few samples for that noise; with more labels than rows noise makes the least singular value larger
    assert np.mean(inverse_of_the_head(edge, 12, sigma_bar * 5, dy=3) > 2) > DELTA
    steep = np.sqrt(np.geomspace(1e-4, 1, 20))
    assert np.mean(inverse_of_the_head(0.5, 300, 0.0, steep) > 2) > DELTA  # far outside the basin


@pytest.mark.parametrize("n", [60, 200, 1000])
def test_the_noise_of_a_step_is_that_of_proposition_b6(n):
    """‖F⁺EᵀX(XᵀX)⁻¹‖ against σ √((dx + k + log 1/δ)/(s_min(F⋆)² λ_min(Σ) n)), with isotropic inputs."""
    rng, found = np.random.default_rng(3), []
    for _ in range(60):
        *_, F, (X, _, E) = fitted(0.002, n, 0.01, np.ones(20), rng)
        found.append(norm(np.linalg.pinv(F) @ np.linalg.solve(X.T @ X, X.T @ E).T))
    claimed = 0.01 * ((20 + 3 + np.log(1 / DELTA)) / (0.25**2 * n)) ** 0.5
    assert np.quantile(found, 1 - DELTA) <= 1.5 * claimed
    assert np.mean(found) >= 0.4 * claimed


def orthonormal_factor(eta, dist, sigma, n=400):
    """s_min(R) less Proposition B.7's bound, with γ₁ = 5/2 κ(F⋆) κ(Σ) dist and γ₂ the noise of the step."""
    rng, found = np.random.default_rng(4), []
    for _ in range(40):
        _, _, G, F, (X, Y, E) = fitted(dist, n, sigma, ROOTS, rng)
        noise = norm(np.linalg.pinv(F) @ np.linalg.solve(X.T @ X, X.T @ E).T)
        moved = G - eta * np.linalg.pinv(F) @ (F @ G - np.linalg.solve(X.T @ X, X.T @ Y).T)
        g1, g2 = 2.5 * 4 * 5 * dist, noise
        bound = 1 - 2 * eta * (g1 + 2 * g2 + eta * (g1 + g2) * g2)
        found.append(np.linalg.svd(moved)[1][-1] - max(0.0, bound) ** 0.5)
    return min(found)


@pytest.mark.parametrize("eta", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(("dist", "sigma"), [(0.0005, 0.0), (0.0005, 0.005), (0.0, 0.02)])
def test_orthonormal_rows_cost_no_more_than_proposition_b7_says(eta, dist, sigma):
    assert orthonormal_factor(eta, dist, sigma) >= -1e-12
    if sigma:
        assert orthonormal_factor(eta, dist, sigma) < 0.2  # and it costs something


def left(c, d):
    return (1 - d) / np.sqrt(1 - c * d)


def test_lemma_b8_holds_where_it_says_and_not_below_half_of_it():
    d = np.linspace(0.001, 0.999, 400)
    for c in np.linspace(0.01, 0.499, 40):
        assert np.all(left(c, d) <= 1 - (1 - c) * d + 1e-15)  # ε = c
        assert np.any(left(c, d) > 1 - (1 - 0.49 * c) * d)  # for small d it takes ε ≥ c/2
    for value in d:
        most = 1 - (1 - np.sqrt(1 - value)) / value
        assert 1 - (1 - most) * value <= np.sqrt(1 - value) + 1e-12
        assert 1 - (1 - min(0.999, most + 0.01)) * value > np.sqrt(1 - value)


def test_the_proofs_constants_give_nine_tenths():
    """γ₁ = 1/40 and γ₂ = 1/100 leave (1 − η)/s_min(R) ≤ 1 − 0.9η; twice as much does not."""
    eta = np.linspace(0, 1, 1001)

    def factor(g1, g2):
        return (1 - eta) / np.sqrt(1 - 2 * eta * (g1 + 2 * g2 + eta * (g1 + g2) * g2))

    assert np.all(factor(1 / 40, 1 / 100) <= 1 - 0.9 * eta + 1e-15)
    assert np.any(factor(3 / 40, 3 / 100) > 1 - 0.9 * eta)
    # twice would still do near η = 0, where half of the deflation counts, so that 0.9 has room of a factor two
    assert np.all(factor(2 / 40, 2 / 100) <= 1 - 0.9 * eta + 2e-3)
