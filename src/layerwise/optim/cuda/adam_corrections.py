"""What Adam's steps are corrected by."""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.cuda import elementwise
from layerwise.optim.cuda.elementwise import AllFinite


@torch.no_grad()
def corrections_(
    steps: Float[Tensor, "K"], beta1: int | float, beta2: int | float, all_finite: AllFinite = None
) -> tuple[Float[Tensor, "K"], Float[Tensor, "K"]]:
    """Count a step of each group, t, in a step that is taken; returns ``1 − beta1ᵗ`` and ``1 − beta2ᵗ`` (of t ≥ 1).

    >>> steps = torch.tensor([1.0])
    >>> corrections_(steps, 0.5, 0.0), steps
    ((tensor([0.7500]), tensor([1.])), tensor([2.]))
    """
    found = torch.empty_like(steps), torch.empty_like(steps)
    if steps.numel():
        elementwise.way_of(steps.unsqueeze(0)).corrections_(steps, *found, beta1, beta2, all_finite)
    return found
