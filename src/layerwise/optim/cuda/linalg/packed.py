"""Symmetric matrices as the lower triangle of their tiles: a little more than half the memory of the square.

A stack ``[K, n, n]``, n = 16 c, is kept as ``[K, T, 16, 16]`` with T = c(c+1)/2: tile (i, j ≤ i) has the place
i(i+1)/2 + j. Tiles on the diagonal are whole, so that the excess over half a square is 1/(2c) of it: 1 % at n = 768,
0.3 % at 3088. Rows of a tile are 64 bytes, which a GPU reads without waste; kernels work on larger tiles as they like.

On a GPU with Triton every function is one launch (`triton.packed`), elsewhere (and for more matrices than a launch
takes) a few calls of torch, which the kernels are checked against. Nothing here asks the device for a value.
"""

from functools import cache, lru_cache
from math import isqrt

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.linalg.fp16 import Half, HalfPair
from layerwise.optim.cuda.triton import packed as triton_packed
from layerwise.optim.cuda.triton.device import MOST_MATRICES, available

TILE = 16

Numbers = Float32[Tensor, "K"]


def is_packed(M: Tensor) -> bool:
    """Whether a stack of symmetric matrices (or of diagonals) is packed.

    >>> is_packed(torch.zeros(2, 32, 32)), is_packed(pack(torch.zeros(2, 32, 32)))
    (False, True)
    """
    return M.ndim == 4 and M.shape[-2:] == (TILE, TILE)


def zeros(groups: int, n: int, device: torch.device | None = None) -> Float32[Tensor, "K T 16 16"]:
    """Packed zeros; n is a multiple of 16.

    >>> zeros(2, 32).shape
    torch.Size([2, 3, 16, 16])
    """
    return torch.zeros(groups, count(n), TILE, TILE, device=device)


def count(n: int) -> int:
    """T, the tiles of a matrix of size n.

    >>> count(784)
    1225
    """
    if n % TILE:
        raise InputError(describe(f"matrices of size {n}", f"a multiple of {TILE}", "pad them with zeros"))
    across = n // TILE
    return across * (across + 1) // 2


def size(P: Float[Tensor, "*K T 16 16"]) -> int:
    """n of packed matrices.

    >>> size(zeros(1, 784))
    784
    """
    return (isqrt(8 * P.shape[-3] + 1) - 1) // 2 * TILE


def pack(M: Float[Tensor, "K m m"], n: int | None = None) -> Float32[Tensor, "K T 16 16"]:
    """Symmetric matrices packed, continued by zeros up to a size of n; their tiles above the diagonal are not read.

    >>> pack(torch.tensor([[[1.0, 2.0], [2.0, 3.0]]]), 16)[0, 0, 0, :3].tolist()
    [1.0, 2.0, 0.0]
    """
    P = zeros(len(M), M.shape[-1] if n is None else n, M.device)
    return ema_(P, M, torch.ones(len(M), device=M.device))


def unpack(
    P: Float32[Tensor, "K T 16 16"], shift: Numbers | None = None, own: int | None = None, fill: Numbers | None = None
) -> Float32[Tensor, "K n n"]:
    """The whole matrices; with `shift` added to the diagonal, and the diagonal behind `own` entries replaced by `fill`.

    >>> unpack(zeros(1, 16), torch.tensor([2.0]), 1, torch.tensor([5.0]))[0, :2, :2].tolist()
    [[2.0, 0.0], [0.0, 5.0]]
    """
    if _by_kernels(P):
        return triton_packed.unpack(P, size(P), shift, own, fill)
    M = mirrored(P)
    diagonal = M.diagonal(dim1=-2, dim2=-1)
    if shift is not None:
        diagonal.add_(shift.unsqueeze(-1))
    if fill is not None and own is not None:
        diagonal[:, own:] = fill.unsqueeze(-1)
    return M


