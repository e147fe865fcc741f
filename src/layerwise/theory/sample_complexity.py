"""How many samples one step needs until its direction has a given correlation with β⋆ (single-index model).

The lemmas of `layerwise.theory.single_index` give ρ at a ratio φ = dx/n; here they are solved for n/dx = 1/φ. Where no
number of samples gives the correlation asked for, the answer is ∞: such a boundary does not move with the sample size.
With `damping` ∞ the step is SGD's, since λ(Sx + λI)⁻¹ → I.
"""

import math
from collections.abc import Callable

import numpy as np

from layerwise.foundations.errors import InputError, describe
from layerwise.theory.random_matrices import Number, Numbers, spectrum
from layerwise.theory.single_index import HermiteConstants, correlation_kfac, correlation_sgd

LEAST, MOST = 1e-9, 1e4
"""Ratios φ = dx/n between which is searched."""
TINY = 1e-12
"""Least λ, relative to the largest eigenvalue, where the best one is zero."""


def one_step_correlation(
    constants: HermiteConstants,
    *,
    noise: Number,
    ratio: Number,
    damping: Number,
    eigenvalues: Numbers,
    weights: Numbers | None = None,
) -> float:
    """ρ of Lemma 3.12 at a damping λ, or of Lemma 3.10 (SGD) at λ = ∞.

    >>> c = HermiteConstants(c1=1.0, cs2=2.0, cperp2=1.0, variance=1.0)
    >>> round(one_step_correlation(c, noise=1.0, ratio=0.18, damping=math.inf, eigenvalues=[1.5, 0.5]), 4)
    0.7474
    """
    _check_damping(damping)
    if math.isinf(damping):
        return correlation_sgd(constants, noise, ratio, eigenvalues, weights)
    return correlation_kfac(constants, noise, ratio, damping, eigenvalues, weights)


def best_damping(constants: HermiteConstants, *, noise: Number, ratio: Number) -> float:
    """λ⋆ = φ(c⊥² + noise²)/c₁², at which ρ of Lemma 3.12 is largest, whatever the spectrum of Σ.

    β⋆ is isotropic, and to estimators linear in y c⊥ acts as noise, so that the ridge estimator with λ⋆ is the best
    of them (it is the posterior mean where c⊥ = 0; a nonlinear fit can use c⊥ as well). There
    c₁²Ψ₂ + φ(c⊥² + noise²)Ψ₃ = c₁²(Ψ₂ + λ⋆Ψ₃) = c₁²Ψ₁, so ρ² = Ψ₁.

    >>> best_damping(HermiteConstants(c1=1.0, cs2=2.0, cperp2=1.0, variance=1.0), noise=1.0, ratio=0.25)
    0.5
    """
    if constants.c1 == 0:
        raise InputError(describe("a target with c₁ = 0", "a linear part", "one step learns nothing of this target"))
    if not (ratio >= 0 and noise >= 0):
        raise InputError(describe(f"ratio={ratio}, noise={noise}", "numbers ≥ 0", "leave the signs away"))
    return float(ratio) * (constants.cperp2 + float(noise) ** 2) / constants.c1**2


def correlation_limit(damping: Number, eigenvalues: Numbers, weights: Numbers | None = None) -> float:
    """ρ with infinitely many samples: ∫ h dH / √(∫ h² dH) with h(t) = t/(t + λ), and h(t) = t at λ = ∞ (SGD).

    For eigenvalues 1 ± e SGD has 1/√(1 + e²). With λ → 0 it is 1, or √(the share of eigenvalues that are not zero).

    >>> round(correlation_limit(math.inf, [1.75, 0.25]), 9)
    0.8
    """
    _check_damping(damping)
    t, w = spectrum(eigenvalues, weights)
    if math.isinf(damping):
        h = t
    elif damping == 0:
        h = (t > 0).astype(np.float64)
    else:
        h = t / (t + float(damping))
    return float(w @ h) / float(w @ h**2) ** 0.5


