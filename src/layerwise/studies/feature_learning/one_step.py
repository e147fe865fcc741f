"""What one step on a single-index problem has learned: correlations, the rank-one approximation, the refitted head.

Theorem 3.9 and Corollary 3.11, Lemmas 3.10 and 3.12, Remark 3.13 and Appendix C.4 of arXiv 2502.01763, measured; the
predictions are those of `layerwise.theory`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.linalg.lanczos_top import lanczos_top
from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.single_index import (
    ACTIVATIONS,
    CHUNK,
    Sample,
    SingleIndex,
    Trial,
    draw_sample,
    draw_trial,
    hermite_link,
    one_step,
    randomness,
)
from layerwise.theory import (
    HermiteConstants,
    correlation_kfac,
    correlation_sgd,
    hermite_coefficient,
    hermite_constants,
    rank_one_coefficient,
    resolvent,
)


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Sx = XᵀX/n = V diag(s) Vᵀ and Xᵀy/n in its basis: one decomposition serves all λ."""

    s: Float[Tensor, "dx"]
    V: Float[Tensor, "dx dx"]
    Sxy: Float[Tensor, "dx"]
    """Vᵀ Xᵀy / n."""

    def filters(self, dampings: Sequence[float | int]) -> Float[Tensor, "l dx"]:
        """Rows of factors in the basis V: first one (SGD), then 1/(s + λ) for each λ (KFAC)."""
        rows = [torch.ones_like(self.s), *(1 / (self.s + damping) for damping in dampings)]
        return torch.stack(rows)


def moments(sample: Sample) -> Moments:
    """Second moments of a sample, decomposed; by rounding negative eigenvalues are zero.

    >>> moments(Sample(x=torch.eye(2).double(), y=torch.ones(2).double())).s.tolist()
    [0.5, 0.5]
    """
    n = len(sample.y)
    s, V = torch.linalg.eigh(sample.x.mT @ sample.x / n)
    return Moments(s=s.clamp(min=0), V=V, Sxy=V.mT @ (sample.x.mT @ sample.y / n))


def check_dampings(dampings: Sequence[float | int]) -> None:
    """Refuse λ that are not positive: Sx may be singular."""
    if not all(0 < damping < float("inf") for damping in dampings):
        raise InputError(describe(f"dampings={list(dampings)}", "numbers > 0", "pass e.g. 1e-6 for almost none"))


@dataclass(frozen=True, kw_only=True)
class Correlations:
    """|vᵀβ⋆|/(‖v‖‖β⋆‖) for SGD (first) and KFAC at each λ."""

    learned: Float[Tensor, "l"]
    """For the top right singular vector of G₁ − G₀."""
    estimator: Float[Tensor, "l"]
    """For b_SGD = Xᵀy/n and b_KFAC = (Sx + λI)⁻¹Xᵀy/n."""


def correlations(setting: SingleIndex, seed: int, dampings: Sequence[float | int]) -> Correlations:
    """One trial of Figure 3: all λ share the sample, the gradient and the decomposition of Sx.

    >>> found = correlations(SingleIndex(dx=20, n=2000, dh=100, anisotropy=0.8), 0, [1e-6])
    >>> bool(found.learned[1] > found.learned[0])
    True
    """
    check_dampings(dampings)
    trial = draw_trial(setting, seed)
    found = moments(trial.sample)
    filters = found.filters(dampings)
    rotated = one_step(trial) @ found.V
    gram = rotated.mT @ rotated
    generator = stream(seed, "single-index", "lanczos")
    learned = torch.stack([_top(gram, row, generator) for row in filters])
    index = found.V.mT @ trial.index
    return Correlations(learned=_cosine(learned, index), estimator=_cosine(filters * found.Sxy, index))


def _top(gram: Float[Tensor, "dx dx"], row: Float[Tensor, "dx"], generator: torch.Generator) -> Float[Tensor, "dx"]:
    """The top eigenvector of D gram D with D = diag(row): the top right singular vector of a filtered change."""

    def product(block: Tensor) -> Tensor:
        return row[:, None] * (gram @ (row[:, None] * block))

    return lanczos_top(product, len(row), 1, generator=generator, dtype=torch.float64)[1][:, 0]


def _cosine(vectors: Float[Tensor, "l dx"], index: Float[Tensor, "dx"]) -> Float[Tensor, "l"]:
    return (vectors @ index).abs() / (vectors.norm(dim=1) * index.norm())


def predicted_correlations(setting: SingleIndex, dampings: Sequence[float | int]) -> Float[Tensor, "l"]:
    """The limits of `correlations`: SGD's by Lemma 3.10, then KFAC's at each λ by Lemma 3.12.

    >>> [round(float(rho), 4) for rho in predicted_correlations(SingleIndex(), [0.3])]
    [0.7474, 0.8169]
    """
    check_dampings(dampings)
    levels, weights, constants = _law(setting)
    noise, ratio = setting.noise, setting.dx / setting.n
    sgd = correlation_sgd(constants, noise, ratio, levels, weights)
    kfac = [correlation_kfac(constants, noise, ratio, damping, levels, weights) for damping in dampings]
    return torch.tensor([sgd, *kfac], dtype=torch.float64)