def diagonal(P: Float32[Tensor, "K T 16 16"]) -> Float32[Tensor, "K n"]:
    """The diagonals.

    >>> diagonal(pack(torch.diag(torch.arange(16.0))[None]))[0, -2:].tolist()
    [14.0, 15.0]
    """
    return P.flatten(1).index_select(1, _on_diagonal(size(P) // TILE, P.device))


@cache  # for ever: captured graphs read it
def _on_diagonal(tiles: int, device: torch.device) -> Int64[Tensor, "n"]:
    """Places of the entries on the diagonal, among those of all tiles."""
    with torch.inference_mode(False):
        i, within = torch.arange(tiles, device=device), torch.arange(TILE, device=device)
        return (i * (i + 3) // 2 * TILE**2).repeat_interleave(TILE) + (within * (TILE + 1)).repeat(tiles)


def ema_(
    P: Float32[Tensor, "K T 16 16"], new: Float[Tensor, "K *m"], weight: Float[Tensor, "K"]
) -> Float32[Tensor, "K T 16 16"]:
    """Move running means towards symmetric matrices ``[K, m, m]``, which zeros continue, or packed ones; in place.

        P ← P + weight·(new − P)

    A weight of 0 leaves its mean unchanged even if `new` is not finite; a weight of 1 replaces it.

    >>> ema_(zeros(1, 16), torch.ones(1, 16, 16), torch.tensor([0.25]))[0, 0, 0, :2].tolist()
    [0.25, 0.25]
    """
    if not is_packed(new):
        _check(P, new)
    if _by_kernels(P):
        triton_packed.ema_(P, new, size(P), weight.float())
        return P
    weight = weight.to(P.dtype).view(-1, 1, 1, 1)
    new = (new if is_packed(new) else tiles(new, size(P))).to(P.dtype)
    return P.copy_(torch.where(weight == 0, P, torch.where(weight == 1, new, P + weight * (new - P))))


def split(P: Float32[Tensor, "K T 16 16"], halves: int = 2) -> HalfPair | Half:
    """Positive semidefinite matrices as pairs or as one half, straight from the tiles.

    No entry of such a matrix exceeds the largest of its diagonal.

    >>> split(pack(torch.eye(16)[None])).value()[0, 0, :2].tolist()
    [1.0, 0.0]
    """
    largest = diagonal(P).amax(-1)
    if _by_kernels(P):
        return triton_packed.split(P, size(P), largest, halves)
    pair = split_fp16.split(unpack(P), split_fp16.power_of_two_scale(largest))
    return pair if halves == 2 else pair.half


@lru_cache(maxsize=64)
def places(tiles: int, device: torch.device) -> tuple[Int64[Tensor, "T"], Int64[Tensor, "T"]]:
    """Row and column of each tile.

    >>> [x.tolist() for x in places(2, torch.device("cpu"))]
    [[0, 1, 1], [0, 0, 1]]
    """
    with torch.inference_mode(False):
        i, j = torch.tril_indices(tiles, tiles, device=device)
        return i, j


def tiles(M: Float[Tensor, "K m m"], n: int) -> Float[Tensor, "K T 16 16"]:
    """The tiles on and below the diagonal, by torch, whatever the precision; zeros continue M up to a size of n.

    >>> tiles(torch.ones(1, 17, 17), 32).sum((-2, -1)).tolist()
    [[256.0, 16.0, 1.0]]
    """
    m = M.shape[-1]
    if m < n:
        M = torch.nn.functional.pad(M, (0, n - m, 0, n - m))
    i, j = places(n // TILE, M.device)
    return M.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE)).transpose(2, 3)[:, i, j]


def mirrored(P: Float[Tensor, "K T 16 16"]) -> Float[Tensor, "K n n"]:
    """The whole matrices, by torch, whatever the precision.

    >>> mirrored(tiles(torch.eye(32)[None], 32)).equal(torch.eye(32)[None])
    True
    """
    n, (i, j) = size(P), places(size(P) // TILE, P.device)
    squares = P.new_empty(len(P), n // TILE, n // TILE, TILE, TILE)
    squares[:, j, i] = P.mT
    squares[:, i, j] = P
    return squares.transpose(2, 3).reshape(len(P), n, n)


def _by_kernels(P: Tensor) -> bool:
    return len(P) <= MOST_MATRICES and available(P.device)


def _check(P: Tensor, new: Tensor) -> None:
    if new.ndim != 3 or new.shape[-2] != new.shape[-1] or new.shape[-1] > size(P) or len(new) != len(P):
        raise InputError(
            describe(
                f"new values of shape {tuple(new.shape)} for {len(P)} packed matrices of size {size(P)}",
                "as many symmetric matrices, no larger",
                "cut them, or begin with larger means",
            )
        )
