"""Hessians of random networks: closed forms against draws, with tolerances in standard errors, and exact cases."""

import math

import numpy as np
import pytest

from error_sentences import WORDED
from layerwise import theory
from layerwise.foundations.errors import InputError


def within(found: np.ndarray, expected: float, errors: float = 4) -> bool:
    """Whether the mean of draws is what is expected, up to so many of its standard errors."""
    return abs(found.mean() - expected) <= errors * found.std(ddof=1) / math.sqrt(len(found))


def network(n: int, c: int = 4, seed: int = 0, centred: bool = False):
    rng = np.random.default_rng(seed)
    d = round(n**1.4)
    W1, W2 = rng.standard_normal((n, d)) / math.sqrt(d), rng.standard_normal((c, n)) / math.sqrt(n)
    return rng, W1 - W1.mean(1, keepdims=True) if centred else W1, W2


def leading(M: np.ndarray, k: int) -> np.ndarray:
    return np.linalg.eigh(M)[1][:, -k:]


def overlap(M: np.ndarray, other: np.ndarray, k: int) -> float:
    return float(((leading(M, k).T @ leading(other, k)) ** 2).sum() / k)


def test_moments_of_rectified_gaussians():
    x = np.maximum(np.random.default_rng(0).standard_normal(200_000), 0)
    moments = theory.rectified_gaussian()
    assert within(x, moments.mean)
    assert within((x - moments.mean) ** 2, moments.variance)
    assert within((x - moments.mean) ** 4, moments.fourth)


def test_the_spectrum_of_inputs_is_that_of_the_moment():
    d = 7
    mean, variance, _ = theory.rectified_gaussian()
    S = (variance * np.eye(d) + mean**2 * np.ones((d, d))) / d
    leading, others = theory.rectified_input_spectrum(d)
    np.testing.assert_allclose(np.linalg.eigvalsh(S), [others] * (d - 1) + [leading], rtol=1e-12)
    with pytest.raises(InputError, match="d ≥ 1"):
        theory.rectified_input_spectrum(0)


def test_how_often_units_are_active():
    rng, W1, _ = network(100)
    active = np.maximum(rng.standard_normal((4000, W1.shape[1])), 0) @ W1.T > 0
    q = theory.active_probability(W1)
    misses = (active.mean(0) - q) / np.sqrt(q * (1 - q) / len(active))
    assert np.sqrt((misses**2).mean()) < 1.5  # 1 but for what d = 631 lacks of the central limit
    assert (q * (1 - q)).mean() < 0.23  # were each ½, as is printed, it would be .25
    centred = theory.active_probability(network(100, centred=True)[1])
    np.testing.assert_allclose(centred, 0.5, atol=1e-12)
    with pytest.raises(InputError, match="finite rows"):
        theory.active_probability(np.zeros((2, 3)))


def test_the_square_of_the_share():
    g = np.random.default_rng(0).standard_normal(20_000) / math.sqrt(math.pi - 1)
    q = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in g])
    assert within(q, 0.5)
    assert within(q**2, theory.mean_squared_probability())
    assert theory.printed_overlap() == pytest.approx(0.829, abs=5e-4)


@pytest.mark.parametrize("centred", [False, True])
def test_the_output_hessian_of_a_network(centred):
    """Against the mean over drawn inputs: the corrected form is right, the printed one for centred rows alone."""
    c = 4
    rng, W1, W2 = network(300, c, centred=centred)
    pre = np.maximum(rng.standard_normal((3000, W1.shape[1])), 0) @ W1.T
    D = (pre > 0).astype(float)
    logits = np.maximum(pre, 0) @ W2.T
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    Q = np.sqrt(p)[:, :, None] * (np.eye(c) - p[:, None, :])  # A = QᵀQ
    B = (Q @ W2 * D[:, None, :]).reshape(-1, 300)
    M, A = B.T @ B / len(D), np.einsum("ski,skj->ij", Q, Q) / len(D)
    corrected = theory.initial_output_hessian(W2, A, theory.active_probability(W1))
    printed = theory.printed_initial_output_hessian(W2, A)
    assert overlap(M, corrected, c - 1) > 0.99
    assert np.linalg.norm(M - corrected) < 0.1 * np.linalg.norm(M)
    if centred:
        assert overlap(M, printed, c - 1) > 0.99
    else:
        assert overlap(M, printed, c - 1) == pytest.approx(theory.printed_overlap(), abs=0.06)


def test_deeper_networks():
    rng = np.random.default_rng(0)
    W2, W3 = rng.standard_normal((5, 6)), rng.standard_normal((3, 5))
    A = np.eye(3) - 1 / 3
    found = theory.deep_output_hessian([W2, W3], A)
    np.testing.assert_allclose(found, (W3 @ W2).T @ A @ (W3 @ W2) / 16, rtol=1e-12)
    assert np.linalg.matrix_rank(found) == 2
    np.testing.assert_allclose(theory.deep_output_hessian([], A), A)
    with pytest.raises(InputError, match="follow one another"):
        theory.deep_output_hessian([W3, W2], A)


# --- two models --------------------------------------------------------------------------------------------------


def haar(rng: np.random.Generator, size: int) -> np.ndarray:
    Q, R = np.linalg.qr(rng.standard_normal((size, size)))
    return Q * np.sign(np.diagonal(R))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_overlap_of_two_models(k):
    """M and S that meet the condition, with random bases of outputs: the mean over draws is (k/m)(t₁ · t₂)²."""
    m, n, draws = 5, 6, 200
    tau, gamma = np.linspace(2, 1, m), np.array([5.0, 1.0, 0.9, 0.5, 0.2, 0.1])
    assert theory.is_led_by_one_input(tau, gamma)
    rng = np.random.default_rng(0)
    V1, V2 = haar(rng, n), haar(rng, n)
    found = []
    for _ in range(draws):
        spaces = []
        for V in (V1, V2):
            U = haar(rng, m)
            spaces.append(leading(np.kron(U * tau @ U.T, V * gamma @ V.T), k))
        found.append(((spaces[0].T @ spaces[1]) ** 2).sum() / k)
    expected = theory.shared_overlap(V1[:, 0], V2[:, 0], k, m)
    assert expected == pytest.approx(k / m * (V1[:, 0] @ V2[:, 0]) ** 2)
    if k == m:
        np.testing.assert_allclose(found, expected, rtol=1e-9)  # both spaces are then all of u ⊗ t
    else:
        assert within(np.array(found), expected, 3)


def test_the_condition_of_the_overlap():
    tau, gamma = np.array([1.0, 4.0, 2.0]), np.array([0.5, 6.0, 2.0])
    assert not theory.is_led_by_one_input(tau, gamma)  # 1 · 6 < 4 · 2
    assert theory.is_led_by_one_input(tau, gamma, k=2)  # 2 · 6 > 4 · 2
    t = np.array([1.0, 0.0])
    for wrong in (lambda: theory.shared_overlap(t, t, 4, 3), lambda: theory.shared_overlap(t, 2 * t, 1, 3)):
        with pytest.raises(InputError, match=WORDED):
            wrong()
    with pytest.raises(InputError, match="1 ≤ k ≤ m"):
        theory.is_led_by_one_input(tau, gamma, k=4)
