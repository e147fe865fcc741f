"""Eigenvectors kept up to date by products alone, while their matrix drifts.

U is nearly an eigenbasis of M: that of an earlier M, or one rounded to half precision. Then ``S = Uᵀ M U`` is nearly
diagonal, and says how to turn U. Nothing here waits for the device; columns keep their places and are not sorted.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.linalg.probes import probe_columns
from layerwise.optim.cuda.linalg.fp16 import HalfPair
from layerwise.optim.cuda.linalg.products import TORCH, HalfPairProducts, Products
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton.device import MOST_MATRICES

FUSED_SIZE = 64
"""Smaller matrices are not worth kernels of their own."""

APPLICATIONS, MARGIN = 4, 1.15
"""Of E to a few columns, for its norm, and what is added to that: where many vectors turn at once its singular values
lie close together, and two applications found two thirds of the largest. Beyond a norm of 1.7 the basis would not be
made orthogonal again, but blow up."""

STILL = 0.02
"""Vectors whose eigenvalues, shift included, differ by less than this part hardly turn: no root would notice.

With 0.05 EKFAC's directions erred by up to 1.03e-2 on factors of a training, however many sweeps; with this by 7e-3.
"""


def tracked_basis(
    M: Float[Tensor, "*batch n n"] | HalfPair,
    U: Float[Tensor, "*batch n n"],
    sweeps: int = 1,
    products: Products = TORCH,
    *,
    damping: int | float = 1e-3,
    still: int | float = STILL,
    measured: bool = False,
) -> tuple[Float[Tensor, "*batch n n"], Float[Tensor, "*batch n"], Float[Tensor, "rounds *batch"]]:
    """The basis after some sweeps, the eigenvalues, and the `coupling` *before* each sweep, the first one first.

    A sweep is six products: two for S, two for ``V = U (I + E + E²/2)``, where E is the `rotation`, and two for a step
    of Newton and Schulz, ``V + V (I − Vᵀ V)/2``, which makes V orthogonal again, rounding of U included. Three of them
    only correct (E², ``U E``, ``V (I − Vᵀ V)``) and may be rough: half precision does. A sweep about
    squares a small coupling; from an unrelated basis it converges too, in some twenty sweeps. Eigenvalues are those of
    S to second order; `measured` spends two products more on eigenvalues and (last) coupling of the basis returned.
    `damping`, relative to the mean eigenvalue, is the shift of `coupling`; with ``still=0`` and ``damping=0`` sweeps
    converge to eigenvectors of separate eigenvalues to rounding (equal ones need `still`). Equal diagonal entries of S
    do not turn, coupled or not: start from an eigenbasis, not from I. Where M is not finite the basis is returned as it
    came, with a last coupling of infinity and eigenvalues that are not numbers.

    >>> M = torch.tensor([[2.0, 0.1], [0.1, 1.0]])
    >>> U, values, couplings = tracked_basis(M, torch.eye(2), sweeps=2, damping=0)
    >>> [[round(x, 4) for x in found.tolist()] for found in (values, torch.linalg.eigvalsh(M), couplings)]
    [[2.0099, 0.9901], [0.9901, 2.0099], [0.0707, 0.0004]]
    """
    if sweeps < 0 or sweeps + measured < 1:
        raise InputError(describe(f"sweeps={sweeps}", "a number ≥ 1, or 0 with measured=True", "pass e.g. sweeps=1"))
    fused, M_ = _takes(products, M, U), products.prepared(M, definite=True)
    U = U.contiguous() if fused else U
    V, values, couplings = U, U[..., 0], []
    for _ in range(sweeps):
        V, values, left = (_fused if fused else _sweep)(M_, V, damping, still, products)
        couplings.append(left)
    if measured:
        S, scale = _seen_from(M_, products.prepared(V), products)
        values = scale * S.diagonal(dim1=-2, dim2=-1)
        couplings.append(coupling(S, damping))
    good = torch.isfinite(couplings[-1])[..., None, None]
    return torch.where(good, V, U), values, torch.stack(couplings)


def _sweep(M: Any, U: Tensor, damping: int | float, still: int | float, products: Products) -> tuple[Tensor, ...]:
    U_ = products.prepared(U)
    S, scale = _seen_from(M, U_, products)
    E = rotation(S, damping, still)
    E_ = products.prepared(E)
    V = products.rough(U_, products.rough(E_, E_, add=E, alpha=0.5), add=U)
    V_ = products.prepared(V)
    V = products.rough(V_, products.precise(V_.mT, V_, alpha=-1, identity=1, symmetric=True), add=V, alpha=0.5)
    # What is not finite in V, or in I − VᵀV, is in every row by now.
    left = _or_infinite(coupling(S, damping) + 0 * V[..., 0, :].sum(-1))
    return V, scale * second_order(S, E), left


def _takes(products: Products, M: Tensor | HalfPair, U: Tensor) -> bool:
    """Whether `triton.jacobi` takes these."""
    if not isinstance(products, HalfPairProducts) or not triton_products.available(M.device):
        return False
    stacks = U.ndim == 3 and len(U) <= MOST_MATRICES and U.dtype == torch.float32
    stacks = stacks and (isinstance(M, HalfPair) or M.dtype == torch.float32)
    return stacks and M.shape[-1] >= FUSED_SIZE and M.shape[-1] % triton_products.ALIGNED == 0


def _fused(M: Any, U: Tensor, damping: int | float, still: int | float, _: Products) -> tuple[Tensor, ...]:
    from layerwise.optim.cuda.triton import jacobi as triton_sweeps

    return triton_sweeps.sweep(M, U, damping, still)


def coupling(S: Float[Tensor, "*batch n n"], damping: int | float = 1e-3) -> Float[Tensor, "*batch"]:
    """How far S is from diagonal: ``‖D^-½ off(S) D^-½‖_F/√n``, ``D = diag(S) + damping · mean``.

    This is how inverse roots see it; the couplings of one large eigenvalue to many small ones hardly count.

    >>> coupling(torch.tensor([[4.0, 1.0], [1.0, 1.0]]), damping=0).item()
    0.5
    """
    diagonal = S.diagonal(dim1=-2, dim2=-1)
    D = diagonal.clamp(min=0) + damping * diagonal.mean(-1, keepdim=True)
    weight = D.clamp(min=torch.finfo(S.dtype).tiny ** 0.5).rsqrt()
    squares = (weight[..., :, None] * S * weight[..., None, :]).square().masked_fill(_on_diagonal(S), 0)
    return _or_infinite(squares.sum((-2, -1)).div(S.shape[-1]).sqrt())


def rotation(
    S: Float[Tensor, "*batch n n"], damping: int | float = 1e-3, still: int | float = STILL
) -> Float[Tensor, "*batch n n"]:
    """The antisymmetric E for which ``(I − E) S (I + E)`` is diagonal to first order, held within ‖E‖₂ ≈ 1.

    ``S_ij Δ/(Δ² + S_ij² + τ²)``, ``Δ = S_jj − S_ii``: nearly Jacobi's angle for the pair. τ is `still` times the mean
    of the two diagonal entries, the shift included; it leaves vectors of nearly equal eigenvalues, e.g. zeros, where
    they are. Where the squares of a row add up to more than about one, many turn at once, and all are held back.

    >>> [round(x, 3) for x in rotation(torch.tensor([[2.0, 0.1], [0.1, 1.0]]))[0].tolist()]
    [0.0, -0.098]
    """
    diagonal = S.diagonal(dim1=-2, dim2=-1)
    rounding = 4 * torch.finfo(S.dtype).eps * diagonal.amax(-1, keepdim=True) + torch.finfo(S.dtype).tiny ** 0.5
    width = still / 2 * (diagonal.clamp(min=0) + damping * diagonal.mean(-1, keepdim=True)) + rounding
    gap = diagonal[..., None, :] - diagonal[..., :, None]
    E = S * gap / (gap.square() + S.square() + (width[..., None, :] + width[..., :, None]).square())
    rows = E.square().sum(-1)
    E = E * (1 + rows[..., :, None] + rows[..., None, :]).rsqrt()
    return E / (MARGIN * _spectral_norm(E)).clamp(min=1)[..., None, None]


def carried(
    V: Float[Tensor, "K O I"],
    turn: Float[Tensor, "K n n"],
    side: Literal["left", "right"],
    products: Products = TORCH,
) -> Float[Tensor, "K O I"]:
    """Second moments seen from a new basis on one side, coordinates taken as uncorrelated. One product.

    ``V'_j = Σᵢ W_ji V_i``, W the squares of the `turn` ``U_newᵀ U_old``, whose rows are made to add up to one. Exact
    where the basis is only reordered or its signs change; the total is kept. The product may be rough: no term is
    negative, so that its relative error is that of the terms.

    >>> swapped = torch.eye(2).flip(0)[None]
    >>> carried(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), swapped, "left").tolist()
    [[[3.0, 4.0], [1.0, 2.0]]]
    """
    if side not in ("left", "right"):
        raise InputError(describe(f"side={side!r}", "'left' or 'right'", "name the side of V that U acts on"))
    W = turn.square()
    W = W / W.sum(-1, keepdim=True)
    return products.rough(W, V) if side == "left" else products.rough(V, W.mT)


def _seen_from(M: Any, U: Any, products: Products) -> tuple[Tensor, Tensor]:
    """``Uᵀ M U`` over its mean eigenvalue, and that ``[*batch, 1]``: squares of small numbers must not underflow."""
    S = products.precise(U.mT, products.precise(M, U), symmetric=True)
    scale = S.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp(min=torch.finfo(S.dtype).tiny)
    return S / scale[..., None], scale


def second_order(S: Tensor, E: Tensor) -> Tensor:
    """The diagonal of S once turned by E."""
    diagonal = S.diagonal(dim1=-2, dim2=-1)
    gap = diagonal[..., None, :] - diagonal[..., :, None]
    return (diagonal + (E * (2 * S - E * gap)).sum(-2)).clamp(min=0)


def _spectral_norm(E: Tensor, applications: int = APPLICATIONS) -> Tensor:
    """An estimate from below, by the power method on a few columns."""
    v = probe_columns(E.shape[-1], 16, like=E)
    for _ in range(applications):
        v = v / v.norm(dim=-2, keepdim=True).clamp(min=torch.finfo(E.dtype).tiny)
        v = E @ v
    return v.norm(dim=-2).amax(-1)


def _or_infinite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _on_diagonal(S: Tensor) -> Tensor:
    return torch.eye(S.shape[-1], dtype=torch.bool, device=S.device)
