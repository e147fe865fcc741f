"""One step on a single-index model y = σ⋆(β⋆ᵀx) + ε: how well the step's direction agrees with β⋆.

Eq. (12) of arXiv 2502.01763: x ~ N(0, Σ), β⋆ ~ N(0, I/dx), ε ~ N(0, noise²), n samples, φ = dx/n. The spectrum of Σ is
given by `eigenvalues` and `weights`. Where the paper's formulas have a sign or a limit wrong, these are corrected.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from layerwise.foundations.errors import InputError, describe, unknown
from layerwise.theory.random_matrices import Number, Numbers, resolvent, spectrum

Function = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class HermiteConstants:
    """What the lemmas need to know of σ⋆, for z ~ N(0, variance)."""

    c1: float
    """E[σ⋆′(z)], the linear part."""
    cs2: float
    """E[σ⋆(z)²]."""
    cperp2: float
    """cs2 − c1² variance: the energy of σ⋆ that no linear function explains."""
    variance: float
    """tr Σ / dx."""


def hermite_constants(
    function: Function, derivative: Function | None, variance: Number, nodes: int = 128
) -> HermiteConstants:
    """c₁ = E[σ⋆′(z)], c⋆² = E[σ⋆(z)²], c⊥² = c⋆² − c₁² tr(Σ)/dx, for z ~ N(0, variance), by Gauss–Hermite.

    `variance` is tr(Σ)/dx. Lemmas 3.10 and 3.12 use E[σ⋆(z)] = 0 without saying so: a function with another mean is
    refused. With ``derivative=None``, c₁ = E[zσ⋆(z)]/variance (Stein). Functions with a kink have errors near 1/nodes.

    >>> c = hermite_constants(lambda z: z + (z**2 - 1) / 2**0.5, lambda z: 1 + 2**0.5 * z, 1.0)
    >>> round(c.c1, 10), round(c.cs2, 10), round(c.cperp2, 10)
    (1.0, 2.0, 1.0)
    """
    if not (np.isfinite(variance) and variance > 0):
        raise InputError(describe(f"variance={variance}", "tr(Σ)/dx > 0", "pass the mean eigenvalue of Σ"))
    z, w = _normal(variance, nodes)
    values = np.broadcast_to(np.asarray(function(z), dtype=np.float64), z.shape)
    mean, cs2 = float(w @ values), float(w @ values**2)
    if not np.isfinite(cs2):
        raise InputError(describe("a target that is not finite everywhere", "E[σ⋆²] < ∞", "pass another target"))
    if abs(mean) > 5e-3 * cs2**0.5:
        given = f"a target σ⋆ with E[σ⋆(z)] = {mean:.6g} for z ~ N(0, {float(variance):.6g})"
        raise InputError(describe(given, "E[σ⋆(z)] = 0, which Lemmas 3.10 and 3.12 use", "subtract the mean from σ⋆"))
    stein = float(w @ (z * values)) / float(variance)
    c1 = stein if derivative is None else gaussian_mean(derivative, variance, nodes)
    if abs(c1 - stein) > 2e-2 * (cs2 / float(variance)) ** 0.5:
        given = f"a derivative with mean {c1:.6g} where E[zσ⋆(z)]/variance = {stein:.6g}"
        raise InputError(describe(given, "the derivative of the function", "pass σ⋆′, or derivative=None"))
    return HermiteConstants(c1=c1, cs2=cs2, cperp2=max(0.0, cs2 - c1**2 * float(variance)), variance=float(variance))


def gaussian_mean(function: Function, variance: Number, nodes: int = 128) -> float:
    """E[f(z)] for z ~ N(0, variance) by Gauss–Hermite, exact for polynomials of degree below 2 nodes.

    >>> round(gaussian_mean(lambda z: z**4, 2.0), 9)  # 3 variance²
    12.0
    """
    z, w = _normal(variance, nodes)
    return float(w @ np.broadcast_to(np.asarray(function(z), dtype=np.float64), z.shape))


def hermite_coefficient(function: Function, order: int, variance: Number, points: int = 20001) -> float:
    """μ_k = E[f⁽ᵏ⁾(z)] for z ~ N(0, variance), from f alone: E[f(z) He_k(z/s)]/sᵏ with s² = variance (Stein).

    So it is defined where derivatives are not, as for ReLU. By the trapezoidal rule on [−12s, 12s], with a point at 0
    for kinks there; `order` is k.

    >>> [round(hermite_coefficient(lambda z: np.maximum(z, 0), k, 1.0), 4) for k in (1, 2, 4)]
    [0.5, 0.3989, -0.3989]
    """
    if order < 0 or points < 3 or points % 2 == 0 or not (np.isfinite(variance) and variance > 0):
        given = f"order={order}, variance={variance}, points={points}"
        raise InputError(describe(given, "order ≥ 0, variance > 0 and an odd number of points", "change them"))
    s = float(variance) ** 0.5
    z = np.linspace(-12.0, 12.0, points)
    weight = np.exp(-(z**2) / 2)
    values = np.broadcast_to(np.asarray(function(s * z), dtype=np.float64), z.shape)
    polynomial = np.polynomial.hermite_e.hermeval(z, [0.0] * order + [1.0])
    return float(weight @ (values * polynomial) / weight.sum()) / s**order


def _normal(variance: Number, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    if nodes < 1 or not (np.isfinite(variance) and variance >= 0):
        given = f"variance={variance}, nodes={nodes}"
        raise InputError(describe(given, "a variance ≥ 0 and at least one node", "pass the mean eigenvalue of Σ"))
    z, w = np.polynomial.hermite_e.hermegauss(nodes)
    return z * float(variance) ** 0.5, w / w.sum()


def correlation_sgd(
    constants: HermiteConstants, noise: Number, ratio: Number, eigenvalues: Numbers, weights: Numbers | None = None
) -> float:
    """Lemma 3.10, the limit of |β̂ᵀβ⋆|/(‖β̂‖‖β⋆‖) for SGD's direction β̂ = Xᵀy/n.

    ρ = c₁t₁/√((c⋆² + noise²) φ t₁ + c₁² t₂) with t_j = tr(Σʲ)/dx, φ = dx/n, and noise the standard deviation of ε.

    >>> c = hermite_constants(lambda z: z + (z**2 - 1) / 2**0.5, lambda z: 1 + 2**0.5 * z, 1.0)
    >>> round(correlation_sgd(c, 1.0, 900 / 5000, *two_level_spectrum(0.5)), 4)
    0.7474
    """
    t, w = _matching(constants, eigenvalues, weights)
    _check_law(ratio, noise, constants)
    phi, s2 = float(ratio), float(noise) ** 2
    t1, t2 = float(w @ t), float(w @ t**2)
    return abs(constants.c1) * t1 / ((constants.cs2 + s2) * phi * t1 + constants.c1**2 * t2) ** 0.5


def correlation_kfac(
    constants: HermiteConstants,
    noise: Number,
    ratio: Number,
    damping: Number,
    eigenvalues: Numbers,
    weights: Numbers | None = None,
) -> float:
    """Lemma 3.12, the limit of |β̂ᵀβ⋆|/(‖β̂‖‖β⋆‖) for KFAC's direction β̂ = (Sx + λI)⁻¹Xᵀy/n, λ = damping.

    ρ = c₁Ψ₁/√(c₁²Ψ₂ + φ(c⊥² + noise²)Ψ₃) with Ψ₁ = 1 − λm, Ψ₂ = 1 − 2λm + λ²m′, Ψ₃ = m − λm′ at z = −λ, where m′ is the
    true, positive derivative (the paper prints it negative). λ → ∞ gives `correlation_sgd`; φ, λ → 0 gives 1.

    >>> c = hermite_constants(lambda z: z + (z**2 - 1) / 2**0.5, lambda z: 1 + 2**0.5 * z, 1.0)
    >>> round(correlation_kfac(c, 1.0, 900 / 5000, 0.3, *two_level_spectrum(0.5)), 4)
    0.8169
    """
    t, w = _matching(constants, eigenvalues, weights)
    _check_law(ratio, noise, constants)
    r = resolvent(t, ratio=ratio, ridge=damping, weights=w)
    spread = float(ratio) * (constants.cperp2 + float(noise) ** 2) * r.psi3
    return abs(constants.c1) * r.psi1 / (constants.c1**2 * r.psi2 + spread) ** 0.5


def single_index_correlation(
    method: str,
    eigenvalues: Numbers,
    *,
    n: int,
    link: Function,
    ridge: Number = 0.0,
    noise: Number = 0.0,
    weights: Numbers | None = None,
    dx: int | None = None,
) -> float:
    """|β̂ᵀβ⋆|/(‖β̂‖‖β⋆‖) after one step of "sgd" (Lemma 3.10) or "kfac" (Lemma 3.12) on n samples.

    Args:
        method: "sgd", with β̂ = Xᵀy/n, or "kfac", with β̂ = (Sx + λI)⁻¹Xᵀy/n.
        eigenvalues: those of Σ, all dx of them; or distinct ones with `weights`, and dx.
        n: the number of samples.
        link: σ⋆, from an array to an array; its mean under N(0, tr Σ/dx) must be zero.
        ridge: λ of KFAC; SGD has none.
        noise: the standard deviation of ε.
        weights: of the eigenvalues, equal if left away.
        dx: the dimension of x, if it is not the number of eigenvalues.

    >>> link = lambda z: z + (z**2 - 1) / 2**0.5
    >>> eigenvalues = [1.5] * 450 + [0.5] * 450
    >>> round(single_index_correlation("kfac", eigenvalues, n=5000, ridge=0.3, link=link, noise=1.0), 4)
    0.8169
    >>> round(single_index_correlation("sgd", [1.5, 0.5], dx=900, n=5000, link=link, noise=1.0), 4)
    0.7474
    """
    t, w = spectrum(eigenvalues, weights)
    if dx is None and weights is not None:
        given = f"weights of {w.size} eigenvalues and no dx"
        raise InputError(describe(given, "the dimension of x", "pass dx="))
    size = t.size if dx is None else dx
    if n < 1 or size < 1:
        raise InputError(describe(f"n={n}, dx={size}", "numbers ≥ 1", "pass the samples and the dimension"))
    constants = hermite_constants(link, None, float(w @ t))
    if method == "kfac":
        return correlation_kfac(constants, noise, size / n, ridge, t, w)
    if method != "sgd":
        raise InputError(unknown("method", method, ("sgd", "kfac")))
    if ridge:
        raise InputError(describe(f"ridge={ridge} for SGD", "none: SGD inverts nothing", 'use "kfac" or leave it out'))
    return correlation_sgd(constants, noise, size / n, t, w)


def _check_law(ratio: Number, noise: Number, constants: HermiteConstants) -> None:
    """Refuse what is no ratio or no noise, and a target of which nothing linear can be learned."""
    if not (np.isfinite(ratio) and ratio >= 0):
        raise InputError(describe(f"ratio={ratio}", "dx/n, a finite number ≥ 0", "divide dimension by samples"))
    if not (np.isfinite(noise) and noise >= 0):
        raise InputError(describe(f"noise={noise}", "a standard deviation ≥ 0", "leave the sign away"))
    if constants.c1 == 0:
        raise InputError(describe("a target with c₁ = 0", "a linear part", "one step learns nothing of this target"))


def _matching(
    constants: HermiteConstants, eigenvalues: Numbers, weights: Numbers | None
) -> tuple[np.ndarray, np.ndarray]:
    t, w = spectrum(eigenvalues, weights)
    if abs(float(w @ t) - constants.variance) > 1e-6 * constants.variance:
        given = f"constants at variance {constants.variance:.8g} and a spectrum of mean {float(w @ t):.8g}"
        raise InputError(describe(given, "variance = tr(Σ)/dx", "compute hermite_constants at the spectrum's mean"))
    return t, w


def two_level_spectrum(e: Number) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues and weights of Σ^(e) = diag(1 + e (first half), 1 − e (second half)), eq. (14); its mean is 1.

    >>> [a.tolist() for a in two_level_spectrum(0.5)]
    [[1.5, 0.5], [0.5, 0.5]]
    """
    if not 0 <= e <= 1:
        raise InputError(describe(f"e={e}", "a number from 0 to 1, so that Σ has no negative eigenvalue", "pass |e|"))
    return np.array([1 + float(e), 1 - float(e)]), np.array([0.5, 0.5])


