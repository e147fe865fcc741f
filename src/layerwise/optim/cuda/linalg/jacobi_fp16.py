"""Eigenbases that are kept as one half, 2¹⁴ U in float16: following a matrix that drifts.

Rounding turns the vectors of such a basis by 2⁻¹² or so of their length, in random directions. That is less than what
a sweep of `jacobi` leaves of a drift, so that a basis in which second moments are measured needs no more, nor
does one for roots of power ¼. A sweep is then six products of halves where one of pairs has eight and a half, and
large ones are cuBLAS's, which runs nearly twice as fast as Triton where nothing can be left out. With M rounded too it
is four and a half; that moves entries of ``Uᵀ M U`` by 1e-4 of the mean eigenvalue or less, where training moves them
by much more.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Float16, Float32
from torch import Tensor

from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.linalg.fp16 import Half, HalfPair
from layerwise.optim.cuda.linalg.jacobi import FUSED_SIZE, STILL, coupling, rotation, second_order
from layerwise.optim.cuda.linalg.orthogonal import BASIS_SCALE, bounded_pair, product_bound, writes_halves
from layerwise.optim.cuda.linalg.products import HALF_PAIRS, Products
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton.products import pair_product

UNIT = 2.0**14
"""Scale of E, of ``I + E + E²/2`` and of ``I − Vᵀ V``."""
LARGE = 1536
"""From this size on products with a result in float16 are cuBLAS's, if it writes that (`writes_halves`)."""


def tracked_half(
    M: Float[Tensor, "*batch n n"] | HalfPair | Half,
    U: Half,
    sweeps: int = 1,
    *,
    damping: int | float = 1e-3,
    still: int | float = STILL,
) -> tuple[Half, Float32[Tensor, "*batch n"], Float32[Tensor, "sweeps *batch"]]:
    """`jacobi.tracked_basis` of a basis with the fixed scale: the basis, eigenvalues, couplings before.

    Of an M that is one half, products are of halves alone. Where something is not finite the last coupling is infinite,
    and the basis is of no use.

    >>> from layerwise.optim.cuda.linalg.orthogonal import basis_half
    >>> M = torch.tensor([[2.0, 0.1], [0.1, 1.0]])
    >>> U, values, couplings = tracked_half(M, basis_half(torch.eye(2)), sweeps=2, damping=0)
    >>> [[round(x, 3) for x in found.tolist()] for found in (values, torch.linalg.eigvalsh(M), couplings)]
    [[2.01, 0.99], [0.99, 2.01], [0.071, 0.0]]
    """
    M_ = M if isinstance(M, Half) else HALF_PAIRS.prepared(M, definite=True)
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


def rayleigh_quotients(
    M: Float[Tensor, "*batch n n"] | HalfPair | Half, U: Float[Tensor, "*batch n n"] | Half, products: Products
) -> Float[Tensor, "*batch n"]:
    """``uᵀ M u / uᵀ u`` of the columns of a basis, which is not rounded further: eigenvalues as this basis has them.

    >>> from layerwise.optim.cuda.linalg.products import TORCH
    >>> rayleigh_quotients(torch.tensor([[2.0, 1.0], [1.0, 4.0]]), torch.eye(2), TORCH).tolist()
    [2.0, 4.0]
    """
    if isinstance(U, Tensor):
        dots, squares = _column_dots(products.precise(M, U), U)
        return dots / squares
    U = Half(U.hi.contiguous(), U.scale)
    if isinstance(M, Half):
        C = _image(M, U)
        C, unit = C.hi, (M.scale * C.scale).reciprocal()
    else:
        pair = HALF_PAIRS.prepared(M, definite=True)
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


def _rotation(U: Half, C: HalfPair | Half, damping: int | float, still: int | float) -> tuple[Tensor, Tensor, Tensor]:
    """``I + E + E²/2`` in float16, eigenvalues and coupling, by torch."""
    S, scale = split_fp16.whole_product(U.mT, C)
    S = S / scale[..., None, None]
    S = (S + S.mT) / 2
    mean = S.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp(min=torch.finfo(S.dtype).tiny)
    S = S / mean[..., None]
    E = rotation(S, damping, still)
    E_ = Half((UNIT * E).half(), torch.full_like(mean[..., 0], UNIT))
    F = UNIT * (HALF_PAIRS.rough(E_, E_, add=E, alpha=0.5) + torch.eye(U.shape[-1], device=E.device))
    return F.half(), mean * second_order(S, E), coupling(S, damping)


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
