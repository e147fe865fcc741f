"""Where arXiv 2502.01763 errs or can be read in two ways: each reading against what a computation without it gives.

Every function draws a small instance and returns how far the printed and the corrected reading are from the truth,
relative to the truth; the truth is computed without the formula in question (a least-squares solve, a drawn matrix, …).
A corrected reading that is an identity (of cosines of angles, in `orthogonal_product`) cannot fail but by a mistake
here, and stands beside a printed one that does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from layerwise import theory
from layerwise.theory import resolvent, two_level_spectrum

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Relative errors."""

    printed: float
    corrected: float


def _error(found: Array | float, truth: Array | float) -> float:
    return float(np.linalg.norm(np.asarray(found) - truth) / np.linalg.norm(truth))


def _layer(random: np.random.Generator, n: int = 50, o: int = 3, i: int = 5) -> tuple[Array, Array]:
    """Inputs z and gradients g = ∂ℓ/∂h of a layer, one row an example."""
    return random.standard_normal((n, i)) * np.linspace(0.5, 2, i), random.standard_normal((n, o))


def foof_ridge(random: np.random.Generator) -> Readings:
    """argmin_D Ê‖Dz − ηg‖² + (λ/2)‖D‖² by least squares on the stacked system, against η∇(S + ridge)⁻¹.

    >>> found = foof_ridge(np.random.default_rng(0))
    >>> found.printed > 0.01, found.corrected < 1e-10
    (True, True)
    """
    z, g = _layer(random)
    n, i = z.shape
    eta, lam = 0.3, 0.5
    rows = np.vstack([z / n**0.5, (lam / 2) ** 0.5 * np.eye(i)])
    targets = np.vstack([eta * g / n**0.5, np.zeros((i, g.shape[1]))])
    truth = np.linalg.lstsq(rows, targets, rcond=None)[0].T
    S, gradient = z.T @ z / n, g.T @ z / n

    def step(ridge: float) -> Array:
        return eta * gradient @ np.linalg.inv(S + ridge * np.eye(i))

    return Readings(printed=_error(step(lam), truth), corrected=_error(step(lam / 2), truth))


def locoprop_target(random: np.random.Generator) -> Readings:
    """argmin_W ½Ê‖Wz − t‖² + ‖W − W₀‖²/(2η) with t = h, and with t = h − g, against the step −η∇(I + ηS)⁻¹.

    >>> found = locoprop_target(np.random.default_rng(0))
    >>> round(found.printed, 12), found.corrected < 1e-10
    (1.0, True)
    """
    z, g = _layer(random)
    n, i = z.shape
    eta, W = 0.3, random.standard_normal((g.shape[1], i))
    rows = np.vstack([z / n**0.5, eta**-0.5 * np.eye(i)])

    def step(targets: Array) -> Array:
        stacked = np.vstack([targets / n**0.5, eta**-0.5 * W.T])
        return np.linalg.lstsq(rows, stacked, rcond=None)[0].T - W

    truth = -eta * (g.T @ z / n) @ np.linalg.inv(np.eye(i) + eta * z.T @ z / n)
    return Readings(printed=_error(step(z @ W.T), truth), corrected=_error(step(z @ W.T - g), truth))


def norm_of_the_step(random: np.random.Generator) -> Readings:
    """The minimiser of ⟨g, M⟩ + ‖M‖²/(2η) in ‖PᵀMQᵀ‖_F and in ‖P^½MQ^½‖_F, by one dense solve, against −ηP⁻¹gQ⁻¹.

    >>> found = norm_of_the_step(np.random.default_rng(0))
    >>> found.printed > 0.1, found.corrected < 1e-10
    (True, True)
    """
    P, Q = _definite(random, 3), _definite(random, 4)
    g, eta = random.standard_normal((3, 4)), 0.7

    def minimiser(left: Array, right: Array) -> Array:
        A = np.kron(left, right)  # row-major vec(left M rightᵀ)
        return -eta * np.linalg.solve(A.T @ A, g.ravel()).reshape(g.shape)

    truth = -eta * np.linalg.inv(P) @ g @ np.linalg.inv(Q)
    return Readings(printed=_error(minimiser(P.T, Q), truth), corrected=_error(minimiser(_root(P), _root(Q)), truth))


