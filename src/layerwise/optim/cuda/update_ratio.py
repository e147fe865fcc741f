"""What gives a direction the norm of AdamW's update, in one launch: `UpdateSize.ratio` is some fifteen small ones."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.cuda.triton import elementwise as triton_elementwise
from layerwise.optim.cuda.triton.device import available
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update import UpdateSize, least_norm, weight_norms


def divisor(
    size: UpdateSize,
    stack: Stack,
    wanted: Float[Tensor, "K"],
    norms: Float[Tensor, "K"],
    scales: Sequence[Tensor],
    lr: float | Tensor,
    weights: Float[Tensor, "K"] | None = None,
) -> Float[Tensor, "K"]:
    """One over the ratio, group by group, of directions whose `norms` are still to be divided by all `scales`.

    `weights` are the norms of the stack's weights, where they are known.
    """
    single = all(X.dtype == torch.float32 for X in (wanted, norms, *scales))
    if isinstance(lr, Tensor) and single and available(wanted.device):
        weights = weight_norms(stack) if weights is None else weights
        return triton_elementwise.divisor(wanted, norms, weights, least_norm(stack), scales, lr)
    for scale in scales:
        norms = norms / scale
    return size.ratio(stack, wanted, norms, lr).reciprocal().clamp(min=torch.finfo(torch.float32).tiny)
