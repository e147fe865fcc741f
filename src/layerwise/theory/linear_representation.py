"""Linear representation learning y = F⋆G⋆x + ε: how slow SGD must be, how fast KFAC is, what transfer costs.

Propositions, theorem and lemma of arXiv 2502.01763, Section 3.1, as numbers; the recursions they speak of are here too.
Rows of a representation G (k × dx) are orthonormal; dist(G, G⋆) = ‖G(I − G⋆ᵀG⋆)‖, eq. (7).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from layerwise.foundations.errors import InputError, describe, unknown
from layerwise.theory.random_matrices import Number

FORMS = ("slow", "unstable")


@dataclass(frozen=True, kw_only=True)
class LowerBoundProblem:
    """The construction in the proof of Proposition 3.5."""

    gram: Float[np.ndarray, "k k"]
    """F⋆ᵀF⋆ = diag((1 − l) I, l)."""
    target: Float[np.ndarray, "k dx"]
    """G⋆ = [I 0]."""
    start: Float[np.ndarray, "k dx"]
    """G₀: G⋆ with one row tilted out of the span by the distance."""


def lower_bound_problem(
    least: Number, distance: Number = 0.5, form: str = "slow", k: int = 2, dx: int = 3
) -> LowerBoundProblem:
    """Proposition 3.5's F⋆ᵀF⋆ = diag((1 − l) I, l), G⋆ = [I 0] and G₀, for l = `least` in (0, ½].

    ``form="slow"`` tilts the last row of G₀, whose eigenvalue is l: SGD closes its distance slowly. ``"unstable"``
    tilts the first, whose eigenvalue is 1 − l: there SGD does not converge with η > 4/(1 − l).

    >>> p = lower_bound_problem(0.1, distance=0.6)
    >>> p.start.tolist(), np.diag(p.gram).tolist()
    ([[1.0, 0.0, 0.0], [0.0, 0.8, 0.6]], [0.9, 0.1])
    """
    _check_least(least)
    if not 0 < distance < 1:
        raise InputError(describe(f"distance={distance}", "a number between 0 and 1", "pass e.g. distance=0.5"))
    if form not in FORMS:
        raise InputError(unknown("form", form, FORMS))
    if not 2 <= k < dx:
        raise InputError(describe(f"k={k}, dx={dx}", "2 ≤ k < dx", "choose a k that leaves a direction outside"))
    gram = np.diag([1 - float(least)] * (k - 1) + [float(least)])
    target = np.eye(k, dx)
    start = target.copy()
    row = k - 1 if form == "slow" else 0
    start[row, row], start[row, k] = (1 - float(distance) ** 2) ** 0.5, float(distance)
    return LowerBoundProblem(gram=gram, target=target, start=start)


def sgd_population_step(
    G: Float[np.ndarray, "k dx"], gram: Float[np.ndarray, "k k"], target: Float[np.ndarray, "k dx"], lr: Number
) -> Float[np.ndarray, "k dx"]:
    """One step of alternating minimisation-SGD at Σ = I, n = ∞: Ḡ = G − η(A G⋆GᵀG − A G⋆), A = GG⋆ᵀF⋆ᵀF⋆.

    Then G₊ = Ortho(Ḡ): thin QR with a positive diagonal of R.

    >>> p = lower_bound_problem(0.1, distance=0.6)
    >>> G = sgd_population_step(p.start, p.gram, p.target, lr=1.0)
    >>> round(subspace_distance(G, p.target), 6)
    0.560954
    """
    A = G @ target.T @ gram
    Q, R = np.linalg.qr((G - float(lr) * (A @ target @ G.T @ G - A @ target)).T)
    return (Q * np.where(np.diag(R) < 0, -1.0, 1.0)).T


def sgd_scalar_step(distance: Number, lr: Number, level: Number) -> float:
    """The same step for the tilted row alone: c₂₊ = c₂(1 − wc₁²)/√(1 + w²c₁²c₂²), w = η·level, c₁² + c₂² = 1.

    `level` is the row's eigenvalue of F⋆ᵀF⋆: l in the slow form, 1 − l in the unstable one. dist = |c₂|.

    >>> round(sgd_scalar_step(0.6, 1.0, 0.1), 6)
    0.560954
    """
    c2, w = float(distance), float(lr) * float(level)
    c1_squared = 1 - c2**2
    return c2 * (1 - w * c1_squared) / (1 + w**2 * c1_squared * c2**2) ** 0.5


def sgd_lower_bound(least: Number, steps: int = 1, distance: Number = 1.0) -> float:
    """Proposition 3.5: dist(G_T, G⋆) ≥ (1 − 4l/(1 − l))ᵀ dist(G₀, G⋆), l/(1 − l) = λmin/λmax(F⋆ᵀF⋆).

    It holds in the slow form for every η ≤ 4/(1 − l) (`sgd_stability_limit`), beyond which the unstable form does not
    converge. From l = 1/5 on it says nothing, and 0 is returned. (The proof's c₂₊ > c₂(1 − wc₁²) is reversed, since it
    divides by a norm above 1; the bound itself holds.)

    >>> round(sgd_lower_bound(0.01, steps=10), 4), sgd_lower_bound(0.3)
    (0.662, 0.0)
    """
    _check_least(least)
    if steps < 0:
        raise InputError(describe(f"steps={steps}", "a number of steps ≥ 0", "pass e.g. steps=100"))
    return max(0.0, 1 - 4 * float(least) / (1 - float(least))) ** steps * float(distance)


def sgd_stability_limit(least: Number) -> float:
    """Lemma B.2: with η > 4/(1 − l), limsup dist(G_t, G⋆) ≥ ½ from the unstable form, however near it starts.

    >>> sgd_stability_limit(0.2)
    5.0
    """
    _check_least(least)
    return 4 / (1 - float(least))


def subspace_distance(G: Float[np.ndarray, "k dx"], target: Float[np.ndarray, "k dx"]) -> float:
    """dist(G, G⋆) = ‖G(I − G⋆ᵀG⋆)‖ for orthonormal rows, eq. (7).

    >>> subspace_distance(np.array([[0.8, 0.6]]), np.array([[1.0, 0.0]]))
    0.6
    """
    return float(np.linalg.norm(G - (G @ target.T) @ target, ord=2))


@dataclass(frozen=True, kw_only=True)
class Contraction:
    """Theorem 3.6: dist₊ ≤ factor · dist + C · noise, C universal, inside the basin and with enough samples."""

    factor: float
    """1 − 0.9η, free of condition numbers."""
    limit: float
    """1 − η: the factor near G⋆ without noise."""
    basin: float
    """0.01/(κ(F⋆)κ(Σ)): the distance from which the theorem speaks. Simulations converge from far outside."""
    noise: float
    """η σ̄ √((dx + log 1/δ)/(nT)), σ̄² = σ²/(smin(F⋆)² λmin(Σ)); eq. (16) drops the η."""
    floor: float
    """σ̄ √(dx/(nT)) √(η/(2 − η)), near which dist settles: √(η/2) for small η. An estimate, not a bound."""
    samples: float
    """max(1, σ̄²)(dx + log 1/δ), the n that is needed up to a constant."""


def kfac_contraction(
    lr: Number,
    head: Float[np.ndarray, "dy k"],
    eigenvalues: Float[np.ndarray, "dx"],
    noise: Number = 0.0,
    samples: int = 1024,
    failure: Number = 0.01,
    tasks: int = 1,
) -> Contraction:
    """Theorem 3.6's factor, basin and noise for KFAC with rate η = `lr` in [0, 1] and head F⋆.

    `eigenvalues` are those of Σ, `noise` is σ, `samples` n, `failure` δ. With T `tasks` of n samples each (eqs. 20–22,
    heads of equal law) the noise falls as 1/√(nT); the factor stays.

    >>> c = kfac_contraction(0.5, np.diag([1.0, 10.0]), np.array([1.0, 4.0]), noise=0.1)
    >>> c.factor, c.limit, round(c.basin, 6)
    (0.55, 0.5, 0.00025)
    """
    s, t = np.linalg.svd(head, compute_uv=False), np.asarray(eigenvalues, dtype=np.float64)
    if not 0 <= lr <= 1:
        raise InputError(describe(f"lr={lr}", "a rate from 0 to 1", "pass e.g. lr=0.5"))
    if head.shape[0] < head.shape[1] or s[-1] <= s[0] * 1e-14 or t.min() <= 0:
        given = f"a head of shape {head.shape}, smallest singular value {s[-1]:.3g}, eigenvalues from {t.min():.3g}"
        raise InputError(describe(given, "a head of full column rank and Σ > 0", "stack the heads of several tasks"))
    _check_samples(samples, failure, noise)
    if tasks < 1:
        raise InputError(describe(f"tasks={tasks}", "at least one", "pass e.g. tasks=1"))
    eta, dx, log = float(lr), t.size, float(np.log(1 / failure))
    sbar = float(noise) / float(s[-1] * t.min() ** 0.5)
    return Contraction(
        factor=1 - 0.9 * eta,
        limit=1 - eta,
        basin=0.01 / float(s[0] / s[-1] * t.max() / t.min()),
        noise=eta * sbar * ((dx + log) / (samples * tasks)) ** 0.5,
        floor=sbar * (dx / (samples * tasks)) ** 0.5 * (eta / (2 - eta)) ** 0.5,
        samples=max(1.0, sbar**2) * (dx + log),
    )


@dataclass(frozen=True, kw_only=True)
class TransferBound:
    """The two terms of Lemma 3.7: excess ≤ C (bias + variance)."""

    bias: float
    """‖F⋆‖_F² λmax(Σ) dist²: what the representation misses."""
    variance: float
    """σ²(dy k + log 1/δ)/n: what the head's fit costs."""

    def total(self, constant: Number = 2.0) -> float:
        """C (bias + variance); the proof's splitting gives C = 2, before concentration."""
        return float(constant) * (self.bias + self.variance)


