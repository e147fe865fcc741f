"""What is known in closed form of learning a step size: Wu (2023), chapter 5 and appendix D, corrected.

Gradient descent with step size η, t steps. First on a quadratic ½wᵀHw with eigenvalues λ₁ = L ≥ … ≥ λ_d = α of H and
coordinates c of the start in its eigenbasis, ‖c‖ = 1: bounds on the derivative of F(η) = f(w_t), the naive
meta-objective, and of F(η) = log f(w_t) / t. Then on least squares with Gaussian inputs, unit signal and noise σ: the
expected error of w_t, of the fully trained w, and the step sizes that training loss and validation loss ask for.
`layerwise.meta` computes what is bounded and predicted here.
"""

import math
from numbers import Integral
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from layerwise.foundations.errors import InputError, describe

Array = np.ndarray
Number = int | float


class Edges(NamedTuple):
    """The least and the largest eigenvalue other than zero."""

    least: float
    largest: float


# --- the quadratic inner problem --------------------------------------------------------------------------------


def naive_gradient_bound(eigenvalues: Float[Array, "d"], eta: Number, steps: int) -> float:
    """|F'(η)| ≤ t L² max(|1 − ηα|, |1 − ηL|)^(2t−1) of F = f(w_t), 0 < η < 2/L (Theorem 5.3.1): it vanishes with t.

    >>> naive_gradient_bound(np.array([1.0, 2.0]), eta=0.5, steps=10)
    7.62939453125e-05
    """
    alpha, L = _spectrum(eigenvalues)
    steps = _steps(steps)
    if not 0 < eta < 2 / L:
        raise InputError(describe(f"eta={eta}", f"0 < η < 2/L = {2 / L:g}", "use naive_gradient_floor above 2/L"))
    return steps * L**2 * max(abs(1 - eta * alpha), abs(1 - eta * L)) ** (2 * steps - 1)


def naive_gradient_floor(eigenvalues: Float[Array, "d"], c: Float[Array, "d"], eta: Number, steps: int) -> float:
    """|F'(η)| ≥ c₁² L² t (ηL − 1)^(2t−1) − L² t of F = f(w_t), η > 2/L (Theorem 5.3.1): it explodes with t.

    >>> naive_gradient_floor(np.array([1.0, 2.0]), np.array([0.6, 0.8]), eta=2.0, steps=2) > 130
    True
    """
    _, L = _spectrum(eigenvalues)
    steps = _steps(steps)
    if not eta > 2 / L:
        raise InputError(describe(f"eta={eta}", f"η > 2/L = {2 / L:g}", "use naive_gradient_bound below 2/L"))
    c_first, _ = _ends(eigenvalues, c)
    with np.errstate(over="ignore"):
        growth = float(np.float64(eta * L - 1) ** (2 * steps - 1))  # ∞ where it overflows; Python's own power raises
    return c_first**2 * L**2 * steps * growth - L**2 * steps


def log_gradient_bound(eigenvalues: Float[Array, "d"], c: Float[Array, "d"]) -> float:
    """|F'(η)| ≤ 4L³ / (c_min² α (L − α)) of F = log f(w_t)/t, for every η ≥ 0 and t (Claim 5.3.5).

    `c_min` is the smaller of the start's coordinates along the first and the last eigenvector; no bound, ∞, where it is
    zero.

    >>> log_gradient_bound(np.array([1.0, 2.0]), np.array([0.6, 0.8]))
    88.88888888888889
    """
    alpha, L = _spectrum(eigenvalues)
    share = min(_ends(eigenvalues, c)) ** 2
    return 4 * L**3 / (share * alpha * (L - alpha)) if share > 0 else math.inf


def log_gradient_floor(
    eigenvalues: Float[Array, "d"], c: Float[Array, "d"], distance: Number, largest: Number
) -> float:
    """|F'(η)| ≥ 2ε c_min² min(α³/L, 1/M²) of F = log f(w_t)/t, where |η − η*| ≥ ε and η ≤ M (Claim 5.3.6).

    Args:
        eigenvalues: of H.
        c: coordinates of the start in the eigenbasis.
        distance: ε, below 1/L.
        largest: M, at least 2/α.

    >>> log_gradient_floor(np.array([1.0, 2.0]), np.array([0.6, 0.8]), distance=0.1, largest=2.0)
    0.018
    """
    alpha, L = _spectrum(eigenvalues)
    if not 0 < distance < 1 / L:
        raise InputError(describe(f"distance={distance}", f"0 < ε < 1/L = {1 / L:g}", "take a smaller one"))
    if not largest >= 2 / alpha:
        raise InputError(describe(f"largest={largest}", f"M ≥ 2/α = {2 / alpha:g}", "take a larger one"))
    return 2 * distance * min(_ends(eigenvalues, c)) ** 2 * min(alpha**3 / L, 1 / largest**2)


# --- least squares ----------------------------------------------------------------------------------------------


