"""Named seed streams, so that a new random draw somewhere does not shift the draws elsewhere."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one purpose, reproducible from a seed and a name.

    >>> import torch
    >>> a, b = stream(0, "labels"), stream(0, "labels")
    >>> torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b))
    True
    """
    import torch  # here, so that what declares an experiment can name its streams without torch

    key = zlib.crc32("/".join(map(str, names)).encode())
    generator = torch.Generator(device=device)
    generator.manual_seed((seed * 0x9E3779B1 + key) % (2**63))
    return generator


def seed_of(seed: int | torch.Generator | None) -> int:
    """A seed, whether the caller gave one or a generator (which is advanced by one draw)."""
    import torch

    if isinstance(seed, torch.Generator):
        return int(torch.randint(2**62, (1,), generator=seed, device=seed.device).item())
    return 0 if seed is None else int(seed)
