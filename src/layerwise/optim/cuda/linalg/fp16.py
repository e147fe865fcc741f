"""Matrices held in halves: two of float16 and a power of two, or one; see `split_fp16`."""

from dataclasses import dataclass
from types import EllipsisType

import torch
from jaxtyping import Float16, Float32
from torch import Tensor

from layerwise.foundations.errors import InputError, describe


@dataclass(frozen=True)
class HalfPair:
    """A stack of matrices held as ``(hi + lo) / scale``; made by `split_fp16.split`.

    >>> from layerwise.optim.cuda.linalg.split_fp16 import split
    >>> pair = split(torch.tensor([[1.0, 3.0]]))
    >>> pair.scale.item(), pair.value().tolist(), pair.mT.shape
    (8192.0, [[1.0, 3.0]], torch.Size([2, 1]))
    """

    hi: Float16[Tensor, "*batch m n"]
    lo: Float16[Tensor, "*batch m n"]
    scale: Float32[Tensor, "*batch"]

    @property
    def shape(self) -> torch.Size:
        """The shape ``[*batch, m, n]``."""
        return self.hi.shape

    @property
    def device(self) -> torch.device:
        """Where the pair lies."""
        return self.hi.device

    @property
    def half(self) -> "Half":
        """The first halves alone."""
        return Half(self.hi, self.scale)

    @property
    def mT(self) -> "HalfPair":
        """The transposed matrices, as views."""
        return HalfPair(self.hi.mT, self.lo.mT, self.scale)

    def __getitem__(self, index: "int | slice | EllipsisType") -> "HalfPair":
        """A part of the stack, along its first batch axis, as views."""
        if self.hi.ndim < 3:
            raise InputError(
                describe(
                    f"an index into one matrix of shape {tuple(self.shape)}",
                    "a stack of matrices [K, ..., m, n]",
                    "index `hi` and `lo` for a part of a matrix",
                )
            )
        return HalfPair(self.hi[index], self.lo[index], self.scale[index])

    def value(self) -> Float32[Tensor, "*batch m n"]:
        """The matrices in float32; NaN throughout where the matrix that was split had an entry not finite."""
        return self.hi.float().add_(self.lo).div_(self.scale[..., None, None])


@dataclass(frozen=True)
class Half:
    """A stack of matrices rounded to 11 bits, ``hi / scale``; made by `split_fp16.halved`.

    >>> from layerwise.optim.cuda.linalg.split_fp16 import halved
    >>> halved(torch.tensor([[1.0, 3.0]])).mT.shape
    torch.Size([2, 1])
    """

    hi: Float16[Tensor, "*batch m n"]
    scale: Float32[Tensor, "*batch"]

    @property
    def shape(self) -> torch.Size:
        """The shape ``[*batch, m, n]``."""
        return self.hi.shape

    @property
    def device(self) -> torch.device:
        """Where the matrices lie."""
        return self.hi.device

    @property
    def mT(self) -> "Half":
        """The transposed matrices, as views."""
        return Half(self.hi.mT, self.scale)