def transfer_bound(
    head: Float[np.ndarray, "dy k"],
    largest: Number,
    distance: Number,
    noise: Number,
    samples: int,
    failure: Number = 0.01,
) -> TransferBound:
    """Lemma 3.7 for a head refitted on n target `samples`, with λmax(Σ) = `largest`, σ = `noise`, dist = `distance`.

    It bounds the excess ‖(F_ls G − F⋆G⋆)Σ^½‖_F², which is what the proof treats; the lemma states the error with the
    noise of y, which no bound without it can cover. ``failure=1`` leaves the log 1/δ away.

    >>> b = transfer_bound(np.eye(3), largest=2.0, distance=0.1, noise=1.0, samples=900, failure=1)
    >>> round(b.bias, 6), round(b.variance, 6), round(b.total(), 6)
    (0.06, 0.01, 0.14)
    """
    _check_samples(samples, failure, noise)
    if largest <= 0 or not 0 <= distance <= 1:
        given = f"largest={largest}, distance={distance}"
        raise InputError(describe(given, "λmax(Σ) > 0 and a distance from 0 to 1", "see subspace_distance"))
    return TransferBound(
        bias=float(np.sum(head**2)) * float(largest) * float(distance) ** 2,
        variance=float(noise) ** 2 * (head.size + float(np.log(1 / failure))) / samples,
    )


def _check_least(least: Number) -> None:
    if not 0 < least <= 0.5:
        raise InputError(describe(f"least={least}", "the smaller eigenvalue l of F⋆ᵀF⋆, 0 < l ≤ ½", "pass e.g. 0.01"))


def _check_samples(samples: int, failure: Number, noise: Number) -> None:
    if samples < 1 or not 0 < failure <= 1 or noise < 0:
        given = f"samples={samples}, failure={failure}, noise={noise}"
        raise InputError(describe(given, "samples ≥ 1, failure in (0, 1], noise ≥ 0", "correct what is outside"))