def descent_error(eigenvalues: Float[Array, "r"], eta: Number, steps: int, *, n: int, d: int, noise: Number) -> float:
    """E‖w_t − w*‖² of gradient descent from 0, over the signal w* (uniform on the unit sphere) and the labels' noise.

    (1/d)[Σ_i (1 − ηλ_i)^(2t) + d − r] + σ² Σ_i (1 − (1 − ηλ_i)^t)² / (n λ_i), with the r eigenvalues λ_i > 0 of XᵀX/n;
    exact for the given inputs X. The expected validation loss is half of it plus σ²/2.

    Args:
        eigenvalues: those of XᵀX/n that are not zero, min(n, d) of them.
        eta: step size η > 0.
        steps: t ≥ 1.
        n: training examples.
        d: dimension.
        noise: standard deviation σ of the labels.

    >>> descent_error(np.ones(4), eta=1.0, steps=1, n=4, d=8, noise=0.0)
    0.5
    """
    lam = np.asarray(eigenvalues, dtype=float)
    steps = _steps(steps)
    if len(lam) != min(n, d) or not (lam > 0).all():
        given = f"{len(lam)} eigenvalues for n={n}, d={d}"
        raise InputError(describe(given, f"the {min(n, d)} positive ones of XᵀX/n", "leave out those that are zero"))
    if not (eta > 0 and math.isfinite(eta)):
        raise InputError(describe(f"eta={eta}", "a finite step size > 0", "pass e.g. eta=0.1"))
    with np.errstate(over="ignore"):  # ∞ where a step size diverges
        power = (1 - eta * lam) ** steps
        signal = float((power**2).sum() + d - len(lam)) / d
        per_noise = float(((1 - power) ** 2 / (n * lam)).sum())
    return signal + (float(noise) ** 2 * per_noise if noise else 0.0)


def converged_error(n: int, d: int, noise: Number) -> float:
    """E‖w − w*‖² of the least-norm solution: 1 − n/d + σ² n/(d − n − 1) for n < d − 1, σ² d/(n − d − 1) for n > d + 1.

    The mean over inputs, too. With noise it is infinite in between: there the smallest eigenvalue is too near to zero.

    >>> converged_error(100, 200, noise=1.0), converged_error(1000, 200, noise=1.0)
    (1.5101010101010102, 0.2503128911138924)
    """
    _sizes(n, d)
    signal = max(0.0, 1 - n / d)
    if noise and d - 1 <= n <= d + 1:
        return math.inf
    return signal + (noise**2 * min(n, d) / (abs(d - n) - 1) if noise else 0.0)


def spectrum_edges(n: int, d: int) -> Edges:
    """(1 ∓ √(d/n))², between which the eigenvalues of XᵀX/n other than zero lie for large n and d.

    >>> spectrum_edges(100, 100)
    Edges(least=0.0, largest=4.0)
    """
    _sizes(n, d)
    root = math.sqrt(d / n)
    return Edges((1 - root) ** 2, (1 + root) ** 2)


def training_step(n: int, d: int) -> float:
    """2/(λ_max + λ_min) = 1/(1 + d/n): the step size at which the training loss falls fastest, whatever t and d are.

    >>> training_step(100, 100), training_step(50, 200)
    (0.5, 0.2)
    """
    _sizes(n, d)
    return 1 / (1 + d / n)


def validation_step(n: int, d: int, noise: Number, steps: int) -> float:
    """η = 1 / (t [σ² d/n + 2(1 + d/n)]), the step size of least expected error where ηt is small: large noise, n < d.

    Ours, from the error to second order in s = ηt: 1 − 2s + s² [σ² d/n + 2(1 + d/n)], by Σλ = d and Σλ² ≈ d(1 + d/n).
    The signal is learned in proportion to s, the noise in proportion to s², so that η is of order 1/t (Theorem 5.4.1).
    At σ = 3 and d/n = 4 the best step size is some 30 % larger, at σ = 8 within 5 % of it.

    >>> round(20 * validation_step(50, 200, noise=3.0, steps=20), 4)
    0.0217
    """
    _sizes(n, d)
    return 1 / (_steps(steps) * (noise**2 * d / n + 2 * (1 + d / n)))


# --- what is refused --------------------------------------------------------------------------------------------


def _spectrum(eigenvalues: Float[Array, "d"]) -> Edges:
    lam = np.asarray(eigenvalues, dtype=float)
    if lam.ndim != 1 or len(lam) < 2 or not (lam > 0).all() or not np.isfinite(lam).all() or lam.min() == lam.max():
        given = f"eigenvalues of shape {lam.shape}" + (f" from {lam.min():g} to {lam.max():g}" if lam.size else "")
        raise InputError(describe(given, "two or more, positive, not all equal", "take a positive definite H"))
    return Edges(float(lam.min()), float(lam.max()))


def _ends(eigenvalues: Float[Array, "d"], c: Float[Array, "d"]) -> tuple[float, float]:
    """|c₁| and |c_d|: along the largest and the smallest eigenvalue, of a start of unit norm."""
    lam, c = np.asarray(eigenvalues, dtype=float), np.asarray(c, dtype=float)
    if lam.shape != c.shape:
        given = f"c of shape {c.shape} for eigenvalues of shape {lam.shape}"
        raise InputError(describe(given, "one coordinate for each eigenvalue", "project the start on the eigenvectors"))
    if not abs(np.linalg.norm(c) - 1) < 1e-6:
        given = f"c of norm {np.linalg.norm(c):g}"
        raise InputError(describe(given, "a start of unit norm", "divide it by its norm"))
    return abs(float(c[lam.argmax()])), abs(float(c[lam.argmin()]))


def _steps(steps: int) -> int:
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
        raise InputError(describe(f"steps={steps!r}", "an integer t ≥ 1", "pass e.g. steps=40"))
    return int(steps)


def _sizes(n: int, d: int) -> None:
    if n < 1 or d < 1:
        raise InputError(describe(f"n={n}, d={d}", "integers ≥ 1", "pass e.g. n=100, d=200"))
