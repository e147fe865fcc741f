"""Which norm measures capacity: random features of a Gaussian kernel, from white to what they are (appendix B.2.5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.bounds import optimal_rescaling
from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.foundations.random import stream

RESCALED = ("singular-values", "eigenvalues")


class Point(NamedTuple):
    """Means over the samples, at one c."""

    c: float
    error: float
    """Share of the other points that are classified wrongly."""
    bound: float
    """With the norm of the weights."""
    optimal_bound: float
    """With the norm that is best for the sample (Proposition B.2.5)."""


@dataclass(frozen=True, kw_only=True)
class WhichNorm:
    """P random features at N points of an interval, of which samples are interpolated."""

    points: int = 1000
    """N, and P."""
    half_width: float | int = 5.0
    """Points are equally spaced from −a to a."""
    samples: int = 100
    examples: int = 50
    """Of a sample."""
    least: float | int = 0.1
    """Labels are the signs of the first singular function that has either sign at this share of the points."""
    rescaled: str = "singular-values"
    """What becomes 1 + c(l − 1): singular values of the features, or their squares."""
    scales: tuple[float, ...] = (0.05, 0.25, 0.5, 0.75, 0.95)
    """c, above 0, where all eigenvectors are arbitrary, and below 1, where nothing can be interpolated in doubles."""

    def __post_init__(self) -> None:
        if self.rescaled not in RESCALED:
            raise NameLookupError(unknown("reading of the rescaling", self.rescaled, RESCALED))
        if not all(0 < c < 1 for c in self.scales) or len(self.scales) < 2:
            raise InputError(describe(f"scales={self.scales}", "two numbers or more between 0 and 1", "take others"))
        if not (1 <= self.examples < self.points and 0 <= self.least < 0.5):
            given = f"examples={self.examples} of {self.points} points, least={self.least}"
            raise InputError(describe(given, "fewer examples than points, and a share below ½", "take more points"))

    def features(self, seed: int) -> Float[Tensor, "N P"]:
        """√(2/P) cos(ωx + b) with ω ~ N(0, 2) and b uniform: those of the kernel exp(−(x − x′)²)."""
        generator, N = stream(seed, "random features"), self.points
        x = torch.linspace(-self.half_width, self.half_width, N, dtype=torch.float64)
        frequencies = 2**0.5 * torch.randn(N, generator=generator, dtype=torch.float64)
        phases = 2 * math.pi * torch.rand(N, generator=generator, dtype=torch.float64)
        return (2 / N) ** 0.5 * torch.cos(x[:, None] * frequencies + phases)

    def measured(self, seed: int) -> list[Point]:
        """One point for each c; the samples are the same for all."""
        Phi, N = self.features(seed), self.points
        eigenvalues, functions = torch.linalg.eigh(Phi @ Phi.mT)
        eigenvalues = eigenvalues.clamp_min(0)
        y = self.labels(functions)
        generator = stream(seed, "samples")
        chosen = torch.stack([torch.randperm(N, generator=generator)[: self.examples] for _ in range(self.samples)])
        others = torch.ones(self.samples, N, dtype=torch.bool).scatter_(1, chosen, False)
        return [self._point(c, eigenvalues, functions, y, chosen, others) for c in self.scales]

    def labels(self, functions: Float[Tensor, "N N"]) -> Float[Tensor, "N"]:
        """Signs of a singular function; the leading ones, columns that come last, may have one sign alone."""
        signs = torch.where(functions < 0, -1.0, 1.0).double().flip(1)
        both = ((1 - signs.mean(0).abs()) / 2 >= self.least).nonzero()
        if not len(both):
            given = f"singular functions of which none has either sign at {self.least:.0%} of the points"
            raise InputError(describe(given, "one that has", "take a smaller `least`"))
        return signs[:, int(both[0])]

    def _point(
        self, c: float, eigenvalues: Tensor, functions: Tensor, y: Tensor, chosen: Tensor, others: Tensor
    ) -> Point:
        if self.rescaled == "eigenvalues":
            rescaled = 1 + c * (eigenvalues - 1)
        else:
            rescaled = (1 + c * (eigenvalues.sqrt() - 1)).square()
        K = (functions * rescaled) @ functions.mT
        kernels, labels = K[chosen[:, :, None], chosen[:, None, :]], y[chosen]
        found = optimal_rescaling(kernels, labels)
        coefficients = torch.linalg.solve(kernels, labels)  # of the interpolator of least norm
        outputs = torch.einsum("snN,sn->sN", K[chosen], coefficients)
        wrong = ((outputs * y < 0) & others).sum(1) / others.sum(1)
        return Point(c, float(wrong.mean()), float(found.bound.mean()), float(found.optimal_bound.mean()))


def rank_correlation(a: Sequence[float | int], b: Sequence[float | int]) -> float:
    """Spearman's: the correlation of ranks, equal values sharing theirs; NaN where one of them is constant.

    >>> round(rank_correlation([1, 2, 3], [10.0, 5.0, 7.0]), 9)
    -0.5
    """
    x, y = (torch.tensor(_ranks(values), dtype=torch.float64) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    size = float(x.norm() * y.norm())
    return float(x @ y) / size if size > 0 else math.nan


def _ranks(values: Sequence[float | int]) -> list[float]:
    return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]
