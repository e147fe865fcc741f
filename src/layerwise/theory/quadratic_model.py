"""The quadratic model of George (2023), section 5.4: gradient flow in closed form, non-linear and linearized.

A linear function is fitted to labels, ℓ = ½‖Xθ − y‖², with X = Σ_k √μ_k u_k v_kᵀ, and θ = ½ Σ_k w_k² v_k is trained
by its square roots w. In the basis v_k modes do not see each other: dθ_k/dt = −2μ_k θ_k (θ_k − θ*_k), with
θ*_k = y_k/√μ_k and ỹ_k = √μ_k y_k = μ_k θ*_k. The linearized model keeps the factor θ_k at its first value θ⁰_k. Where
the thesis prints something else, that is there too, as ``printed_…``.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.theory.random_matrices import Number

Array = np.ndarray
BASES = ("lapack", "random", "aligned")
EQUAL = 1e-9
"""Eigenvalues that differ by less, relative to the largest, span one eigenspace."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QuadraticModel:
    """Modes with their starts and ends; arrays over modes k, the null space of X last."""

    mu: Float[Array, "d"]
    """Squared singular values of X, zero on its null space."""
    start: Float[Array, "d"]
    """θ⁰_k > 0."""
    target: Float[Array, "d"]
    """θ*_k ≥ 0; on the null space θ⁰_k, where nothing moves."""
    V: Float[Array, "d d"]
    """The basis v_k, as columns."""
    X: Float[Array, "n d"]
    y: Float[Array, "n"]

    @property
    def rank(self) -> int:
        """Modes that move."""
        return int((self.mu > 0).sum())

    @property
    def speeds(self) -> Float[Array, "d"]:
        """ỹ_k = √μ_k y_k, what the non-linear flow goes by; the linearized one goes by μ_k θ⁰_k."""
        return self.mu * self.target

    def flow(self, times: Float[Array, "T"]) -> Float[Array, "T d"]:
        """θ_k(t) of the non-linear flow (5.4.5)."""
        t, start, target = _column(times), self.start, self.target
        growth = -np.expm1(-2 * self.speeds * t)  # 1 − exp(−2ỹt), without loss of digits at small t
        logistic = start * target / np.where(target > 0, start * growth + target * (1 - growth), 1)
        return np.where(target > 0, logistic, start / (1 + 2 * self.mu * start * t))

    def linearized_flow(self, times: Float[Array, "T"]) -> Float[Array, "T d"]:
        """θ_k(t) = θ* + e^(−2μθ⁰t) (θ⁰ − θ*) of the linearized flow (5.4.6, corrected)."""
        return self.target + np.exp(-2 * self.mu * self.start * _column(times)) * (self.start - self.target)

    def printed_linearized_flow(self, times: Float[Array, "T"]) -> Float[Array, "T d"]:
        """(5.4.6) as it is printed, without the 2 in the exponent: half as fast."""
        return self.target + np.exp(-self.mu * self.start * _column(times)) * (self.start - self.target)

    def linearized_parameters(self, w: Float[Array, "d"]) -> Float[Array, "d"]:
        """θ̄_k = w_k w⁰_k − (w⁰_k)²/2, the tangent of ½w² at the start w⁰ = √(2θ⁰)."""
        return w * np.sqrt(2 * self.start) - self.start

    def printed_linearized_parameters(self, w: Float[Array, "d"]) -> Float[Array, "d"]:
        """θ̄_k = w_k w⁰_k, as it is printed: it starts at 2θ⁰."""
        return w * np.sqrt(2 * self.start)

    def outputs(self, theta: Float[Array, "*T d"]) -> Float[Array, "*T n"]:
        """Xθ on the examples, from coordinates in the basis v."""
        return theta @ (self.X @ self.V).T

    # --- times until |θ_k − θ*_k| = ε -----------------------------------------------------------------------

    def times(self, eps: Number) -> Float[Array, "rank"]:
        """log(θ*²/(εθ⁰)) / 2ỹ (5.4.7, corrected), for ε and θ⁰ much smaller than θ*; modes of θ* = 0 never are."""
        start, target, _, speed = self._moving()
        return np.where(target > 0, np.log(_or_one(target) ** 2 / (eps * start)) / (2 * _or_one(speed)), np.inf)

    def linearized_times(self, eps: Number) -> Float[Array, "rank"]:
        """log(θ*/ε) / 2μθ⁰ (5.4.7, corrected); modes of θ* = 0 come from θ⁰, in log(θ⁰/ε) / 2μθ⁰."""
        start, target, mu, _ = self._moving()
        return np.maximum(np.log(np.where(target > 0, target, start) / eps), 0) / (2 * mu * start)

    def exact_times(self, eps: Number) -> Float[Array, "rank"]:
        """The same without the assumption of small ε and θ⁰: log((θ* − ε)(θ* − θ⁰)/(εθ⁰)) / 2ỹ."""
        start, target, _, speed = self._below(eps)
        return np.log((target - eps) * (target - start) / (eps * start)) / (2 * speed)

    def exact_linearized_times(self, eps: Number) -> Float[Array, "rank"]:
        """The same for the linearized flow: log((θ* − θ⁰)/ε) / 2μθ⁰."""
        start, target, mu, _ = self._below(eps)
        return np.log((target - start) / eps) / (2 * mu * start)

    def printed_times(self, eps: Number) -> Float[Array, "rank"]:
        """log(θ*/(εθ⁰)) / ỹ, as (5.4.7) prints it."""
        start, target, _, speed = self._moving()
        return np.log(target / (eps * start)) / speed

    def printed_linearized_times(self, eps: Number) -> Float[Array, "rank"]:
        """log(θ*/ε) / μθ⁰, as (5.4.7) prints it."""
        return 2 * self.linearized_times(eps)

    def ratio_of_times(self, k: int, l: int) -> float:
        """t_k/t_l = ỹ_l/ỹ_k, up to logarithms, of the non-linear flow: what correlates with the labels is first."""
        return float(self.speeds[l] / self.speeds[k])

    def printed_ratio_of_times(self, k: int, l: int) -> float:
        """ỹ_k/ỹ_l, as it is printed: the inverse."""
        return 1 / self.ratio_of_times(k, l)

    def linearized_ratio_of_times(self, k: int, l: int) -> float:
        """t_k/t_l = μ_l θ⁰_l / μ_k θ⁰_k, up to logarithms, of the linearized flow: the labels do not matter."""
        return float(self.mu[l] * self.start[l] / (self.mu[k] * self.start[k]))

    # --- modes one after the other ------------------------------------------------------------------------

    def when_converged(self, k: int, eps: Number, scale: Number) -> Float[Array, "rank"]:
        """θ_l(t_k) of all modes l when mode k is ε-close, with θ⁰ = σ θ̃, for small σ = `scale` (5.4.8, corrected).

        θ*_l θ̃_l / (θ̃_l + θ*_l (ε θ̃_k/θ*_k²)^r σ^(r−1)) with r = ỹ_l/ỹ_k: as σ → 0 modes of r > 1 are learned and
        those of r < 1 have not begun.
        """
        start, target, _, speed = self._moving()
        start, r = start / scale, speed / speed[k]
        left = target * (eps * start[k] / target[k] ** 2) ** r * float(scale) ** (r - 1)
        return target * start / (start + left)

    def printed_when_converged(self, k: int, eps: Number, scale: Number) -> Float[Array, "rank"]:
        """(5.4.8) as it is printed, with exponents 2r and 2r − 1: modes would be learned from r = ½ on."""
        start, target, _, speed = self._moving()
        start, r = start / scale, speed / speed[k]
        return target * start / (start + (eps * start / target) ** (2 * r) * float(scale) ** (2 * r - 1))

    def _moving(self) -> tuple[Array, Array, Array, Array]:
        """Start, target, μ and ỹ of the modes of the rank of X."""
        r = self.rank
        return self.start[:r], self.target[:r], self.mu[:r], self.speeds[:r]

    def _below(self, eps: Number) -> tuple[Array, Array, Array, Array]:
        found = self._moving()
        if not 0 < eps < (found[1] - found[0]).min():
            given = f"eps={eps} where the nearest mode starts {(found[1] - found[0]).min():.3g} below its end"
            raise InputError(describe(given, "0 < ε < θ* − θ⁰ for every mode", "take a smaller ε or start"))
        return found


