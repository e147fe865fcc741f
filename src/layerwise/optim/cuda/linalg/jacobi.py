"""Eigenvectors kept up to date by products alone, while their matrix drifts; as one half, 2¹⁴ U in float16.

U is nearly an eigenbasis of M: that of an earlier M. Then ``S = Uᵀ M U`` is nearly diagonal, and says how to turn U.
Nothing here waits for the device; columns keep their places and are not sorted.

Rounding turns the vectors of such a basis by 2⁻¹² or so of their length, in random directions. That is less than what
a sweep leaves of a drift. A sweep is six products of halves, large ones cuBLAS's, and four and a half if M is rounded
as well. That moves entries of ``Uᵀ M U`` by 1e-4 of the mean eigenvalue or less; training moves them by much more.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Float16, Float32
from torch import Tensor

from layerwise.foundations.linalg.probes import probe_columns
from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.linalg.fp16 import Half, HalfPair
from layerwise.optim.cuda.linalg.orthogonal import BASIS_SCALE, bounded_pair, product_bound, writes_halves
from layerwise.optim.cuda.linalg.split_fp16 import prepared
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton.products import pair_product

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

UNIT = 2.0**14
"""Scale of E, of ``I + E + E²/2`` and of ``I − Vᵀ V``."""
LARGE = 1536
"""From this size on products with a result in float16 are cuBLAS's, if it writes that (`writes_halves`)."""


def tracked_basis(
    M: Float[Tensor, "*batch n n"] | HalfPair | Half,
    U: Half,
    sweeps: int = 1,
    *,
    damping: int | float = 1e-3,
    still: int | float = STILL,
) -> tuple[Half, Float32[Tensor, "*batch n"], Float32[Tensor, "sweeps *batch"]]:
    """A basis with the fixed scale after some sweeps, the eigenvalues, and the `coupling` *before* each sweep.

    A sweep is ``V = U (I + E + E²/2)``, where E is the `rotation`, and a step of Newton and Schulz,
    ``V + V (I − Vᵀ V)/2``, which makes V orthogonal again, rounding of U included. It about squares a small coupling;
    from an unrelated basis it converges too, in some twenty sweeps. Eigenvalues are those of S to second order.
    `damping`, relative to the mean eigenvalue, is the shift of `coupling`. Equal diagonal entries of S do not turn,
    coupled or not: start from an eigenbasis, not from I. Of an M that is one half, products are of halves alone. Where
    something is not finite the last coupling is infinite, and the basis is of no use.

    >>> from layerwise.optim.cuda.linalg.orthogonal import basis_half
    >>> M = torch.tensor([[2.0, 0.1], [0.1, 1.0]])
    >>> U, values, couplings = tracked_basis(M, basis_half(torch.eye(2)), sweeps=2, damping=0)
    >>> [[round(x, 3) for x in found.tolist()] for found in (values, torch.linalg.eigvalsh(M), couplings)]
    [[2.01, 0.99], [0.99, 2.01], [0.071, 0.0]]
    """
    M_ = M if isinstance(M, Half) else prepared(M, definite=True)
    couplings, values = list[Tensor](), torch.empty(0)
    U = Half(U.hi.contiguous(), U.scale)
    for sweep in range(sweeps):
        # A turn makes columns longer by up to a tenth. Of two sweeps only the second makes them orthogonal again.
        V, values, left = _sweep(M_, U, damping, still, orthogonal=sweeps != 2 or sweep == 1)
        if sweeps == 2 and sweep == 1:
            values = values / (_column_dots(U.hi, U.hi)[1] / BASIS_SCALE**2)
        U = V
        couplings.append(left)
    # S was computed of 2¹⁴ U and of M times its scale. Both reciprocals are exact, where the product may overflow.
    return U, values / BASIS_SCALE * M_.scale.reciprocal()[..., None], torch.stack(couplings)


