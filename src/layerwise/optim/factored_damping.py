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
    mean_P, mean_Q = s_P.sum(-1) / O, s_Q.sum(-1) / I
    if not relative:
        return *split_damping(float(damping), split, mean_Q, mean_P), torch.full_like(mean_P, damping)
    left, right = damping**0.5 * mean_P, damping**0.5 * mean_Q
    known = (mean_P > 0) & (mean_Q > 0)
    return torch.where(known, left, 0.0), torch.where(known, right, 0.0), torch.where(known, left * right, 1.0)