def sign_of_the_derivative(random: np.random.Generator) -> Readings:
    """m′(−λ) with the printed minus, and without, against tr(Sx + λ)⁻²/dx of a drawn sample covariance.

    >>> found = sign_of_the_derivative(np.random.default_rng(0))
    >>> found.printed > 1.9, found.corrected < 0.02
    (True, True)
    """
    lam, dx, n = 0.3, 400, 1200
    eigenvalues, _ = two_level_spectrum(0.5)
    X = random.standard_normal((n, dx)) * np.sqrt(np.repeat(eigenvalues, dx // 2))
    truth = float(np.mean((np.linalg.eigvalsh(X.T @ X / n) + lam) ** -2))
    derivative = resolvent(eigenvalues, ratio=dx / n, ridge=lam).derivative
    return Readings(printed=_error(-derivative, truth), corrected=_error(derivative, truth))


def limit_of_the_ratio(random: np.random.Generator) -> Readings:
    """ "KFAC's correlation tends to one as dx/n → ∞" (as printed), or → 0: 1 − ρ of samples with 64 and 1/800.

    >>> found = limit_of_the_ratio(np.random.default_rng(0))
    >>> found.printed > 0.5, found.corrected < 0.02
    (True, True)
    """
    e = float(random.uniform(0.1, 0.8))

    def missing(dx: int, n: int) -> float:
        eigenvalues = np.repeat(two_level_spectrum(e)[0], dx // 2)
        X, beta = random.standard_normal((n, dx)) * np.sqrt(eigenvalues), random.standard_normal(dx) / dx**0.5
        z = X @ beta
        y = z + (z**2 - 1) / 2**0.5 + random.standard_normal(n)
        # (XᵀX/n + λ)⁻¹Xᵀy/n = Xᵀ(XXᵀ/n + λ)⁻¹y/n: the smaller of the two systems
        if n < dx:
            found = X.T @ np.linalg.solve(X @ X.T / n + 1e-6 * np.eye(n), y)
        else:
            found = np.linalg.solve(X.T @ X / n + 1e-6 * np.eye(dx), X.T @ y)
        return 1 - abs(float(found @ beta)) / float(np.linalg.norm(found) * np.linalg.norm(beta))

    return Readings(printed=missing(1280, 20), corrected=missing(20, 16_000))


def whitened_limit(random: np.random.Generator) -> Readings:
    """Sine of the angle between what least squares on whitened inputs finds and rowsp(G⋆Σ), or rowsp(G⋆Σ^½).

    >>> found = whitened_limit(np.random.default_rng(0))
    >>> found.printed > 0.1, found.corrected < 1e-6
    (True, True)
    """
    dx, k, dy, n = 12, 2, 4, 2000
    Sigma, G = _definite(random, dx), np.linalg.qr(random.standard_normal((dx, k)))[0].T
    x = random.standard_normal((n, dx)) @ _root(Sigma)
    y = x @ (random.standard_normal((dy, k)) @ G).T
    fitted = np.linalg.lstsq(x @ np.linalg.inv(_root(Sigma)), y, rcond=None)[0].T
    found = np.linalg.svd(fitted)[2][:k]
    return Readings(printed=_sine(found, G @ Sigma), corrected=_sine(found, G @ _root(Sigma)))


def low_anisotropy(random: np.random.Generator) -> Readings:
    """The share of negative eigenvalues of (E + Eᵀ)/2, E = 5I + N, at dx = 100: as printed, and with N/√dx.

    >>> found = low_anisotropy(np.random.default_rng(0))
    >>> found.printed > 0.2, found.corrected == 0
    (True, True)
    """
    dx = 100
    N = random.standard_normal((dx, dx))

    def negative(noise: Array) -> float:
        return float(np.mean(np.linalg.eigvalsh(5 * np.eye(dx) + (noise + noise.T) / 2) < 0))

    return Readings(printed=negative(N), corrected=negative(N / dx**0.5))


def noise_of_a_step(random: np.random.Generator) -> Readings:
    """How what noise leaves of KFAC's distance grows from η = 0.1 to 0.5, by its steps and by two recursions.

    With noise that does not depend on η (eq. 16), D⁺ = (1 − η)D + N settles at 1/√(η(2 − η)); with ηN at √(η/(2 − η)).

    >>> found = noise_of_a_step(np.random.default_rng(0))
    >>> found.printed > 0.5, found.corrected < 0.2
    (True, True)
    """
    dx, k, dy, n = 20, 2, 5, 100
    star, F = np.eye(k, dx), random.standard_normal((dy, k))

    def settled(eta: float) -> float:
        G, found = star, []
        for t in range(400):
            x = random.standard_normal((n, dx))
            y = x @ (F @ star).T + 0.01 * random.standard_normal((n, dy))
            gradient = F.T @ (F @ G @ (x.T @ x) - y.T @ x)
            G = G - eta * np.linalg.solve(F.T @ F, np.linalg.solve(x.T @ x, gradient.T).T)
            found.append(_sine(G, star) if t >= 60 else 0.0)
        return float(np.mean(found[60:]))

    def growth(settles: Callable[[float], float]) -> float:
        return settles(0.5) / settles(0.1)

    truth = growth(settled)
    return Readings(
        printed=_error(growth(lambda eta: (eta * (2 - eta)) ** -0.5), truth),
        corrected=_error(growth(lambda eta: (eta / (2 - eta)) ** 0.5), truth),
    )


def orthogonal_product(random: np.random.Generator) -> Readings:
    """s_min(G⋆Gᵀ), which is called orthogonal on the way to Lemma B.5, against 1 and against √(1 − dist²).

    >>> found = orthogonal_product(np.random.default_rng(0))
    >>> found.printed > 0.001, found.corrected < 1e-9
    (True, True)
    """
    dx, k = 12, 3
    star, turned = (np.linalg.qr(random.standard_normal((dx, k)))[0].T for _ in range(2))
    G = np.linalg.qr((star + 0.2 * turned).T)[0].T
    truth = float(np.linalg.svd(star @ G.T, compute_uv=False)[-1])
    return Readings(printed=_error(1.0, truth), corrected=_error((1 - _sine(G, star) ** 2) ** 0.5, truth))


def self_normalised(random: np.random.Generator) -> Readings:
    """By how much ‖Σ w vᵀ Σ̂^−½‖² exceeds Lemma B.4's bound with log((1 + c)/(1 − c)), and with log(2/(1 − c)).

    For w ~ N(0, 1) it is the square norm of dv standard normal numbers, whatever v and n are; c = 0.01. The proof has
    log det(I + (1 + c)/(1 − c) I), which is dv log(2/(1 − c)).

    >>> found = self_normalised(np.random.default_rng(0))
    >>> found.printed > 0.3, found.corrected
    (True, 0.0)
    """
    dv, c, delta = 400, 0.01, 0.01
    truth = float(np.sum(random.standard_normal(dv) ** 2))

    def beyond(logarithm: float) -> float:
        return max(0.0, truth / (8 * dv * logarithm + 26 + 16 * math.log(1 / delta)) - 1)

    return Readings(printed=beyond(math.log((1 + c) / (1 - c))), corrected=beyond(math.log(2 / (1 - c))))


def concentration(random: np.random.Generator) -> Readings:
    """How far (1 − c)Σ ⪯ Sx fails for c = ‖Sx − Σ‖/‖Σ‖ (Lemma E.2), and for the c of isotropic samples, 2√φ + φ.

    φ = dx/n; a sample covariance of N(0, I) has its largest deviation ‖Sx − I‖ near 2√φ + φ.

    >>> found = concentration(np.random.default_rng(0))
    >>> found.printed > 0.1, found.corrected < 1e-9
    (True, True)
    """
    dx, n = 50, 400
    root = np.sqrt(np.logspace(0, -4, dx))
    u = random.standard_normal((n, dx))
    W = u.T @ u / n
    S, Sigma = W * np.outer(root, root), np.diag(root**2)
    plain = float(np.linalg.norm(S - Sigma, 2) / np.linalg.norm(Sigma, 2))
    whitened = 2 * (dx / n) ** 0.5 + dx / n
    least = float(np.linalg.eigvalsh(W)[0])
    return Readings(printed=max(0.0, 1 - plain - least), corrected=max(0.0, 1 - whitened - least))


def transfer_error(random: np.random.Generator) -> Readings:
    """By how much twice Lemma 3.7's bound is exceeded at dist = 0: by the error with the labels' noise, or without.

    >>> found = transfer_error(np.random.default_rng(0))
    >>> found.printed > 10, found.corrected
    (True, 0.0)
    """
    k, dy, n, sigma = 4, 6, 1000, 1.0
    F, Z, fresh = (random.standard_normal(size) for size in ((dy, k), (n, k), (20_000, k)))
    fitted = np.linalg.lstsq(Z, Z @ F.T + sigma * random.standard_normal((n, dy)), rcond=None)[0].T
    missed = fresh @ (fitted - F).T
    noisy = missed - sigma * random.standard_normal(missed.shape)
    bound = theory.transfer_bound(F, largest=1.0, distance=0.0, noise=sigma, samples=n).total()

    def beyond(error: Array) -> float:
        return max(0.0, float(np.mean(np.sum(error**2, axis=1))) / bound - 1)

    return Readings(printed=beyond(noisy), corrected=beyond(missed))


def fisher_of_the_density(random: np.random.Generator) -> Readings:
    """E[s²] with s = ∂p/∂f (as printed) and ∂ log p/∂f, y ~ N(f, σ²), against the Fisher information 1/σ².

    >>> found = fisher_of_the_density(np.random.default_rng(0))
    >>> found.printed > 0.5, found.corrected < 1e-9
    (True, True)
    """
    f, sigma = float(random.standard_normal()), float(random.uniform(0.5, 2))
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights, y = weights / weights.sum(), f + sigma * nodes
    score = (y - f) / sigma**2
    density = np.exp(-((y - f) ** 2) / (2 * sigma**2)) / (2 * np.pi * sigma**2) ** 0.5
    truth = 1 / sigma**2
    return Readings(
        printed=_error(weights @ (score * density) ** 2, truth), corrected=_error(weights @ score**2, truth)
    )


def _definite(random: np.random.Generator, n: int) -> Array:
    V = np.linalg.qr(random.standard_normal((n, n)))[0]
    return (V * np.logspace(-0.7, 0.7, n)) @ V.T


def _root(A: Array) -> Array:
    values, V = np.linalg.eigh(A)
    return (V * np.sqrt(values)) @ V.T


def _sine(A: Array, B: Array) -> float:
    """Of the largest angle between the rows of two matrices."""
    a, b = np.linalg.qr(A.T)[0], np.linalg.qr(B.T)[0]
    return float(np.linalg.norm(a - b @ (b.T @ a), 2))
