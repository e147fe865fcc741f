"""Symmetric matrices kept in halves of float16, as the lower triangle of their tiles: of a pair, two bytes an entry.

A stack of matrices of size n = 16 c is ``[K, h, T, 16, 16]`` with the tiles of `packed`; h = 2 for pairs (hi, lo), 1
for first halves, beside a scale ``[K]``, see `split_fp16`. Products need whole squares: these are made for the moment.
On a GPU with Triton that is one launch (`triton.packed`) near the bandwidth of the memory, elsewhere a few calls of
torch, which the kernels are checked against. Nothing here asks the device for a value.
"""

import torch
from jaxtyping import Bool, Float16, Float32
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.cuda.linalg import packed, split_fp16
from layerwise.optim.cuda.linalg.packed import TILE
from layerwise.optim.cuda.triton import packed as triton_packed
from layerwise.optim.cuda.triton.device import MOST_MATRICES, available


def is_packed(H: Tensor) -> bool:
    """Whether halves are packed: squares ``[K, h, n, n]`` have an axis less.

    >>> is_packed(torch.zeros(1, 2, 16, 16)), is_packed(zeros(1, 2, 16))
    (False, True)
    """
    return H.ndim == 5


def zeros(groups: int, halves: int, n: int, device: torch.device | None = None) -> Float16[Tensor, "K h T 16 16"]:
    """Packed zeros; n is a multiple of 16.

    >>> zeros(3, 2, 32).shape
    torch.Size([3, 2, 3, 16, 16])
    """
    return torch.zeros(groups, halves, packed.count(n), TILE, TILE, dtype=torch.float16, device=device)


def unpack(H: Float16[Tensor, "K h T 16 16"]) -> Float16[Tensor, "K h n n"]:
    """The whole matrices, half by half.

    >>> unpack(zeros(3, 2, 32)).shape
    torch.Size([3, 2, 32, 32])
    """
    if _by_kernels(H):
        return triton_packed.mirrored(H, packed.size(H))
    return packed.mirrored(H.flatten(0, 1)).unflatten(0, H.shape[:2])


def put_(
    H: Float16[Tensor, "K h T 16 16"],
    scale: Float32[Tensor, "K"],
    X: Float32[Tensor, "K n n"],
    where: Bool[Tensor, "K"] | None = None,
    largest: Float32[Tensor, "K"] | None = None,
) -> None:
    """Replace halves and scales by those of symmetric matrices; where `where` is false, nothing is read or changed.

    Tiles of X above the diagonal are looked at for the largest entry alone; not, where `largest` bounds them.

    >>> H, scale = zeros(1, 2, 16), torch.ones(1)
    >>> put_(H, scale, torch.eye(16)[None] / 3)
    >>> f"{(unpack(H).float().sum(1) / scale)[0, 5, 5]:.6f}"
    '0.333333'
    """
    if X.shape != (len(H), packed.size(H), packed.size(H)):
        raise InputError(
            describe(
                f"matrices of shape {tuple(X.shape)} for {len(H)} packed ones of size {packed.size(H)}",
                "as many, of that size",
                "pad them with zeros, or allocate others",
            )
        )
    if _by_kernels(H):
        triton_packed.put_(H, scale, X, where, largest)
        return
    pair = split_fp16.split(X) if largest is None else split_fp16.split(X, split_fp16.power_of_two_scale(largest))
    for place, half in enumerate((pair.hi, pair.lo)[: H.shape[1]]):
        new = packed.tiles(half, packed.size(H))
        H[:, place] = new if where is None else torch.where(where.view(-1, 1, 1, 1), new, H[:, place])
    scale.copy_(pair.scale if where is None else torch.where(where, pair.scale, scale))


def _by_kernels(H: Tensor) -> bool:
    return H.shape[:2].numel() <= MOST_MATRICES and available(H.device)
