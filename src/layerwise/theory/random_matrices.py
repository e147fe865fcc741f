"""The spectrum of a sample covariance in high dimension: Stieltjes transform, its derivative, traces of the resolvent.

A sample covariance is Sx = XᵀX/n with n rows x ~ N(0, Σ) of dx entries, dx/n → φ, and the spectrum H of Σ is given as
atoms (`eigenvalues`) with `weights`, equal ones if left away. Where the paper (arXiv 2502.01763) prints Silverstein's
equation for the companion transform v, the root here is s = λv, in (0, 1), from which no digit is lost at small λ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from layerwise.foundations.errors import InputError, NumericalError, describe

Numbers = Sequence[int | float] | np.ndarray
Number = int | float | np.floating | np.integer


class Transform(NamedTuple):
    """The Stieltjes transform at z = −ridge."""

    m: float
    """m(−λ) = lim tr (Sx + λI)⁻¹ / dx."""
    derivative: float
    """m′(−λ) = lim tr (Sx + λI)⁻² / dx: the true derivative dm/dz, which is positive."""


def stieltjes(eigenvalues: Numbers, *, ratio: Number, ridge: Number = 0.0, weights: Numbers | None = None) -> Transform:
    """m(−λ) = lim tr (Sx + λI)⁻¹ / dx and its derivative m′(−λ), at ridge λ and ratio φ = dx/n (Lemma 3.12).

    s solves s − 1 + φ∫ ts/(ts + λ) dH(t) = 0, and m = ∫ dH(t)/(ts + λ). At λ = 0, where φ < 1 is needed, s = 1 − φ.
    m′ = (φ A₂ m + B₂)/(1 + φλA₂), with A₂ = ∫ t dH/(ts + λ)² and B₂ = ∫ dH/(ts + λ)². It is positive; the paper
    prints it with a minus.

    >>> m, dm = stieltjes([1.0], ratio=0.5)  # without ridge ∫ dH/t / (1 − φ), and 1/(1 − φ)³ for Σ = I
    >>> round(m, 12), round(dm, 12)
    (2.0, 8.0)
    >>> round(stieltjes([1.0, 3.0], ratio=0.0, ridge=1.0).m, 12)  # no sampling noise: ∫ dH/(t + λ)
    0.375
    """
    found = resolvent(eigenvalues, ratio=ratio, ridge=ridge, weights=weights)
    return Transform(found.m, found.derivative)


def marchenko_pastur(*, ratio: Number, ridge: Number = 0.0) -> Transform:
    """m(−λ) and m′(−λ) for Σ = I in closed form: φλm² + (1 − φ + λ)m − 1 = 0, and m′ from its derivative.

    >>> marchenko_pastur(ratio=0.5)
    Transform(m=2.0, derivative=8.0)
    """
    lam, phi, _, _ = _checked(ridge, ratio, [1.0], None)
    b = 1 - phi + lam
    root = np.sqrt(b * b + 4 * phi * lam)
    m = 2 / (b + root) if b > 0 else (root - b) / (2 * phi * lam)
    return Transform(float(m), float((phi * m * m + m) / root))


@dataclass(frozen=True, kw_only=True)
class Resolvent:
    """What the limit of (Sx + λI)⁻¹ says of traces, at one λ, φ and H."""

    s: float
    """λ v(−λ), the root."""
    m: float
    """m(−λ) = lim tr (Sx + λI)⁻¹ / dx."""
    derivative: float
    """m′(−λ) = lim tr (Sx + λI)⁻² / dx."""
    psi1: float
    """Ψ₁ = 1 − λm = lim tr Sx(Sx + λI)⁻¹ / dx."""
    psi2: float
    """Ψ₂ = 1 − 2λm + λ²m′ = lim tr Sx²(Sx + λI)⁻² / dx."""
    psi3: float
    """Ψ₃ = m − λm′ = lim tr Sx(Sx + λI)⁻² / dx."""


def resolvent(eigenvalues: Numbers, *, ratio: Number, ridge: Number = 0.0, weights: Numbers | None = None) -> Resolvent:
    """m, m′ and the Ψ₁, Ψ₂, Ψ₃ of Lemma 3.12, each a sum of positive terms, so that none cancels at large λ.

    With A₁ = ∫ t/(ts+λ), A₂ = ∫ t/(ts+λ)², T₂ = ∫ t²/(ts+λ)², D = 1 + φλA₂:
    Ψ₁ = sA₁, Ψ₂ = s(sT₂ + φλA₁A₂)/D, Ψ₃ = sA₂/D. These equal the definitions in `Resolvent`.

    >>> r = resolvent([0.5, 1.5], ratio=0.4, ridge=0.3)
    >>> bool(abs(r.psi3 - (r.m - 0.3 * r.derivative)) < 1e-14)
    True
    """
    lam, phi, t, w = _checked(ridge, ratio, eigenvalues, weights)
    s = _root(lam, phi, t, w)
    d = t * s + lam
    m, a1 = float(w @ (1 / d)), float(w @ (t / d))
    a2, b2, t2 = float(w @ (t / d / d)), float(w @ (1 / d / d)), float(w @ ((t / d) ** 2))
    D = 1 + phi * lam * a2
    return Resolvent(
        s=s,
        m=m,
        derivative=(phi * a2 * m + b2) / D,
        psi1=s * a1,
        psi2=s * (s * t2 + phi * lam * a1 * a2) / D,
        psi3=s * a2 / D,
    )


def _root(lam: float, phi: float, t: np.ndarray, w: np.ndarray) -> float:
    """The s in (0, 1] of s − 1 + φ∫ ts/(ts + λ) dH = 0.

    The left side rises and is concave, so Newton's steps from s = 0 stay below the root and rise to it.
    """
    if lam == 0:
        return 1 - phi
    s = 0.0
    for _ in range(500):
        d = t * s + lam
        value = s - 1 + phi * float(w @ (t * s / d))
        slope = 1 + phi * float(w @ ((t / d) * (lam / d)))
        following = min(1.0, s - value / slope)
        if following <= s * (1 + 4e-16):  # rounding is all that is left
            return max(s, following)
        s = following
    raise NumericalError(
        describe(f"ridge={lam}, ratio={phi}", "a fixed point within 500 steps", "scale the eigenvalues near 1")
    )


def _checked(
    ridge: Number, ratio: Number, eigenvalues: Numbers, weights: Numbers | None
) -> tuple[float, float, np.ndarray, np.ndarray]:
    """λ, φ, atoms and weights that sum to one, or an error that says which is wrong."""
    lam, phi = float(ridge), float(ratio)
    t, w = spectrum(eigenvalues, weights)
    if not (np.isfinite(lam) and lam >= 0):
        raise InputError(describe(f"ridge={ridge}", "a finite number ≥ 0", "pass e.g. ridge=1e-3"))
    if not (np.isfinite(phi) and phi >= 0):
        raise InputError(describe(f"ratio={ratio}", "dx/n, a finite number ≥ 0", "divide dimension by samples"))
    if lam == 0 and (phi >= 1 or t.min() == 0):
        given = f"ridge=0 with ratio={phi} and smallest eigenvalue {t.min()}"
        raise InputError(describe(given, "a sample covariance that has an inverse", "pass a ridge > 0, e.g. 1e-6"))
    return lam, phi, t, w


def spectrum(eigenvalues: Numbers, weights: Numbers | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Atoms and weights of a population spectrum H as arrays; the weights are scaled to sum to one.

    >>> spectrum([1, 3])[1].tolist()
    [0.5, 0.5]
    """
    t = np.asarray(eigenvalues, dtype=np.float64)
    w = np.ones_like(t) if weights is None else np.asarray(weights, dtype=np.float64)
    if t.ndim != 1 or t.size == 0 or not np.isfinite(t).all() or t.min() < 0 or t.max() == 0:
        given = f"eigenvalues of shape {t.shape}"
        raise InputError(describe(given, "a list of finite numbers ≥ 0, not all 0", "pass the eigenvalues of Σ"))
    if w.shape != t.shape or not np.isfinite(w).all() or w.min() < 0 or w.sum() == 0:
        given = f"weights of shape {w.shape}"
        raise InputError(
            describe(given, f"{t.size} finite numbers ≥ 0, not all 0", "give one weight for each eigenvalue")
        )
    return t, w / w.sum()
