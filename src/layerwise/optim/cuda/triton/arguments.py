"""How tensors are handed to the kernels of `elementwise`."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

AllFinite = Tensor | None


def byte(all_finite: AllFinite, device: torch.device) -> Tensor:
    """A mask as the kernels read it; of a step that is taken, where there is none."""
    return always(device) if all_finite is None else all_finite.view(torch.uint8)


@cache
def always(device: torch.device) -> Tensor:
    """The mask of a step that is taken."""
    return torch.ones((), dtype=torch.uint8, device=device)


def bits(largest: Tensor | None) -> Tensor | None:
    """Magnitudes as integers of the same order."""
    return None if largest is None else largest.view(torch.int32)


def listed(scales: Sequence[Tensor], start: int) -> tuple[Tensor, ...] | None:
    """Numbers of the groups from some group on, as a kernel takes them."""
    return tuple(s.contiguous()[start:] for s in scales) or None


def power_of_two(n: int) -> int:
    """The least that is not smaller."""
    return 1 << (n - 1).bit_length()


@cache
def one(device: torch.device) -> Tensor:
    """Of a number that is multiplied by one more on the device, where there is none: no kernel of its own."""
    return torch.ones((), dtype=torch.float32, device=device)