def rayleigh_quotients(M: Float[Tensor, "*batch n n"] | HalfPair | Half, U: Half) -> Float[Tensor, "*batch n"]:
    """``uᵀ M u / uᵀ u`` of the columns of a basis, which is not rounded further: eigenvalues as this basis has them.

    >>> from layerwise.optim.cuda.linalg.orthogonal import basis_half
    >>> rayleigh_quotients(torch.tensor([[2.0, 1.0], [1.0, 4.0]]), basis_half(torch.eye(2))).tolist()
    [2.0, 4.0]
    """
    U = Half(U.hi.contiguous(), U.scale)
    if isinstance(M, Half):
        C = _image(M, U)
        C, unit = C.hi, (M.scale * C.scale).reciprocal()
    else:
        pair = prepared(M, definite=True)
        C, unit = split_fp16.whole_product(pair, U)[0], pair.scale.reciprocal()
    dots, squares = _column_dots(C, U.hi)
    return dots / squares * unit[..., None]


def _sweep(
    M: HalfPair | Half, U: Half, damping: int | float, still: int | float, orthogonal: bool
) -> tuple[Half, Tensor, Tensor]:
    C = _image(M, U)
    if _takes(U):
        from layerwise.optim.cuda.triton import jacobi as triton_sweeps

        found = triton_sweeps.rotation(pair_product(U.mT, C, symmetric=True, whole=True), damping, still)
        F, E = torch.empty_like(found.E.hi), found.E
        how: dict[str, Any] = {"alpha": found.alpha, "beta": found.beta, "identity": UNIT}
        pair_product(E, E, symmetric=True, skew=True, add=E.hi, out=F, **how)
        values, left = found.values, found.left
    else:
        F, values, left = _rotation(U, C, damping, still)
    V = _turned(U, F)
    V = _corrected(V, _defect(V, F)) if orthogonal else V
    # What is not finite in V, or in I − VᵀV, is in every row by now.
    left = left + 0 * V.hi[..., 0, :].float().sum(-1)
    return V, values, left.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _column_dots(C: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Of the columns of V with those of C, and their squares."""
    if V.dtype == torch.float16 and V.ndim == 3 and triton_products.available(V.device):
        from layerwise.optim.cuda.triton import jacobi as triton_sweeps

        return triton_sweeps.column_dots(C, V)
    single = torch.promote_types(C.dtype, torch.float32)
    return (C.to(single) * V).sum(-2), torch.linalg.vector_norm(V, dim=-2, dtype=single).square()


def _image(M: HalfPair | Half, U: Half) -> HalfPair | Half:
    """``M U`` as a pair or in float16, as M is: with entries of M below 2¹⁵, those of ``M u`` are below 2¹⁵ √n."""
    if isinstance(M, HalfPair):
        C, _ = split_fp16.whole_product(M, U)
        return bounded_pair(C, product_bound(U.shape[-1]))
    down = 2.0 ** -(split_fp16.TOP_EXPONENT + math.ceil(math.log2(U.shape[-1]) / 2))
    scale, out = torch.full_like(U.scale, down), torch.empty_like(U.hi, memory_format=torch.contiguous_format)
    if by_cublas(U):
        return Half(torch.baddbmm(U.hi, M.hi, U.hi, beta=0, alpha=down, out=out), scale)
    if _takes(U):
        unscaled = Half(M.hi, U.scale)  # its own scale is divided out at the end
        return Half(pair_product(unscaled, U, alpha=down * BASIS_SCALE**2, out=out), scale)
    C, _ = split_fp16.scaled_product(M, U)
    return Half(C.mul_(down).half(), scale)


def _turned(U: Half, F: Float16[Tensor, "*batch n n"]) -> Half:
    """``U F`` in float16. That F has the identity spares a copy of U, and rounds lengths of columns by up to 2⁻¹¹: the
    next step makes them 1 again."""
    out = torch.empty_like(U.hi, memory_format=torch.contiguous_format)
    if by_cublas(U):
        return Half(torch.baddbmm(out, U.hi, F, beta=0, alpha=1 / UNIT, out=out), U.scale)
    if _takes(U):
        return Half(pair_product(U, Half(F, torch.full_like(U.scale, UNIT)), alpha=BASIS_SCALE, out=out), U.scale)
    return Half(((U.hi.float() @ F.float()) / UNIT).half(), U.scale)


def _corrected(V: Half, N: Float16[Tensor, "*batch n n"]) -> Half:
    """``V + V N/2`` in float16."""
    if by_cublas(V):
        return Half(torch.baddbmm(V.hi, V.hi, N, alpha=0.5 / UNIT), V.scale)
    if _takes(V):
        N_, out = Half(N, torch.full_like(V.scale, UNIT)), torch.empty_like(V.hi)
        return Half(pair_product(V, N_, add=V.hi, alpha=0.5 * BASIS_SCALE, out=out), V.scale)
    return Half(torch.add(V.hi.float(), V.hi.float() @ N.float(), alpha=0.5 / UNIT).half(), V.scale)


def _defect(V: Half, out: Float16[Tensor, "*batch n n"]) -> Float16[Tensor, "*batch n n"]:
    """``I − Vᵀ V`` in float16; `out` may be written over."""
    if _takes(V):
        return pair_product(V.mT, V, alpha=-UNIT, identity=UNIT, symmetric=True, out=out)
    C = V.hi.mT.float() @ V.hi.float()
    eye = torch.eye(C.shape[-1], device=C.device)
    return (UNIT * (eye - C / BASIS_SCALE**2)).half()


def by_cublas(U: Half) -> bool:
    """Whether products of bases with a result in float16 are cuBLAS's."""
    return U.shape[-1] >= LARGE and writes_halves(U)


def _takes(U: Half) -> bool:
    """Whether there are kernels for it."""
    return U.hi.ndim == 3 and U.shape[-1] >= FUSED_SIZE and triton_products.takes(U, U)


# --- by torch ---------------------------------------------------------------------------------------------------------


def _rotation(U: Half, C: HalfPair | Half, damping: int | float, still: int | float) -> tuple[Tensor, Tensor, Tensor]:
    """``I + E + E²/2`` in float16, eigenvalues and coupling, by torch."""
    S, scale = split_fp16.whole_product(U.mT, C)
    S = S / scale[..., None, None]
    S = (S + S.mT) / 2
    mean = S.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp(min=torch.finfo(S.dtype).tiny)
    S = S / mean[..., None]
    E = rotation(S, damping, still)
    E_ = Half((UNIT * E).half(), torch.full_like(mean[..., 0], UNIT))
    F = UNIT * (E + 0.5 * split_fp16.rough_product(E_, E_) + torch.eye(U.shape[-1], device=E.device))
    return F.half(), mean * second_order(S, E), coupling(S, damping)


def coupling(S: Float[Tensor, "*batch n n"], damping: int | float = 1e-3) -> Float[Tensor, "*batch"]:
    """How far S is from diagonal: ``‖D^-½ off(S) D^-½‖_F/√n``, ``D = diag(S) + damping · mean``.

    This is how inverse roots see it; the couplings of one large eigenvalue to many small ones hardly count.

    >>> coupling(torch.tensor([[4.0, 1.0], [1.0, 1.0]]), damping=0).item()
    0.5
    """
    diagonal = S.diagonal(dim1=-2, dim2=-1)
    D = diagonal.clamp(min=0) + damping * diagonal.mean(-1, keepdim=True)
    weight = D.clamp(min=torch.finfo(S.dtype).tiny ** 0.5).rsqrt()
    on_diagonal = torch.eye(S.shape[-1], dtype=torch.bool, device=S.device)
    squares = (weight[..., :, None] * S * weight[..., None, :]).square().masked_fill(on_diagonal, 0)
    return squares.sum((-2, -1)).div(S.shape[-1]).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)


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


def second_order(S: Tensor, E: Tensor) -> Tensor:
    """The diagonal of S once turned by E."""
    diagonal = S.diagonal(dim1=-2, dim2=-1)
    gap = diagonal[..., None, :] - diagonal[..., :, None]
    return (diagonal + (E * (2 * S - E * gap)).sum(-2)).clamp(min=0)


def _spectral_norm(E: Tensor) -> Tensor:
    """An estimate from below, by the power method on a few columns."""
    v = probe_columns(E.shape[-1], 16, like=E)
    for _ in range(APPLICATIONS):
        v = v / v.norm(dim=-2, keepdim=True).clamp(min=torch.finfo(E.dtype).tiny)
        v = E @ v
    return v.norm(dim=-2).amax(-1)
