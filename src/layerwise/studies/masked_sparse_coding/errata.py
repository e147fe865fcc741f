"""Where chapter 2 of Wu (2023) errs: printed readings and corrections, against a computation that needs neither."""

import math

import numpy as np
import torch

from layerwise.foundations.random import stream
from layerwise.selfsup.sparse_coding.data import sample_sparse_data
from layerwise.selfsup.sparse_coding.guarantees import incoherence, missed_support, oracle_prediction
from layerwise.selfsup.sparse_coding.losses import represented
from layerwise.selfsup.sparse_coding.omp import omp
from layerwise.studies.feature_learning.errata import Readings

LISTED = (0.01, 0.0325, 0.055, 0.0775, 0.1)
"""Levels of noise of section 2.4.3, where d = 100."""


def what_is_decoded(seed: int) -> Readings:
    """(2.10): the masked loss is the risk on hidden coordinates and their noise, if the code did not see them.

    >>> found = what_is_decoded(0)
    >>> found.printed > 0.1 > 0.03 > found.corrected
    True
    """
    d, k, sigma, visible = 20, 2, 0.2, torch.arange(20) < 16
    data = sample_sparse_data(d, 30, k, 20_000, sigma, generator=stream(seed, "decoded"))
    clean = represented(data.codes, data.A)

    def error(code) -> float:
        guess = represented(code, data.A)[:, ~visible]
        loss = (data.Y[:, ~visible] - guess).square().sum(1).mean()
        risk = (clean[:, ~visible] - guess).square().sum(1).mean() + int((~visible).sum()) * sigma**2
        return float((loss - risk).abs() / risk)

    return Readings(printed=error(omp(data.Y, data.A, k)), corrected=error(omp(data.Y, data.A, k, visible=visible)))


def levels_of_noise(seed: int) -> Readings:
    """Section 2.4.3: five equally spaced variances from 1/d² to 1/d, or standard deviations from 1/d to 1/√d."""
    d, listed = 100, np.array(LISTED)
    printed, corrected = np.sqrt(np.linspace(1 / d**2, 1 / d, 5)), np.linspace(1 / d, d**-0.5, 5)
    return Readings(
        printed=float(np.linalg.norm(printed - listed) / np.linalg.norm(listed)),
        corrected=float(np.linalg.norm(corrected - listed) / np.linalg.norm(listed)),
    )


def supports_of(seed: int) -> Readings:
    """Assumption 2.3.5: supports among d or p indices; the share of atoms in no sample."""
    d, p, k, n = 20, 50, 3, 2000
    shares = []
    for among in (d, p):
        drawn = torch.rand(n, among, generator=stream(seed, "supports")).topk(k, -1).indices
        shares.append(1 - len(drawn.unique()) / p)
    return Readings(printed=shares[0], corrected=shares[1])


def ridge_of_the_oracle(seed: int) -> Readings:
    """(A.15): the conditional mean of hidden coordinates, by the joint covariance of all."""
    d, p, k, sigma, signal = 20, 12, 2, 0.1, 1.0
    data = sample_sparse_data(d, p, k, 40, sigma, signal=signal, generator=stream(seed, "oracle"))
    seen = torch.arange(d) < 15
    truth = []
    for y, support in zip(data.Y, data.codes.indices, strict=True):
        S = data.A[:, support]
        joint = signal**2 * S @ S.mT + sigma**2 * torch.eye(d, dtype=S.dtype)
        truth.append(joint[~seen][:, seen] @ torch.linalg.solve(joint[seen][:, seen], y[seen]))
    exact = torch.stack(truth)
    printed, corrected = (
        oracle_prediction(data.Y, data.A, data.codes.indices, seen, sigma=sigma, signal=signal, printed=reading)
        for reading in (True, False)
    )
    size = exact.norm()
    return Readings(printed=float((printed - exact).norm() / size), corrected=float((corrected - exact).norm() / size))


def missed_supports(seed: int) -> Readings:
    """(A.23): by how much supports that OMP misses exceed a bound, relative to them."""
    d, p, k, sigma, signal = 400, 40, 2, 0.1, 5.0
    data = sample_sparse_data(d, p, k, 4000, sigma, signal=signal, generator=stream(seed, "missed"))
    found = omp(data.Y, data.A, k).indices.sort(1).values
    missed = float((found != data.codes.indices.sort(1).values).any(1).double().mean())
    mu = incoherence(data.A)
    printed, corrected = (missed_support(sigma, signal, k, p, mu, printed=reading) for reading in (True, False))
    return Readings(
        printed=max(0.0, missed - printed) / missed if missed else 0.0,
        corrected=max(0.0, missed - corrected) / missed if missed else 0.0,
    )


def largest_square(seed: int) -> Readings:
    """Proof of lemma A.1.2: E exp(t max X) of n squares of normal numbers, by quadrature, against max E exp(tX).

    The lemma needs only that it is at most the sum, n/√(1 − 2t): by how much it exceeds that.
    """
    n, t = int(torch.randint(5, 60, (), generator=stream(seed, "squares"))), 1 / 3
    u = np.linspace(0, 14, 200_001)
    cdf = np.array([math.erf(x / math.sqrt(2)) for x in u[::100]])
    below = np.interp(u, u[::100], cdf) ** n
    truth = float(np.sum(np.exp(t * ((u[1:] + u[:-1]) / 2) ** 2) * np.diff(below)))
    each = (1 - 2 * t) ** -0.5
    return Readings(printed=abs(each - truth) / truth, corrected=max(0.0, truth - n * each) / truth)
