"""Factors P and Q as they are kept: diagonals ``[K, n]``, squares ``[K, n, n]``, or packed ``[K, T, 16, 16]``.

On a GPU the lower triangle of a large factor is kept, in tiles (`foundations.linalg.packed`); kernels average into it,
and make of it the operand of a refresh. What is saved are squares, see `stored`. Whoever reads ``state["P"]`` or
``state["Q"]`` in any other way than by groups asks here.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.cuda import elementwise as fused
from layerwise.optim.cuda.linalg import packed
from layerwise.optim.cuda.linalg.fp16 import HalfPair
from layerwise.optim.cuda.linalg.packed import is_packed
from layerwise.optim.cuda.triton.device import available
from layerwise.optim.rule import Shape

LEAST = 256
"""Smaller factors are no great part of a state."""


def packs(shape: Shape, size: int) -> bool:
    """Whether factors of this size, treated by products, are packed: where the kernels for it run."""
    return size >= LEAST and size % packed.TILE == 0 and shape.dtype == torch.float32 and available(shape.device)


def packs_inverse(shape: Shape, size: int) -> bool:
    """Whether inverses that are kept in halves are packed: as their factors are."""
    return packs(shape, size)


def zeros(shape: Shape, size: int, by_products: bool) -> Tensor:
    """A factor without statistics."""
    if by_products and packs(shape, size):
        return packed.zeros(shape.groups, size, shape.device)
    return shape.zeros(size, size)


def size(M: Tensor) -> int:
    """n."""
    return packed.size(M) if is_packed(M) else M.shape[-1]


def diagonal(M: Tensor) -> Float[Tensor, "K n"]:
    """Of matrices; diagonals as they are."""
    if is_packed(M):
        return packed.diagonal(M)
    return M if M.ndim == 2 else M.diagonal(dim1=-2, dim2=-1)


def whole(M: Tensor) -> Tensor:
    """Squares; diagonals as they are. A copy only of what is packed."""
    return packed.unpack(M) if is_packed(M) else M


def operand(M: Tensor) -> Tensor | HalfPair:
    """A factor as a basis is refined with it: as it is, or the pair of what is packed."""
    return packed.split(M) if is_packed(M) else M


def damped(M: Tensor, shift: Float[Tensor, "K"], own: int, fill: Float[Tensor, "K"]) -> Tensor:
    """``M + shift I`` as squares of their own, the diagonal of padding (behind `own` entries) replaced by `fill`."""
    if is_packed(M):
        return packed.unpack(M, shift, own, fill)
    found = M.clone()
    entries = found.diagonal(dim1=-2, dim2=-1)
    entries.add_(shift.unsqueeze(-1))
    entries[:, own:] = fill.unsqueeze(-1)
    return found


def damped_operand(M: Tensor, shift: Float[Tensor, "K"], own: int, fill: Float[Tensor, "K"]) -> Tensor | HalfPair:
    """The same as an inverse is refined with it; of what is packed, the pair."""
    return packed.split(M, shift, own, fill) if is_packed(M) else damped(M, shift, own, fill)


def alike(new: Tensor, M: Tensor) -> Tensor:
    """A second moment in the form that the factor M has."""
    return packed.pack(new, packed.size(M)) if is_packed(M) and not is_packed(new) else new


def ema_(M: Tensor, new: Tensor, weight: Float[Tensor, "K"]) -> None:
    """``M ← M + weight·(new − M)`` in one pass; a weight of 0 leaves M as it is whatever `new` holds."""
    if is_packed(M):
        packed.ema_(M, new, weight)
    else:
        fused.ema_(M, new, weight)


def put_(M: Tensor, square: Tensor) -> None:
    """Replace factors by squares (or diagonals)."""
    M.copy_(packed.pack(square) if is_packed(M) else square)
