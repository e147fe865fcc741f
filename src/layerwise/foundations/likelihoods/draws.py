"""Basis vectors and random numbers in the shape of an output."""

from collections.abc import Callable

import torch
from torch import Tensor

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
    if part.device.type == "cpu" and like.device.type == "cuda":  # nobody waits for a copy of pinned memory
        part = part.pin_memory().to(like.device, non_blocking=True)
    return part.to(like.device, torch.promote_types(like.dtype, torch.float32))


def uniform(like: Tensor, terms: Terms, generator: torch.Generator) -> Tensor:
    """Uniform on [0, 1)."""
    return _drawn(torch.rand, like, terms, generator)


def normal(like: Tensor, terms: Terms, generator: torch.Generator) -> Tensor:
    """Standard normal."""
    return _drawn(torch.randn, like, terms, generator)
