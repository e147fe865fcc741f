"""Basis vectors and random numbers in the shape of an output."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from layerwise.foundations.asked import sent
from layerwise.foundations.likelihoods.likelihood import Terms


def basis(like: Tensor, start: int, stop: int) -> Tensor:
    """Rows start … stop of the identity of size C."""
    c = like.shape[-1]
    rows = torch.zeros(stop - start, c, dtype=like.dtype, device=like.device)
    rows[torch.arange(stop - start), torch.arange(start, stop)] = 1
    return rows


def _drawn(draw: Callable[..., Tensor], like: Tensor, terms: Terms, generator: torch.Generator) -> Tensor:
    """Random numbers of a tensor's shape; a part of a batch gets what it would get in the whole."""
    start, total = terms.part or (0, like.shape[0])
    whole = draw((total, *like.shape[1:]), generator=generator, device=generator.device, dtype=torch.float32)
    part = whole[start : start + like.shape[0]]
    return sent(part, like.device).to(torch.promote_types(like.dtype, torch.float32))


def uniform(like: Tensor, terms: Terms, generator: torch.Generator) -> Tensor:
    """Uniform on [0, 1)."""
    return _drawn(torch.rand, like, terms, generator)


def normal(like: Tensor, terms: Terms, generator: torch.Generator) -> Tensor:
    """Standard normal."""
    return _drawn(torch.randn, like, terms, generator)


BLOCK = 256
"""Classes whose probabilities are added up together, where there are many."""


def inverse_cdf(p: Float[Tensor, "*lead C"], u: Float[Tensor, "*lead 1"]) -> Int[Tensor, "*lead 1"]:
    """The class in which ``Σ_{i ≤ c} p_i`` reaches u, the sums in float64.

    Of many classes only the sums of blocks are made, and those within the one block that is met: one pass over p.

    >>> inverse_cdf(torch.tensor([0.25, 0.5, 0.25]), torch.tensor([0.6])).tolist()
    [1]
    """
    u, C = u.to(torch.float64), p.shape[-1]
    if C <= 4 * BLOCK:
        return _reached(p.to(torch.float64).cumsum(-1), u).clamp_max(C - 1)
    whole = C - C % BLOCK
    sums = p[..., :whole].unflatten(-1, (-1, BLOCK)).sum(-1, dtype=torch.float64)
    if whole < C:
        sums = torch.cat([sums, p[..., whole:].sum(-1, keepdim=True, dtype=torch.float64)], -1)
    ends = sums.cumsum(-1)
    block = _reached(ends, u).clamp_max(sums.shape[-1] - 1)
    start = ends.gather(-1, block) - sums.gather(-1, block)
    classes = block * BLOCK + torch.arange(BLOCK, device=p.device)
    inside = p.gather(-1, classes.clamp_max(C - 1)).to(torch.float64) * (classes < C)
    return (block * BLOCK + _reached(start + inside.cumsum(-1), u)).clamp_max(C - 1)


def _reached(cdf: Tensor, u: Tensor) -> Tensor:
    return (cdf < u).sum(-1, keepdim=True)
