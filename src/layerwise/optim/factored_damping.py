"""What factored damping adds to scalings in an eigenbasis."""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.kronecker import split_damping

Numbers = Float[Tensor, "K"]


@torch.no_grad()
def factored_damping(
    s_P: Float[Tensor, "K O"],
    s_Q: Float[Tensor, "K I"],
    damping: int | float,
    *,
    relative: bool,
    split: str = "trace",
    own: tuple[int, int] | None = None,
) -> tuple[Numbers, Numbers, Numbers]:
    """(left, right, constant), one number a group: ``s_Pᵢ·right + left·s_Qⱼ + constant`` is added to scalings.

    `relative`: λ is relative to the mean eigenvalue of ``P ⊗ Q``; factors that are still zero get a constant of 1. Else
    `split` is "trace" (with π) or "equal". `own` are sizes without padding, whose eigenvalues are zero.

    >>> two = torch.full((1, 3), 2.0)
    >>> [x.item() for x in factored_damping(two, 2 * two, 0.25, relative=True)]
    [1.0, 2.0, 2.0]
    >>> [round(x.item(), 3) for x in factored_damping(two, 2 * two, 0.25, relative=False)]
    [0.354, 0.707, 0.25]
    """
    O, I = (s_P.shape[1], s_Q.shape[1]) if own is None else own
    sum_P, sum_Q = s_P.sum(-1), s_Q.sum(-1)
    if not relative:
        return *split_damping(float(damping), split, sum_Q / I, sum_P / O), torch.full_like(sum_P, damping)
    # In place, as each operation is a launch for every stack and step on a GPU; `where` with a number would be two.
    product = sum_P * sum_Q
    unknown = (product > 0).logical_not_()  # so that NaN is unknown, too
    left, right = sum_P.mul_(damping**0.5 / O), sum_Q.mul_(damping**0.5 / I)
    constant = product.mul_(damping / (O * I)).masked_fill_(unknown, 1.0)
    return left.masked_fill_(unknown, 0.0), right.masked_fill_(unknown, 0.0), constant
