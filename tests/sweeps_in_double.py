"""What a sweep of `linalg.jacobi` is, in the precision of its arguments: six products, for tests to compare with."""

import torch
from torch import Tensor

from layerwise.optim.cuda.linalg.jacobi import STILL, coupling, rotation, second_order


def swept(
    M: Tensor, U: Tensor, sweeps: int = 1, damping: float = 1e-3, still: float = STILL
) -> tuple[Tensor, Tensor, Tensor]:
    """The basis after some sweeps, eigenvalues of the last one to second order, and the couplings before each."""
    values, couplings = U[..., 0], []
    for _ in range(sweeps):
        S = U.mT @ M @ U
        S = (S + S.mT) / 2
        mean = S.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp(min=torch.finfo(S.dtype).tiny)
        S = S / mean[..., None]
        E = rotation(S, damping, still)
        V = U + U @ (E + E @ E / 2)
        U = V + V @ (torch.eye(V.shape[-1], dtype=V.dtype, device=V.device) - V.mT @ V) / 2
        values = mean * second_order(S, E)
        couplings.append(coupling(S, damping))
    return U, values, torch.stack(couplings)


def coupled(M: Tensor, U: Tensor, damping: float = 1e-3) -> Tensor:
    """How far ``Uᵀ M U`` is from diagonal."""
    return coupling(U.mT @ M @ U, damping)


def carried(V: Tensor, turn: Tensor, side: str) -> Tensor:
    """Second moments seen from a new basis on one side, coordinates taken as uncorrelated."""
    W = turn.square()
    W = W / W.sum(-1, keepdim=True)
    return W @ V if side == "left" else V @ W.mT
