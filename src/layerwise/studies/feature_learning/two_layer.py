"""The linear two-layer network f(x) = F G x: gradients, least-squares head, orthonormal rows.

All take runs `[seed, rate, …]` and a `Batch` `[seed, 1, …]`, or plain matrices without leading axes.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.studies.feature_learning.batch import Batch, solve_right
from layerwise.studies.feature_learning.by_products import orthonormal_by_products


def times_moment(G: Float[Tensor, "*r m dx"], S: Float[Tensor, "*s dx dx"]) -> Float[Tensor, "*r m dx"]:
    """G S. Rates are folded into rows, so that S, which they share, is not copied for each."""
    if G.dim() == 4 and S.dim() == 4 and S.shape[1] == 1:
        return (G.flatten(1, 2) @ S.squeeze(1)).unflatten(1, G.shape[1:3])
    return G @ S


def grad_G(F: Float[Tensor, "*r dy k"], G: Float[Tensor, "*r k dx"], batch: Batch) -> Float[Tensor, "*r k dx"]:
    """∇_G of ½ mean |y − FGx|²: Fᵀ(F G Sx − Syx)."""
    return F.mT @ (F @ times_moment(G, batch.Sx) - batch.Syx)


def grad_F(F: Float[Tensor, "*r dy k"], G: Float[Tensor, "*r k dx"], batch: Batch) -> Float[Tensor, "*r dy k"]:
    """∇_F of ½ mean |y − FGx|²: (F G Sx − Syx) Gᵀ."""
    return (F @ times_moment(G, batch.Sx) - batch.Syx) @ G.mT


def gradients(
    F: Float[Tensor, "*r dy k"], G: Float[Tensor, "*r k dx"], batch: Batch
) -> tuple[Float[Tensor, "*r dy k"], Float[Tensor, "*r k dx"]]:
    """∇_F and ∇_G at once, which share F G Sx − Syx."""
    residual = F @ times_moment(G, batch.Sx) - batch.Syx
    return residual @ G.mT, F.mT @ residual


def least_squares_head(G: Float[Tensor, "*r k dx"], batch: Batch) -> Float[Tensor, "*r dy k"]:
    """F_ls = YᵀZ (ZᵀZ)⁻¹ = Syx Gᵀ (G Sx Gᵀ)⁻¹ for features Z = X Gᵀ."""
    return solve_right(times_moment(G, batch.Sx) @ G.mT, batch.Syx @ G.mT)


def pull_back(F: Float[Tensor, "*r dy k"], W: Float[Tensor, "*w dy dx"]) -> Float[Tensor, "*r k dx"]:
    """F⁺ W = (FᵀF)⁻¹ Fᵀ W, for F of full column rank."""
    return solve_right(F.mT @ F, W.mT @ F).mT


def loss(F: Float[Tensor, "*r dy k"], G: Float[Tensor, "*r k dx"], batch: Batch) -> Float[Tensor, "*r"]:
    """½ mean |y − FGx|² = ½ (tr Syy − 2 ⟨FG, Syx⟩ + ⟨FG Sx, FG⟩)."""
    A = F @ G
    return (batch.Syy - 2 * (A * batch.Syx).sum((-2, -1)) + (times_moment(A, batch.Sx) * A).sum((-2, -1))) / 2


def orthonormal_rows(G: Float[Tensor, "*r k dx"]) -> Float[Tensor, "*r k dx"]:
    """Ortho: the Q of Gᵀ = QᵀR with diag(R) > 0, as rows.

    >>> orthonormal_rows(torch.tensor([[0.0, -2.0, 0.0], [3.0, 1.0, 0.0]])).round().int().tolist()
    [[0, -1, 0], [1, 0, 0]]
    """
    if G.is_cuda:
        return orthonormal_by_products(G)
    Q, R = torch.linalg.qr(G.mT)
    sign = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(Q.dtype)
    return (Q * sign.unsqueeze(-2)).mT.contiguous()