def _or_one(values: Array) -> Array:
    """One in the place of zeros, to divide by and to take logarithms of."""
    return np.where(values > 0, values, 1)


def _column(times: Float[Array, "T"]) -> Float[Array, "T 1"]:
    return np.asarray(times, dtype=np.float64)[:, None]


def quadratic_model(
    X: Float[Array, "n d"], y: Float[Array, "n"], *, scale: Number = 1e-3, basis: str = "lapack", seed: int = 0
) -> QuadraticModel:
    """The model of data, with w⁰ = √σ·1, so that θ⁰ = σ/2.

    Args:
        X: inputs, one row an example.
        y: labels. A singular vector's sign is chosen so that its product with y is not negative.
        scale: σ > 0.
        basis: the model is tied to the v_k, which are arbitrary within an eigenspace of several dimensions: "lapack"
            (as the SVD returns it, which may differ between machines), "random" (rotated, by `seed`) or "aligned"
            (one vector is the labels' part in the eigenspace, so that the others have none).
        seed: of "random".

    >>> model = quadratic_model(np.diag([3.0, 2.0]), np.array([1.0, 4.0]))
    >>> model.speeds.round(9).tolist(), model.target.round(9).tolist()
    ([3.0, 8.0], [0.333333333, 2.0])
    >>> bool(abs(model.flow(np.array([50.0]))[0] - model.target).max() < 1e-9)
    True
    """
    if basis not in BASES:
        raise NameLookupError(unknown("basis", basis, BASES))
    if not 0 < scale < np.inf:
        raise InputError(describe(f"scale={scale}", "a number > 0", "take e.g. scale=1e-3"))
    if not (np.isfinite(X).all() and np.isfinite(y).all()) or not X.any():
        raise InputError(describe("inputs or labels that are zero or not finite", "finite data", "check X and y"))
    rounding = max(X.shape) * max(float(np.finfo(data.dtype).eps) for data in (X, y) if data.dtype.kind == "f")
    X, y = X.astype(np.float64), y.astype(np.float64)
    U, singular, Vt = np.linalg.svd(X, full_matrices=True)
    rank = int((singular > singular[0] * rounding).sum())
    U, V, mu = U[:, :rank].copy(), Vt.T.copy(), singular[:rank] ** 2
    if basis != "lapack":
        rng = np.random.default_rng(seed)
        for space in _eigenspaces(mu):
            R = _rotation(rng, U[:, space].T @ y, basis)
            U[:, space], V[:, space] = U[:, space] @ R, V[:, space] @ R
    parts = U.T @ y
    parts[abs(parts) <= rounding * np.linalg.norm(y)] = 0
    signs = np.where(parts < 0, -1.0, 1.0)
    V[:, :rank] *= signs
    start = np.full(X.shape[1], scale / 2)
    target = start.copy()
    target[:rank] = signs * parts / np.sqrt(mu)
    return QuadraticModel(
        mu=np.concatenate([mu, np.zeros(X.shape[1] - rank)]), start=start, target=target, V=V, X=X, y=y
    )


