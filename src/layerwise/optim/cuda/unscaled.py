"""Products of scaled matrices, divided."""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.cuda import elementwise
from layerwise.optim.cuda.checks import check_whole
from layerwise.optim.cuda.elementwise_torch import per_group, reciprocal
from layerwise.optim.cuda.scaled import Scaled


@torch.no_grad()
def unscaled(X: Float[Tensor, "*B K O I"] | Scaled) -> Float[Tensor, "*B K O I"]:
    """A tensor as it is; a scaled one over its scales, in place, or in float32 if it is of half precision.

    >>> unscaled(Scaled(torch.ones(1, 1, 1), (torch.tensor([4.0]),)))
    tensor([[[0.2500]]])
    """
    C, scales = elementwise.parts(X)
    if scales and C.numel():
        check_whole(C, "C")
        out = C if C.dtype.itemsize >= 4 else torch.empty(C.shape, dtype=torch.float32, device=C.device)
        return torch.mul(C, per_group(reciprocal(scales), C), out=out)
    return C
