"""`Scaled`: what products of scaled matrices leave, before anyone has divided it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.cuda.checks import check_whole
from layerwise.optim.cuda.elementwise_torch import per_group, reciprocal


@dataclass(frozen=True)
class Scaled:
    """``C`` over the product of each group's `scales`, powers of two: a later pass divides on its way.

    `pieces.Tables.finish_`, `elementwise.dot` and the passes in an eigenbasis take one as it is, `unscaled` makes a
    tensor of it.

    >>> Scaled(torch.ones(1, 2, 3), (torch.tensor([4.0]),)).C.shape
    torch.Size([1, 2, 3])
    """

    C: Float[Tensor, "K O I"]
    scales: tuple[Float[Tensor, "K"], ...]


def parts(X: Tensor | Scaled) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A tensor and its scales."""
    return (X.C, X.scales) if isinstance(X, Scaled) else (X, ())


@torch.no_grad()
def unscaled(X: Float[Tensor, "*B K O I"] | Scaled) -> Float[Tensor, "*B K O I"]:
    """A tensor as it is; a scaled one over its scales, in float32 if it is of half precision. C stays: it may lie in a
    state, and others may divide it again.

    >>> unscaled(Scaled(torch.ones(1, 1, 1), (torch.tensor([4.0]),)))
    tensor([[[0.2500]]])
    """
    C, scales = parts(X)
    if scales and C.numel():
        check_whole(C, "C")
        return C.to(torch.promote_types(C.dtype, torch.float32)) * per_group(reciprocal(scales), C)
    return C
