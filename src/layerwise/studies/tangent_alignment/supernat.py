"""Regression on one feature of signal and ten of noise: gradient descent, and SuperNat, all seeds as one program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.foundations.random import stream

METHODS = {"gd": None, "supernat": "initial-max", "supernat-trace": "trace"}
"""By name, the κ of SuperNat; None for gradient descent."""
FLOOR = 1e-12


class Curves(NamedTuple):
    """Of one method, a row a seed."""

    test: Float[Tensor, "S T"]
    """Error against the clean labels: E(⟨w, Φ⟩ − φ)²."""
    train: Float[Tensor, "S T"]
    bound: Float[Tensor, "S"]
    """Σ_t |δw_t| √Tr K_t / n, in the coordinates of each step."""
    weights: Float[Tensor, "S P"]
    """At the end, in the original coordinates."""


@dataclass(frozen=True, kw_only=True)
class NoisyRegression:
    """Φ = [φ, φ_noise] with φ ~ N(0, 1) and φ_noise ~ N(0, I/d); labels φ + φ_noise φ_noiseᵀ ε, ε ~ N(0, σ²)."""

    examples: int = 50
    noise_features: int = 10
    variance: float | int = 0.1
    """σ²."""
    steps: int = 400
    rate: float | int = 0.5
    """η in units of n/λ_1, where λ_1 is the kernel's largest eigenvalue; stable below 2."""

    def __post_init__(self) -> None:
        if not 0 < self.rate < 2:
            raise InputError(
                describe(f"rate={self.rate}", "a number above 0 and below 2, in units of n/λ_1", "take e.g. 0.5")
            )

    def draw(self, seeds: Sequence[int]) -> tuple[Float[Tensor, "S n P"], Float[Tensor, "S n"]]:
        """Features, the signal first, and labels."""
        n, d = self.examples, self.noise_features
        features, labels = [], []
        for seed in seeds:
            generator = stream(seed, "noisy regression")
            signal = torch.randn(n, generator=generator, dtype=torch.float64)
            noise = torch.randn(n, d, generator=generator, dtype=torch.float64) / d**0.5
            eps = self.variance**0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
            features.append(torch.cat([signal[:, None], noise], 1))
            labels.append(signal + noise @ (noise.T @ eps))
        return torch.stack(features), torch.stack(labels)

    def learning_rates(self, features: Float[Tensor, "S n P"]) -> Float[Tensor, "S"]:
        """η of each seed, of the loss ½ mean (f − y)²."""
        return self.rate * self.examples / torch.linalg.matrix_norm(features, 2).square()

    def curves(self, seeds: Sequence[int], method: str) -> Curves:
        """Descend ½ mean (f − y)² from w = 0."""
        if method not in METHODS:
            raise NameLookupError(unknown("method", method, METHODS))
        features, y = self.draw(seeds)
        U, singular, Vt = torch.linalg.svd(features, full_matrices=False)
        first = singular.square()  # λ_j,0
        rates, scales, kappa = self.learning_rates(features)[:, None], torch.ones_like(first), METHODS[method]
        labels, w = (U.mT @ y.unsqueeze(-1)).squeeze(-1), torch.zeros_like(first)  # w in the basis v
        outside = (y - (U @ labels.unsqueeze(-1)).squeeze(-1)).square().sum(1) / self.examples
        test, train, bound, divisor = [], [], torch.zeros(len(seeds), dtype=torch.float64), None
        for _ in range(self.steps + 1):
            residual = singular * w - labels
            test.append(self.test_error((Vt.mT @ w.unsqueeze(-1)).squeeze(-1)))
            train.append(residual.square().sum(1) / self.examples + outside)
            pull = residual / self.examples  # u_jᵀ∇_f L
            if len(test) > self.steps:
                break
            lam = first * scales
            bound += (rates * lam.sqrt() * pull).norm(dim=1) * lam.sum(1).sqrt() / self.examples
            w = w - rates * scales * singular * pull
            if kappa is not None:
                size = pull.abs().clamp_min(FLOOR)
                divisor = size.amax(1, keepdim=True) if divisor is None else divisor
                keep = (size * lam).sum(1, keepdim=True) / lam.sum(1, keepdim=True)
                scales = scales * size / (divisor if kappa == "initial-max" else keep)
        weights = (Vt.mT @ w.unsqueeze(-1)).squeeze(-1)
        return Curves(torch.stack(test, 1), torch.stack(train, 1), bound, weights)

    def test_error(self, w: Float[Tensor, "S P"]) -> Float[Tensor, "S"]:
        """(w_1 − 1)² + |w_noise|²/d."""
        return (w[:, 0] - 1).square() + w[:, 1:].square().sum(1) / self.noise_features
