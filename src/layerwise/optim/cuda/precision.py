"""In how many bits a step is to be computed: no more than its gradients carry."""

from collections.abc import Iterable

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


@torch.no_grad()
def are_half(grads: Iterable[Tensor]) -> bool:
    """Whether gradients have the bits of half precision alone: by their type, or, under autocast, because all their
    entries are numbers of bfloat16 or float16. The host waits for the answer.

    Rounding such a gradient to float16 once more changes it by an eighth of what rounding to bfloat16 has changed it by
    before, and whatever magnifies the one in a direction ``P⁻¹ ∇L Q⁻¹`` magnifies the other.

    >>> are_half([torch.tensor([0.5, 3.0])]), are_half([torch.tensor([1 / 3])]), are_half([])
    (True, False, False)
    """
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    unknown = [grad for grad in dense if grad.dtype not in HALF]
    if not unknown:
        return len(dense) > 0
    fits = [torch.stack([(grad == grad.to(half).to(grad.dtype)).all() for grad in unknown]).all() for half in HALF]
    return bool(torch.stack([fit.cpu() for fit in fits]).any())