def _law(setting: SingleIndex) -> tuple[np.ndarray, np.ndarray, HermiteConstants]:
    """Distinct eigenvalues of Σ, their weights, and the constants of σ⋆."""
    levels, counts = np.unique(setting.eigenvalues.numpy(), return_counts=True)
    weights = counts / setting.dx
    link = hermite_constants(lambda z: hermite_link(torch.from_numpy(z)).numpy(), None, float(weights @ levels))
    return levels, weights, link


def predicted_sizes(setting: SingleIndex, dampings: Sequence[float | int]) -> Float[Tensor, "l"]:
    """The limits of ‖a f₀bᵀ‖ in `rank_one`, where ‖f₀‖ and ‖β⋆‖ tend to one.

    ‖b‖² tends to c₁²t₂ + φ(c⋆² + noise²)t₁ for SGD and to c₁²Ψ₂ + φ(c⊥² + noise²)Ψ₃ for KFAC, the denominators of
    Lemmas 3.10 and 3.12 (t_j = tr(Σʲ)/dx, φ = dx/n).

    >>> [round(float(size), 3) for size in predicted_sizes(SingleIndex(), [0.3])]
    [0.81, 0.521]
    """
    check_dampings(dampings)
    levels, weights, link = _law(setting)
    noise2, ratio = float(setting.noise) ** 2, setting.dx / setting.n
    squares = [
        link.c1**2 * float(weights @ levels**2) + ratio * (link.cs2 + noise2) * float(weights @ levels),
        *(
            link.c1**2 * found.psi2 + ratio * (link.cperp2 + noise2) * found.psi3
            for found in (resolvent(levels, ratio=ratio, ridge=damping, weights=weights) for damping in dampings)
        ),
    ]
    return abs(slope_mean(setting)) * torch.tensor(squares, dtype=torch.float64).sqrt()


def slope_mean(setting: SingleIndex) -> float:
    """a = E[σ′(z)], z ~ N(0, tr Σ/dx), for the student's activation (Theorem 3.9).

    >>> round(slope_mean(SingleIndex(activation="relu")), 9)
    0.5
    """

    def slope(z: np.ndarray) -> np.ndarray:
        return ACTIVATIONS[setting.activation](torch.from_numpy(z))[1].numpy()

    return rank_one_coefficient(slope, float(setting.eigenvalues.mean()))


@dataclass(frozen=True, kw_only=True)
class RankOne:
    """How far the step is from rank one, at η = 1, for SGD (first) and KFAC at each λ."""

    error: Float[Tensor, "l"]
    """‖G₁ − G₀ − a f₀bᵀ‖ in operator norm."""
    size: Float[Tensor, "l"]
    """‖a f₀bᵀ‖ in operator norm."""


def rank_one(setting: SingleIndex, seed: int, dampings: Sequence[float | int]) -> RankOne:
    """Theorem 3.9 and Corollary 3.11: the error goes to zero as n, dx and dh grow in proportion, the size does not.

    >>> found = rank_one(SingleIndex(dx=20, n=200, dh=40), 0, [1.0])
    >>> found.error.shape, bool((found.error > 0).all())
    (torch.Size([2]), True)
    """
    check_dampings(dampings)
    trial = draw_trial(setting, seed)
    found = moments(trial.sample)
    rotated, a = one_step(trial) @ found.V, slope_mean(setting)
    errors, sizes = [], []
    for row in found.filters(dampings):
        b = row * found.Sxy
        difference = rotated * row - a * torch.outer(trial.f0, b)
        errors.append(torch.linalg.eigvalsh(difference.mT @ difference)[-1].sqrt())
        sizes.append(abs(a) * trial.f0.norm() * b.norm())
    return RankOne(error=torch.stack(errors), size=torch.stack(sizes))


@dataclass(frozen=True, kw_only=True)
class Refit:
    """E|σ⋆(β⋆ᵀx) − f̂ᵀσ(Gx)|² / E σ⋆² on new inputs: one for a model that has learned nothing."""

    none: float
    """With G₀: random features."""
    sgd: Float[Tensor, "k"]
    """After SGD's step, for each η."""
    kfac: Float[Tensor, "k"]
    """After KFAC's step, for each η."""


