"""In how many bits a step is to be computed: no more than its gradients carry."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
LOOKED_AT, ENTRIES = 8, 64
"""Gradients, and entries of each."""
TELLING = 4
"""Entries from which on a gradient says something: two or three random ones often look like multiples of a number."""
ROUNDING = 2.0**-21
"""Of a quotient of two products that were rounded to float32, with room."""


def chosen(grads: Iterable[Tensor]) -> str | None:
    """The precision of products for such gradients: "half" or "high"; None where they say nothing."""
    half = are_half(grads)
    return None if half is None else "half" if half else "high"


@torch.no_grad()
def are_half(grads: Iterable[Tensor]) -> bool | None:
    """Whether gradients have the bits of half precision alone: by their type, or, under autocast, because each is a
    number times numbers of bfloat16 or float16 (the number may come from a clipped norm, or a gradient scaler). Some
    entries of some gradients are looked at, of those that are finite and not zero; the host waits for them. A sum over
    several backwards has more bits. None: there are no gradients, or no such entries.

    Rounding such a gradient to float16 once more changes it by an eighth of what rounding to bfloat16 has changed it by
    before, and whatever magnifies the one in a direction ``P⁻¹ ∇L Q⁻¹`` magnifies the other.

    >>> x = torch.linspace(0.1, 3.0, 50).exp()
    >>> are_half([x]), are_half([x.bfloat16().float() * 0.123]), are_half([torch.zeros(3)]), are_half([])
    (False, True, None, None)
    """
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    unknown = [grad for grad in dense if grad.dtype not in HALF]
    if not unknown:
        return True if dense else None
    chosen = unknown[:: max(1, len(unknown) // LOOKED_AT)]
    some = [grad.flatten()[:: max(1, grad.numel() // (16 * ENTRIES))].cpu().double().numpy() for grad in chosen]
    known = [x[np.isfinite(x) & (x != 0)][:ENTRIES] for x in some]
    telling = [x for x in known if len(x) >= TELLING]
    return all(_has_few_bits(x) for x in telling) if telling else None


def _has_few_bits(x: np.ndarray) -> bool:
    """Whether some number makes all entries numbers of 11 bits: one that makes the first entry one of them."""
    first = np.arange(1024, 2048)  # the first entry, as far as its bits go
    multiples = np.frexp(x / x[0] * first[:, None])[0] * 2048
    return bool((np.abs(multiples - multiples.round()) <= 2048 * ROUNDING).all(1).any())
