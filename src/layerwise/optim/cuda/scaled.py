"""`Scaled`: what products of scaled matrices leave, before anyone has divided it."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Scaled:
    """``C`` over the product of each group's `scales`, powers of two: a later pass divides on its way.

    `pieces.Tables.finish_`, `elementwise.dot` and the passes in an eigenbasis take one as it is, `unscaled` makes a
    tensor of it.

    >>> import torch
    >>> Scaled(torch.ones(1, 2, 3), (torch.tensor([4.0]),)).C.shape
    torch.Size([1, 2, 3])
    """

    C: Float[Tensor, "K O I"]
    scales: tuple[Float[Tensor, "K"], ...]
