"""What is measured: distance of representations, loss without noise, loss after transfer."""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.batch import Batch
from layerwise.studies.feature_learning.by_products import largest_singular_value, orthonormal_by_products
from layerwise.studies.feature_learning.problem import Setting, Task, draw_problem
from layerwise.studies.feature_learning.two_layer import least_squares_head, times_moment


def subspace_distance(G: Float[Tensor, "*r k dx"], target: Float[Tensor, "*s k dx"]) -> Float[Tensor, "*r"]:
    """Eq. (7): ‖Q (I − Q⋆ᵀQ⋆)‖ with Q and Q⋆ orthonormal bases of the rows; 1 where G is not finite.

    Small distances keep their digits, which √(1 − cos²) would lose below 1e-8.

    >>> a, b = torch.tensor([[1.0, 0.0, 0.0]]).double(), torch.tensor([[1.0, 1e-12, 0.0]]).double()
    >>> f"{float(subspace_distance(b, a)):.6g}"
    '1e-12'
    """
    finite = G.isfinite().all(-1).all(-1)
    sine = _sine_by_products if G.is_cuda else _sine
    found = sine(torch.where(finite[..., None, None], G, target), target).clamp(max=1.0)
    return torch.where(finite, found, torch.ones_like(found))


def _sine(G: Tensor, target: Tensor) -> Tensor:
    Q, basis = torch.linalg.qr(G.mT)[0], torch.linalg.qr(target.mT)[0]
    return torch.linalg.svdvals(Q - basis @ (basis.mT @ Q))[..., 0]


def _sine_by_products(G: Tensor, target: Tensor) -> Tensor:
    """The same where QR and SVD are slow."""
    Q, basis = orthonormal_by_products(G).mT, orthonormal_by_products(target).mT
    return largest_singular_value(Q - basis @ (basis.mT @ Q))


def excess(A: Float[Tensor, "*r dy dx"], task: Task) -> Float[Tensor, "*r"]:
    """E|(A − F⋆G⋆) x|²: what a linear map A loses on a task beyond the noise."""
    D = A - task.map.to(A.dtype)
    return (times_moment(D, task.Sigma.to(A.dtype)) * D).sum((-2, -1))


def transfer_excess(G: Float[Tensor, "*r k dx"], batch: Batch, task: Task) -> Float[Tensor, "*r"]:
    """The excess after a head is fitted on a batch of the target task, with the representation as it is."""
    return excess(least_squares_head(G, batch) @ G, task)


def whitened_representation(setting: Setting, seed: int) -> Float[Tensor, "k dx"]:
    """G⋆Σ^½ of a seed's problem: on inputs Σ^-½x the labels are F⋆(G⋆Σ^½)(Σ^-½x) + ε, so this is what is learned there.

    >>> whitened_representation(Setting(dx=10, dy=4, k=2), 0).shape
    torch.Size([2, 10])
    """
    problem = draw_problem(setting, stream(seed, "problem"))
    return problem.G @ problem.train.root


def whitened_distance(setting: Setting, seed: int) -> float:
    """Distance from G⋆ to rowsp(G⋆Σ^½), where algorithms end that see whitened inputs.

    >>> 0 < whitened_distance(Setting(dx=10, dy=4, k=2), 0) < 1
    True
    """
    problem = draw_problem(setting, stream(seed, "problem"))
    return float(subspace_distance(problem.G @ problem.train.root, problem.G))


def rows_off(G: Float[Tensor, "k dx"]) -> float:
    """How far the rows of G are from orthonormal: the largest entry of |GGᵀ − I|.

    >>> rows_off(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    3.0
    """
    return float((G @ G.mT - torch.eye(len(G), dtype=G.dtype)).abs().max())
