"""`Images`: what every reader returns."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor


class Images(NamedTuple):
    """Images between 0 and 1, channels first, and their labels; unpacks as ``x, y``.

    >>> import torch
    >>> data = Images(torch.rand(5, 1, 8, 8), torch.arange(5))
    >>> data.flat().shape
    torch.Size([5, 64])
    """

    x: Float[Tensor, "N C H W"]
    y: Int64[Tensor, "N"]

    def flat(self) -> Float[Tensor, "N CHW"]:
        """One row an image."""
        return self.x.flatten(1)

    def first(self, n: int) -> "Images":
        """The first `n` images."""
        return Images(self.x[:n], self.y[:n])


def from_bytes(pixels: UInt8[Tensor, "N C H W"], labels: Int64[Tensor, "N"]) -> Images:
    """Pixels from 0 to 255 as floats from 0 to 1.

    >>> import torch
    >>> float(from_bytes(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8), torch.tensor([3])).x.max())
    1.0
    """
    return Images(pixels.to(torch.float32) / 255, labels)