def refit(
    setting: SingleIndex,
    seed: int,
    *,
    exponents: Sequence[float | int],
    damping: float | int = 0.3,
    ridge: float | int = 1e-6,
    test: int = 4000,
) -> Refit:
    """Remark 3.13 and Appendix C.4: the head refitted to a second sample after one step with η = n^α, α an exponent.

    The head minimises |y − Zf|²/n + ridge |f|² with Z = σ(XG₁ᵀ); by Lemma 3.1 that is KFAC's step at rate one.

    >>> found = refit(SingleIndex(dx=10, n=500, dh=40), 0, exponents=[0.0, 0.4], test=500)
    >>> found.sgd.shape
    torch.Size([2])
    """
    check_dampings([damping])
    if not ridge > 0 or test < 1:
        raise InputError(describe(f"ridge={ridge}, test={test}", "ridge > 0 and test ≥ 1", "pass e.g. ridge=1e-6"))
    trial = draw_trial(setting, seed)
    random = randomness(setting, seed, "refit")
    second, new = (draw_sample(setting, trial.index, n, random) for n in (setting.n, test))
    found, change = moments(trial.sample), one_step(trial)
    whitened = (change @ found.V / (found.s + damping)) @ found.V.mT
    target = hermite_link(new.x @ trial.index)
    rates = [setting.n**exponent for exponent in exponents]

    def error(G: Float[Tensor, "dh dx"]) -> float:
        head = _ridge_head(trial, G, second, float(ridge))
        miss = torch.cat([_features(trial, G, x) @ head for x in new.x.split(CHUNK)]) - target
        return float(miss.square().mean() / target.square().mean())

    def errors(step: Float[Tensor, "dh dx"]) -> Float[Tensor, "k"]:
        return torch.tensor([error(trial.G0 + rate * step) for rate in rates], dtype=torch.float64)

    return Refit(none=error(trial.G0), sgd=errors(change), kfac=errors(whitened))


def _features(trial: Trial, G: Float[Tensor, "dh dx"], x: Float[Tensor, "n dx"]) -> Float[Tensor, "n dh"]:
    return ACTIVATIONS[trial.setting.activation](x @ G.mT)[0]


def _ridge_head(trial: Trial, G: Float[Tensor, "dh dx"], sample: Sample, ridge: float) -> Float[Tensor, "dh"]:
    gram, cross = torch.zeros(len(G), len(G), dtype=G.dtype), torch.zeros(len(G), 1, dtype=G.dtype)
    for x, y in zip(sample.x.split(CHUNK), sample.y.split(CHUNK), strict=True):
        Z = _features(trial, G, x)
        gram, cross = gram + Z.mT @ Z, cross + Z.mT @ y[:, None]
    n = len(sample.y)
    regular = gram / n + ridge * torch.eye(len(G), dtype=G.dtype)
    return torch.cholesky_solve(cross / n, torch.linalg.cholesky(regular))[:, 0]


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """What a polynomial in Xb leaves of the features after one step, in operator norm over that of σ(XG₀ᵀ)."""

    sgd: Float[Tensor, "k terms"]
    """For each η, and after 0, 1, 2, … terms."""
    kfac: Float[Tensor, "k terms"]


def expand_features(
    setting: SingleIndex, seed: int, *, exponents: Sequence[float | int], terms: int, damping: float | int = 0.3
) -> Expansion:
    """Appendix C.4: σ(XG₁ᵀ) is nearly σ(XG₀ᵀ) + Σ_{k ≤ terms} (aη)ᵏ/k! μ_k (Xb)ᵏ(f₀ᵏ)ᵀ, powers taken entry by entry.

    G₁ is the step itself with η = n^α, α an exponent, not its rank-one part; X are n new inputs, μ_k = E[σ⁽ᵏ⁾(z)] with
    z ~ N(0, tr Σ/dx), a = μ₁ and b is SGD's or KFAC's estimator.

    >>> found = expand_features(SingleIndex(dx=20, n=200, dh=40, activation="relu"), 0, exponents=[0.0, 0.2], terms=2)
    >>> found.kfac.shape, bool((found.kfac[:, 1] < found.kfac[:, 0]).all())
    (torch.Size([2, 3]), True)
    """
    check_dampings([damping])
    if terms < 1:
        raise InputError(describe(f"terms={terms}", "at least one", "pass e.g. terms=2"))
    trial = draw_trial(setting, seed)
    x = draw_sample(setting, trial.index, setting.n, randomness(setting, seed, "expansion")).x
    found, change = moments(trial.sample), one_step(trial)
    variance = float(setting.eigenvalues.mean())

    def activation(z: np.ndarray) -> np.ndarray:
        return ACTIVATIONS[setting.activation](torch.from_numpy(z))[0].numpy()

    mu = [hermite_coefficient(activation, k, variance) for k in range(terms + 1)]
    start = _features(trial, trial.G0, x)
    size = _operator_norm(start)

    def left(row: Float[Tensor, "dx"], rate: float) -> Float[Tensor, "terms"]:
        step = (change @ found.V * row) @ found.V.mT
        u = slope_mean(setting) * rate * (x @ (found.V @ (row * found.Sxy)))
        rest = _features(trial, trial.G0 + rate * step, x) - start
        norms = [_operator_norm(rest)]
        for k in range(1, terms + 1):
            rest = rest - mu[k] / math.factorial(k) * torch.outer(u**k, trial.f0**k)
            norms.append(_operator_norm(rest))
        return torch.stack(norms) / size

    sgd, kfac = (
        torch.stack([left(row, setting.n**exponent) for exponent in exponents]) for row in found.filters([damping])
    )
    return Expansion(sgd=sgd, kfac=kfac)


def _operator_norm(matrix: Float[Tensor, "n dh"]) -> Float[Tensor, ""]:
    """The largest singular value, by the smaller Gram matrix."""
    return torch.linalg.eigvalsh(matrix.mT @ matrix)[-1].clamp(min=0).sqrt()
