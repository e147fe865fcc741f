"""Where noise in the labels keeps KFAC and DFW: the distance that their steps neither reduce nor raise, near G⋆.

There what is outside rowsp(G⋆) follows a linear recursion, KFAC's D⁺ = (1 − η) D + η N and DFW's
D⁺ = (I − η F⋆ᵀF⋆) D + η F⋆ᵀF⋆ N, whose noise N = F⋆⁺EᵀX(XᵀX)⁻¹P⊥ has a known covariance for Gaussian inputs. Its
stationary law is Gaussian; the mean of its operator norm is the floor, and is found by drawing it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.studies.feature_learning.batch import Batch
from layerwise.studies.feature_learning.covariance import power
from layerwise.studies.feature_learning.problem import Task
from layerwise.studies.feature_learning.two_layer import least_squares_head, pull_back


def deviation_of_level(G: Float[Tensor, "k dx"], task: Task, n: int, level: float) -> float:
    """The labels' standard deviation σ that makes Theorem 3.6's σ̄ √(dx/n) the given level.

    σ̄² = σ²/(s_min(F⋆)² λ_min(Σ)).

    >>> I = torch.eye(4).double()
    >>> task = Task(Sigma=I, root=I, map=3 * I[:2], deviation=0.0, uniform=False)
    >>> round(deviation_of_level(I[:2], task, n=400, level=0.1), 9)
    3.0
    """
    s, values = torch.linalg.svdvals(task.map @ G.mT)[-1], torch.linalg.eigvalsh(task.Sigma)[0]
    return float(level * s * values.sqrt() * math.sqrt(n / task.Sigma.shape[-1]))


def with_level(G: Float[Tensor, "k dx"], task: Task, n: int, level: float) -> Task:
    """The task with noise of that level in its labels."""
    return replace(task, deviation=deviation_of_level(G, task, n, level))


def kfac_floor(
    G: Float[Tensor, "k dx"],
    tasks: Sequence[Task],
    n: int,
    lr: float,
    generator: torch.Generator,
    draws: int = 200,
) -> float:
    """KFAC's floor with n samples of each task in a step: the mean of ‖D‖ in the stationary law.

    D = √(η/(2 − η)) P̄⁻¹ mean_t F_tᵀN_t with P̄ = mean_t F_tᵀF_t, and N_t = EᵀX(XᵀX)⁻¹P⊥ of task t, whose rows are
    independent with mean covariance σ² P⊥Σ_t⁻¹P⊥/(n − dx − 1). One task is the stylised KFAC of Theorem 3.6.
    """
    heads = [task.map @ G.mT for task in tasks]
    P = torch.stack([F.mT @ F for F in heads]).mean(0)
    total = sum(F.mT @ _noise(G, task, n, generator, draws) for F, task in zip(heads, tasks, strict=True))
    D = math.sqrt(lr / (2 - lr)) * torch.linalg.solve(P, total / len(heads))
    return float(torch.linalg.matrix_norm(D, 2).mean())


def dfw_floor(
    G: Float[Tensor, "k dx"], task: Task, n: int, lr: float, generator: torch.Generator, draws: int = 200
) -> float:
    """DFW's floor: rows of D have covariance η σ² (2I − η F⋆ᵀF⋆)⁻¹, in which no eigenvalue of F⋆ᵀF⋆ is inverted."""
    F, k = task.map @ G.mT, len(G)
    rows = power(lr * torch.linalg.inv(2 * torch.eye(k, dtype=G.dtype) - lr * F.mT @ F), 0.5)
    D = rows @ _noise(G, task, n, generator, draws)[:, :k]
    return float(torch.linalg.matrix_norm(D, 2).mean())


def _noise(
    G: Float[Tensor, "k dx"], task: Task, n: int, generator: torch.Generator, draws: int
) -> Float[Tensor, "draws dy dx"]:
    """Gaussian matrices with a row for each label, independent, of covariance σ² P⊥Σ⁻¹P⊥/(n − dx − 1)."""
    dy, dx = task.map.shape
    if n < dx + 2:
        raise InputError(describe(f"n={n}, dx={dx}", "n ≥ dx + 2, below which (XᵀX)⁻¹ has no mean", "raise n"))
    Z = torch.randn(draws, dy, dx, generator=generator, dtype=G.dtype) @ power(task.Sigma, -0.5)
    return (Z - (Z @ G.mT) @ G) * (task.deviation / math.sqrt(n - dx - 1))


@dataclass(frozen=True, kw_only=True)
class StepTerms:
    """What the proof of Theorem 3.6 bounds, of one step of KFAC."""

    head: float
    """‖F⁺‖ s_min(F⋆), of the head F that was fitted at G; at most 2 by Lemma B.5."""
    noise: float
    """‖F⁺EᵀX(XᵀX)⁻¹‖, bounded in Proposition B.6; without η."""
    factor: float
    """s_min(R) of Ḡ = R G₊ before rows are made orthonormal, bounded in Proposition B.7."""


def step_terms(
    G: Float[Tensor, "k dx"], star: Float[Tensor, "k dx"], task: Task, first: Batch, second: Batch, lr: float
) -> StepTerms:
    """The terms of a step from G with the head fitted on the first batch and the representation moved on the second."""
    F = least_squares_head(G, first)
    least = torch.linalg.svdvals(task.map @ star.mT)[-1]
    moved = G - lr * (G - pull_back(F, second.ols))
    return StepTerms(
        head=float(least / torch.linalg.svdvals(F)[-1]),
        noise=float(torch.linalg.matrix_norm(pull_back(F, second.ols - task.map), 2)),
        factor=float(torch.linalg.svdvals(moved)[-1]),
    )
