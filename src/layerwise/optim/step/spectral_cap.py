"""A bound on the largest singular value of an update.

Of two updates of one norm ``‖D‖``, one that has all of it in a single direction moves the weights √r times as far
along that as one of stable rank ``r = ‖D‖²/σ₁²`` moves them along its largest. AdamW's updates have a stable rank of 3
to 5. Those of K-FAC fall to 1.5 at high rates, and losses jump there (decision 30). So a direction is cut along its
largest singular value, where that is more than `TIMES` the root mean square of all of them:

    D ← D (I − (1 − s/‖D v‖) v vᵀ)   where  ‖D v‖ > s = TIMES · ‖D‖ / √min(O, I)

with v the right singular vector, as one step of power iteration finds it. Whatever v is, nothing gets longer by this.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.linalg import cross_product
from layerwise.foundations.linalg.probes import probe_columns

TIMES = 3.0
"""Of the root mean square of all singular values that the largest may be."""
HALF_MOST = torch.finfo(torch.float16).max
PROBES = 16
"""Columns from which the power iteration starts; the one that has come farthest is taken."""


def capped(D: Float[Tensor, "K O I"], norms: Float[Tensor, "K"], sides: tuple[int, int]) -> Float[Tensor, "K O I"]:
    """The directions with the part along v cut. `sides` are those of the matrices without padding.

    >>> peaked = torch.diag(torch.tensor([8.0] + 63 * [0.01]))[None]
    >>> capped(peaked, peaked.flatten(1).norm(dim=1), (64, 64))[0, 0, 0].round(decimals=2)  # 3 · 8/√64
    tensor(3.)
    """
    share = most_of_norm(sides)
    if share >= 1:
        return D
    v = right_singular_vectors(D)
    u = cross_product(D.mT, v.to(D.dtype))
    sigma = torch.linalg.vector_norm(u, dim=1, keepdim=True)
    excess = (sigma - (share * norms).view(-1, 1, 1).to(sigma)).clamp_min(0).nan_to_num(0.0)
    root = excess.sqrt()  # on both sides: either alone may exceed half precision
    u, v = u / sigma.clamp_min(torch.finfo(u.dtype).tiny) * root, v * root
    capped = torch.addcmul(D, u.to(D.dtype), v.mT.to(D.dtype), value=-1)  # one pass, where baddbmm copies D first
    # Where one row and one column are strong, the entry at which they cross may grow.
    return capped.clamp_(-HALF_MOST, HALF_MOST) if D.dtype == torch.float16 else capped


def most_of_norm(sides: tuple[int, int]) -> float:
    """What part of a matrix's norm its largest singular value may be; from 1 on any may.

    >>> most_of_norm((64, 1000))
    0.375
    """
    return TIMES / min(sides) ** 0.5


def right_singular_vectors(D: Float[Tensor, "K O I"]) -> Float[Tensor, "K I 1"]:
    """About that of the largest singular value of each matrix, in float32 or better.

    ``Y = D Z`` of columns ±1 has each singular direction with its share of ``‖D‖²``; of the columns ``Dᵀ y / ‖y‖`` the
    longest is close to ``σ₁ v₁`` where one direction has much of D. Zeros for a matrix of zeros.
    """
    K, _, I = D.shape
    Y = cross_product(D.mT, probe_columns(I, PROBES, like=D).expand(K, -1, -1))
    tiny = torch.finfo(Y.dtype).tiny
    Y = Y / torch.linalg.vector_norm(Y, dim=1, keepdim=True).clamp_min(tiny)
    X = cross_product(D, Y.to(D.dtype))
    lengths, place = torch.linalg.vector_norm(X, dim=1, keepdim=True).max(-1, keepdim=True)
    return X.gather(-1, place.expand(-1, I, -1)) / lengths.clamp_min(tiny)
