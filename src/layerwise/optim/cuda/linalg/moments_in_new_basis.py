"""What is seen from a basis, once that has turned: momentum and second moments, by products of halves."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Float16, Float32
from torch import Tensor

from layerwise.optim.cuda.eigenbasis_elementwise import scaled
from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.jacobi import by_cublas
from layerwise.optim.cuda.linalg.orthogonal import BASIS_SCALE, rough_between, turned, with_room
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton.device import MOST_MATRICES, ceil, kernels, on
from layerwise.optim.cuda.triton.splits import halved

SMALLEST_PART = 2.0**-38
"""Of a matrix's largest entry, in float16 with a common scale: a step between the smallest numbers."""
ROWS, COLUMNS = 4, 1024


def rotation_between(U_new: Half, U_old: Half) -> Half:
    """``U_newᵀ U_old`` of bases with the fixed scale, with that scale.

    >>> from layerwise.optim.cuda.linalg.orthogonal import basis_half
    >>> U = basis_half(torch.eye(2).flip(0)[None])
    >>> (rotation_between(U, basis_half(torch.eye(2)[None])).hi / BASIS_SCALE).tolist()
    [[[0.0, 1.0], [1.0, 0.0]]]
    """
    left = U_new.mT
    out = torch.empty(U_old.shape, dtype=torch.float16, device=U_old.device)
    if by_cublas(U_old):
        torch.baddbmm(U_old.hi, left.hi, U_old.hi, beta=0, alpha=1 / BASIS_SCALE, out=out)
        return Half(out, U_old.scale)
    if triton_products.takes(left, U_old):
        return Half(triton_products.pair_product(left, U_old, alpha=BASIS_SCALE, out=out), U_old.scale)
    C, _ = split_fp16.scaled_product(left, U_old)
    return Half((C / BASIS_SCALE).half(), U_old.scale)


def rotate_moments_(
    M: Float[Tensor, "K O I"], V: Float32[Tensor, "K O I"], turn: Half, side: Literal["left", "right"]
) -> None:
    """First and second moments as a new basis on one side sees them, in place.

    With T the turn from the old basis, the second ones are ``W V``, W the squares of T's entries, whose rows are made
    to add up to one: right where coordinates are uncorrelated, and their total is kept. None becomes smaller than what
    half precision can tell from zero: steps divide by it.

    >>> from layerwise.optim.cuda.linalg.orthogonal import basis_half
    >>> M, V, swap = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[1.0, 3.0]]]), torch.eye(2).flip(0)[None]
    >>> rotate_moments_(M, V, basis_half(swap), "right")
    >>> M.tolist(), V.tolist()
    ([[[2.0, 1.0]]], [[[3.0, 1.0]]])
    """
    largest = V.amax((-2, -1))
    C, inverse = _product(squared_rows(turn), _halved(V, largest), side)
    torch.maximum(C.mul_(inverse), (largest * SMALLEST_PART)[:, None, None], out=V)
    C, inverse = _product(turn, _halved(M, torch.linalg.vector_norm(M, torch.inf, dim=(-2, -1))), side)
    torch.mul(C, inverse, out=M)


def rotate_momentum_(M: Float[Tensor, "K O I"], U_new: Half, U_old: Half, side: Literal["left", "right"]) -> None:
    """First moments alone, in place: out of the old basis and into the new one, which is fewer multiplications than by
    the product of the two bases where M is narrower than they are, and otherwise as many.

    >>> from layerwise.optim.cuda.linalg.orthogonal import basis_half
    >>> M, swap = torch.tensor([[[1.0, 2.0]]]), basis_half(torch.eye(2).flip(0)[None])
    >>> rotate_momentum_(M, swap, basis_half(torch.eye(2)[None]), "right")
    >>> M.tolist()
    [[[2.0, 1.0]]]
    """
    left = side == "left"
    plain = with_room(M)
    plain = Half(turned(U_old if left else U_old.mT, plain.hi, left), plain.scale)
    found = rough_between(U_new.mT, plain, None) if left else rough_between(None, plain, U_new)
    scaled(found, None, None, out=M)  # torch's own product into another type is slower


def squared_rows(turn: Half) -> Half:
    """Squares of the entries, divided by the sum of their row, which is nearly one.

    >>> from layerwise.optim.cuda.linalg.orthogonal import basis_half
    >>> turn = basis_half(torch.tensor([[[0.8, 0.6], [-0.6, 0.8]]]))
    >>> [round(w, 3) for w in (squared_rows(turn).hi[0, 0] / BASIS_SCALE).tolist()]
    [0.64, 0.36]
    """
    T = turn.hi
    if T.ndim == 3 and T.is_contiguous() and _by_kernels(T):
        out, (K, n) = torch.empty_like(T), T.shape[:2]
        with on(T.device):
            kernels("jacobi_kernels").squared_rows_kernel[(ceil(n, ROWS), K)](
                out, T, BASIS_SCALE, n, ROWS=ROWS, COLUMNS=min(COLUMNS, 1 << (n - 1).bit_length()), num_warps=4
            )
        return Half(out, turn.scale)
    W = (T.float() / BASIS_SCALE).square()
    W = W / W.sum(-1, keepdim=True)
    return Half((W * BASIS_SCALE).half(), turn.scale)


def put_(out: Float16[Tensor, "K n n"], V: Float16[Tensor, "K n n"], where: Bool[Tensor, "K"] | None) -> None:
    """Replace matrices in place, all of them or where that is wanted.

    >>> out = torch.zeros(2, 1, 1).half()
    >>> put_(out, torch.ones(2, 1, 1).half(), torch.tensor([True, False]))
    >>> out.flatten().tolist()
    [1.0, 0.0]
    """
    if where is None:
        out.copy_(V)
        return
    by_rows = all(X.stride(-1) == 1 and X.stride(-2) % 4 == 0 for X in (out, V))
    if out.shape[-1] % 4 == 0 and by_rows:  # by words of four: the pass is bound by the number of entries
        out, V = out.view(torch.int64), V.view(torch.int64)
    torch.where(where[:, None, None], V, out, out=out)


def _halved(V: Tensor, largest: Tensor) -> Half:
    known = V.dtype == torch.float32 and _by_kernels(V)
    return halved(V, amax=largest) if known else split_fp16.halved(V)


def _by_kernels(X: Float[Tensor, "K m n"]) -> bool:
    return len(X) <= MOST_MATRICES and triton_products.available(X.device)


def _product(turn: Half, X: Half, side: str) -> tuple[Float[Tensor, "K O I"], Float32[Tensor, "K 1 1"]]:
    """``turn X`` or ``X turnᵀ`` before it is divided, and what it is multiplied by for that."""
    C, _ = split_fp16.scaled_product(*((turn, X) if side == "left" else (X, turn.mT)))
    return C, (X.scale.reciprocal() / BASIS_SCALE)[:, None, None]