def _eigenspaces(mu: Array) -> list[slice]:
    """Runs of equal eigenvalues, which descend."""
    cuts = [0, *(np.flatnonzero(-np.diff(mu) > EQUAL * mu[0]) + 1), len(mu)]
    return [slice(a, b) for a, b in pairwise(cuts)]


def _rotation(rng: np.random.Generator, labels: Array, basis: str) -> Array:
    """An orthogonal matrix; of an aligned basis the first column has the direction of the labels."""
    columns = rng.standard_normal((len(labels), len(labels)))
    if basis == "aligned" and labels.any():
        columns[:, 0] = labels
    Q, R = np.linalg.qr(columns)
    return Q * np.sign(np.diagonal(R))


class Groups(NamedTuple):
    """A model, and which of its examples are easy: of several, clean, or of the majority; the others are not."""

    model: QuadraticModel
    easy: Bool[Array, "n"]


def order_reversal(mu: Float[Array, "n"], *, scale: Number = 1e-3) -> QuadraticModel:
    """Example 1 (5.4.9): x_i = √μ_i e_i, y_i = μ_{n+1−i}/√μ_i; a mode an example, which the regimes learn in turn.

    >>> model = order_reversal(np.array([9.0, 8.0, 7.0]))
    >>> model.exact_times(0.1).argmin(), model.exact_linearized_times(0.1).argmin()
    (np.int64(2), np.int64(0))
    """
    if not (np.diff(mu) < 0).all() or mu[-1] <= 0:
        raise InputError(describe(f"mu={mu.tolist()}", "positive numbers that descend", "sort them"))
    return quadratic_model(np.diag(np.sqrt(mu)), mu[::-1] / np.sqrt(mu), scale=scale)


