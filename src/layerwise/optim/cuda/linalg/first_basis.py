"""A first eigenbasis by products: a few steps of orthogonal iteration, made orthogonal by Cholesky's factor.

`torch.linalg.eigh` takes 8 to 60 ms a matrix on a GPU and waits for the device. A basis that sweeps of `jacobi` will
follow need not be exact, least of all while factors are those of one batch.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.optim.cuda.linalg.block_inverse import inverse_factor
from layerwise.optim.cuda.linalg.products import TORCH, Products

SHIFTS = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
"""Added to M in units of its mean eigenvalue, a step of the iteration each. From the identity, columns of M itself are
nearly all its first eigenvector, too alike to be told apart in float32. With shifts that fall by three at a time, what
earlier steps have not told apart yet differs by no more than that."""
REGULAR = 2e-6
"""Times √n, about what 22 bits leave of ``VᵀV``, added to it. Sweeps mend what that leaves undone."""


def first_basis(
    M: Float[Tensor, "K n n"], products: Products = TORCH
) -> tuple[Float[Tensor, "K n n"], Bool[Tensor, "K"]]:
    """Nearly eigenvectors of M, the largest first, and which matrices have them; nothing waits for the device.

    Each step is ``V = (M + shift I) U`` with columns divided by their lengths, and ``U = V Xᵀ``, where ``XᵀX`` is the
    inverse of VᵀV. Rows of zeros behind others (padding) keep vectors of their own, the last ones.

    >>> U, good = first_basis(torch.diag(torch.tensor([1.0, 3.0, 0.0]))[None])
    >>> [[round(x, 3) for x in row] for row in U[0].tolist()], good.tolist()
    ([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], [True])
    """
    diagonal = M.diagonal(dim1=-2, dim2=-1)
    n, tiny = M.shape[-1], torch.finfo(M.dtype).tiny
    unit = M / diagonal.mean(-1).clamp(min=tiny)[:, None, None]
    order = diagonal.argsort(dim=-1, descending=True, stable=True)
    U = torch.zeros_like(unit).scatter_(-2, order[:, None, :], 1.0)
    M_, good = products.prepared(unit, definite=True), torch.ones(len(M), dtype=torch.int8, device=M.device)
    for shift in SHIFTS:
        V = products.precise(M_, U, add=shift * U)
        V_ = products.prepared(V / V.norm(dim=-2, keepdim=True).clamp(min=tiny))
        G = products.precise(V_.mT, V_, identity=REGULAR * n**0.5, symmetric=True)
        U = products.precise(V_, products.prepared(inverse_factor(G, good, products)).mT)
    return U, (good != 0) & torch.isfinite(U).all(-1).all(-1)
