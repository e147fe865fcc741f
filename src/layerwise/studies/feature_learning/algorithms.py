"""SGD, Adam and the alternating family of eq. (8): AMGD, DFW, KFAC, min-min.

Each holds a rate, or several that run side by side. A step reads two independent batches: the representation moves on
the first, the head on the second.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.studies.feature_learning.batch import Batch, solve_right
from layerwise.studies.feature_learning.normalise import check_norm
from layerwise.studies.feature_learning.two_layer import (
    grad_G,
    gradients,
    least_squares_head,
    orthonormal_rows,
    pull_back,
)


@dataclass(frozen=True)
class Weights:
    """F and G of all runs, and what an algorithm remembers beside them."""

    F: Float[Tensor, "*r dy k"]
    G: Float[Tensor, "*r k dx"]
    memory: tuple[Tensor, ...] = ()
    steps: int | Float[Tensor, ""] = 0
    """Iterations so far, for those that count them: a tensor where an iteration is recorded once and replayed."""


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """A way to move (F, G); frozen, so that one object can serve many runs."""

    lr: float | int | Sequence[float | int] = 1e-2
    norm: str | None = None
    """A normalisation of the inputs (`normalise.NORMS`), or none."""

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate < float("inf") for rate in self.rates):
            raise InputError(describe(f"lr={self.lr}", "a number ≥ 0, or several", "pass e.g. lr=1e-2"))
        check_norm(self.norm)

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates as floats, one for each run."""
        return (float(self.lr),) if isinstance(self.lr, int | float) else tuple(map(float, self.lr))

    @property
    def inverts_inputs(self) -> bool:
        """Whether XᵀX must be invertible, which takes batches of at least dx."""
        return False

    @abstractmethod
    def step(self, w: Weights, lr: Float[Tensor, "*r 1 1"], first: Batch, second: Batch) -> Weights:
        """The weights after one iteration."""


@dataclass(frozen=True, kw_only=True)
class SGD(Algorithm):
    """Both layers at once: G − η ∇_G, F − η ∇_F."""

    def step(self, w: Weights, lr: Float[Tensor, "*r 1 1"], first: Batch, second: Batch) -> Weights:
        """One simultaneous step on the first batch."""
        dF, dG = gradients(w.F, w.G, first)
        return Weights(w.F - lr * dF, w.G - lr * dG)


@dataclass(frozen=True, kw_only=True)
class Adam(Algorithm):
    """Both layers at once: θ − η m̂ / (√v̂ + ε), entry by entry."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def step(self, w: Weights, lr: Float[Tensor, "*r 1 1"], first: Batch, second: Batch) -> Weights:
        """One simultaneous step on the first batch."""
        theta = (w.F, w.G)
        memory = w.memory or tuple(torch.zeros_like(p) for p in (*theta, *theta))
        grads = gradients(w.F, w.G, first)
        (b1, b2), t = self.betas, w.steps + 1
        m = [b1 * old + (1 - b1) * g for old, g in zip(memory[:2], grads, strict=True)]
        v = [b2 * old + (1 - b2) * g * g for old, g in zip(memory[2:], grads, strict=True)]
        F, G = (
            p - lr * (mi / (1 - b1**t)) / ((vi / (1 - b2**t)).sqrt() + self.eps)
            for p, mi, vi in zip(theta, m, v, strict=True)
        )
        return Weights(F, G, (*m, *v), t)


@dataclass(frozen=True, kw_only=True)
class Alternating(Algorithm):
    """Eq. (8): G⁺ = Ortho(G − η P⁻¹ ∇_G Q⁻¹) on one batch, then F⁺ = (1 − η_F) F + η_F F_ls(G⁺) on another."""

    head_lr: float | int = 1.0
    ortho: bool = True

    @abstractmethod
    def direction(
        self, F: Float[Tensor, "*r dy k"], G: Float[Tensor, "*r k dx"], batch: Batch
    ) -> Float[Tensor, "*r k dx"]:
        """P⁻¹ ∇_G Q⁻¹."""

    def step(self, w: Weights, lr: Float[Tensor, "*r 1 1"], first: Batch, second: Batch) -> Weights:
        """One iteration of the template; by Lemma 3.1 the head's preconditioned step is a mean with F_ls."""
        G = w.G - lr * self.direction(w.F, w.G, first)
        if self.ortho:
            G = orthonormal_rows(G)
        return Weights(torch.lerp(w.F, least_squares_head(G, second), float(self.head_lr)), G)


@dataclass(frozen=True, kw_only=True)
class AMGD(Alternating):
    """Alternating minimisation and gradient descent: P = Q = I. With `norm`, on normalised inputs."""

    def direction(
        self, F: Float[Tensor, "*r dy k"], G: Float[Tensor, "*r k dx"], batch: Batch
    ) -> Float[Tensor, "*r k dx"]:
        """∇_G."""
        return grad_G(F, G, batch)


@dataclass(frozen=True, kw_only=True)
class DFW(Alternating):
    """De-bias and feature-whiten: P = I, Q = Sx."""

    @property
    def inverts_inputs(self) -> bool:
        """Always."""
        return True

    def direction(
        self, F: Float[Tensor, "*r dy k"], G: Float[Tensor, "*r k dx"], batch: Batch
    ) -> Float[Tensor, "*r k dx"]:
        """∇_G Sx⁻¹ = Fᵀ (FG − Syx Sx⁻¹)."""
        return F.mT @ (F @ G - batch.ols)


@dataclass(frozen=True, kw_only=True)
class KFAC(Alternating):
    """Stylised KFAC: P = FᵀF, Q = Sx + λI with λ the `ridge`."""

    ridge: float | int = 0.0

    @property
    def inverts_inputs(self) -> bool:
        """Without a ridge."""
        return self.ridge == 0

    def direction(
        self, F: Float[Tensor, "*r dy k"], G: Float[Tensor, "*r k dx"], batch: Batch
    ) -> Float[Tensor, "*r k dx"]:
        """(FᵀF)⁻¹ ∇_G (Sx + λI)⁻¹, which for λ = 0 is G − F⁺ Syx Sx⁻¹."""
        if self.ridge == 0:
            return G - pull_back(F, batch.ols)
        Q = batch.Sx + self.ridge * torch.eye(batch.Sx.shape[-1], dtype=G.dtype, device=G.device)
        return solve_right(F.mT @ F, solve_right(Q, grad_G(F, G, batch)).mT).mT


@dataclass(frozen=True, kw_only=True)
class MinMin(KFAC):
    """Alternating minimisation of both layers: KFAC with η = η_F = 1."""

    lr: float | int | Sequence[float | int] = 1.0


def with_rate(algorithm: Algorithm, lr: float | int | Sequence[float | int] | None) -> Algorithm:
    """The algorithm at another rate, or as it is for None."""
    return algorithm if lr is None else replace(algorithm, lr=lr)