def two_level_correlations(constants: HermiteConstants, noise: Number, ratio: Number, e: Number) -> tuple[float, float]:
    """ρ of SGD and of KFAC with λ → 0 for the covariance (14) in closed form, φ < 1.

    ρ_SGD = c₁/√(φ(c⋆² + noise²) + c₁²(1 + e²)), ρ_KFAC = c₁/√(c₁² + φ(c⊥² + noise²)/((1 − φ)(1 − e²))).

    >>> c = hermite_constants(lambda z: z + (z**2 - 1) / 2**0.5, lambda z: 1 + 2**0.5 * z, 1.0)
    >>> [round(rho, 4) for rho in two_level_correlations(c, 1.0, 200 / 6000, 0.8)]
    [0.7581, 0.9161]
    """
    t, w = two_level_spectrum(e)
    _matching(constants, t, w)
    _check_law(ratio, noise, constants)
    phi, s2, c1, e2 = float(ratio), float(noise) ** 2, abs(constants.c1), float(e) ** 2
    if not 0 <= phi < 1:
        raise InputError(describe(f"ratio={ratio}", "dx/n in [0, 1) without damping", "use correlation_kfac"))
    sgd = c1 / (phi * (constants.cs2 + s2) + c1**2 * (1 + e2)) ** 0.5
    if e2 == 1:
        return sgd, 0.0
    return sgd, c1 / (c1**2 + phi * (constants.cperp2 + s2) / ((1 - phi) * (1 - e2))) ** 0.5


def rank_one_coefficient(derivative: Function, variance: Number, nodes: int = 128) -> float:
    """Theorem 3.9: a = E[σ′(z)], z ~ N(0, tr Σ/dx), for the student's activation σ.

    One step from f = dh^(−½) f₀, f₀ ~ N(0, I/dh), G₀ iid N(0, 1/dx), with η_G = η√dh, is G₁ ≈ G₀ + a η f₀ β̂ᵀ in
    operator norm, β̂ = Xᵀy/n for SGD and (Sx + λI)⁻¹Xᵀy/n for KFAC.

    >>> round(rank_one_coefficient(lambda z: 1 / np.cosh(z) ** 2, 1.0), 6)
    0.605706
    """
    return gaussian_mean(derivative, variance, nodes)