def samples_needed(
    correlation: Number,
    constants: HermiteConstants,
    *,
    noise: Number,
    eigenvalues: Numbers,
    weights: Numbers | None = None,
    damping: Number | None = None,
) -> float:
    """The least n/dx from which on ρ ≥ `correlation`: by Lemma 3.12 at a damping λ, by Lemma 3.10 (SGD) at λ = ∞.

    ``damping=None`` is KFAC at the best λ for each n (`best_damping`). ∞ where `correlation_limit` is below
    `correlation`, where c₁ = 0, or n/dx above 1e9; n/dx below 1e-4 is answered by 1e-4.
    With r = 1/ρ² − 1, s₂ = noise² and H the spectrum of Σ, t₁ = ∫ t dH, t₂ = ∫ t² dH:

    - SGD: n/dx = (c⋆² + s₂) / (c₁² (t₁/ρ² − t₂/t₁)); ∞ if t₁²/t₂ ≤ ρ².
    - KFAC, λ → 0: n/dx = 1 + (c⊥² + s₂) ∫ dH/t / (c₁² r).
    - KFAC, best λ, Σ = I: n/dx = ρ² + (c⊥² + s₂)/(c₁² r).

    At a fixed small λ, ρ falls to a minimum near n = dx and is larger on both sides; the side of many samples counts.

    >>> c = HermiteConstants(c1=1.0, cs2=2.0, cperp2=1.0, variance=1.0)
    >>> for e in (0.0, 0.6, 0.8):
    ...     common = {"noise": 1.0, "eigenvalues": [1 + e, 1 - e]}
    ...     [round(samples_needed(0.8, c, damping=damping, **common), 3) for damping in (math.inf, 1e-9, None)]
    [5.333, 4.556, 4.196]
    [14.815, 6.556, 5.403]
    [inf, 10.877, 7.742]
    """
    if not 0 < correlation < 1:
        raise InputError(describe(f"correlation={correlation}", "a number between 0 and 1", "pass e.g. 0.8"))
    if damping is not None:
        _check_damping(damping)
    t, w = spectrum(eigenvalues, weights)
    if constants.c1 == 0 or correlation >= correlation_limit(0 if damping is None else damping, t, w):
        return math.inf

    def enough(phi: float) -> bool:
        at = best_damping(constants, noise=noise, ratio=phi) if damping is None else float(damping)
        if damping is None:
            at = max(at, TINY * float(t.max()))  # λ⋆ is 0 without noise, where Sx may have no inverse
        if at == 0 and (phi >= 1 or t.min() == 0):  # Sx has no inverse
            return False
        common = {"noise": noise, "ratio": phi, "eigenvalues": t, "weights": w}
        return one_step_correlation(constants, damping=at, **common) >= float(correlation)

    last = _last_enough(enough)
    return 1 / last if last > 0 else math.inf


def _check_damping(damping: Number) -> None:
    if not damping >= 0:
        raise InputError(describe(f"damping={damping}", "a number ≥ 0, or math.inf for SGD", "pass e.g. 1e-6"))


def _last_enough(enough: Callable[[float], bool]) -> float:
    """The φ up to which all φ of a grid are enough, by bisection between it and the next; 0 if the least is not.

    At small λ the correlation dips between φ = 1 and 2. The grid is dense there, so as not to step over the dip.

    >>> round(_last_enough(lambda phi: phi <= 0.3), 12)
    0.3
    """
    coarse = np.geomspace(LEAST, MOST, 1 + 8 * round(math.log10(MOST / LEAST)))
    grid = np.unique(np.concatenate([coarse, np.geomspace(0.3, 4, 500)]))
    first = next((i for i, phi in enumerate(grid) if not enough(float(phi))), None)
    if first is None:
        return MOST
    if first == 0:
        return 0.0
    low, high = float(grid[first - 1]), float(grid[first])
    for _ in range(48):  # until little more than rounding is left
        middle = (low + high) / 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low