def label_noise(
    n: int = 20, q: int = 5, *, noise: Number = 1.0, scale: Number = 1e-3, d: int = 200, basis: str, seed: int = 0
) -> Groups:
    """Example 2 (5.4.10): x_i = κ_i y_i e_1 + η e_{i+1}, where q examples have κ = −1, a label that was flipped.

    All but one eigenvalue are η², so that the basis must be said. If ỹ_1 = √(n + η²)(n − 2q)/√n is below
    2η√(q(n − q)/n), an aligned basis learns the flipped labels first; else all bases learn the others first.

    >>> model, clean = label_noise(noise=1.0, basis="aligned")
    >>> int(clean.sum()), model.speeds[:2].round(4).tolist()
    (15, [10.247, 3.873])
    """
    flip, labels = _groups(n, q, d, least=n + 1)
    X = np.zeros((n, d))
    X[:, 0] = flip * labels
    X[np.arange(n), np.arange(n) + 1] = noise
    return Groups(quadratic_model(X, labels, scale=scale, basis=basis, seed=seed), flip > 0)


def spurious_feature(
    n: int = 20,
    q: int = 5,
    *,
    noise: Number = 1.0,
    core: Number = 0.5,
    scale: Number = 1e-3,
    d: int = 200,
    basis: str = "lapack",
    seed: int = 0,
) -> Groups:
    """Example 3 (5.4.12): x_i = κ_i y_i e_1 + λ y_i e_2 + η e_{i+2}; κ = −1 in a minority of q examples.

    e_1 is the spurious feature, which the majority's labels follow, and e_2 the core feature, of size λ = `core`,
    which all do. Labels lie in an eigenspace of two single eigenvalues, so that the basis does not matter.

    >>> model, majority = spurious_feature()
    >>> signs = np.sign(model.X[:, :2]) == model.y[:, None]
    >>> signs[majority].mean(0).tolist(), signs[~majority].mean(0).tolist()
    ([1.0, 1.0], [0.0, 1.0])
    """
    flip, labels = _groups(n, q, d, least=n + 2)
    X = np.zeros((n, d))
    X[:, 0], X[:, 1] = flip * labels, core * labels
    X[np.arange(n), np.arange(n) + 2] = noise
    return Groups(quadratic_model(X, labels, scale=scale, basis=basis, seed=seed), flip > 0)


def _groups(n: int, q: int, d: int, least: int) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """κ, −1 in the first q examples, and labels ±1 in turn."""
    if not 1 <= q < n / 2 or d < least:
        given = f"n={n}, q={q}, d={d}"
        raise InputError(describe(given, f"1 ≤ q < n/2 and d ≥ {least}", "take e.g. n=20, q=5, d=200"))
    order = np.arange(n)
    return np.where(order < q, -1.0, 1.0), np.where(order % 2, -1.0, 1.0)
