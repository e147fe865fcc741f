"""Random blocks of columns, from an explicit generator only.

A draw happens on the generator's own device and is then moved, so one seed gives the same numbers wherever
the computation runs, and the global random state is never touched.
"""

import torch
from jaxtyping import Float
from torch import Tensor

Device = torch.device | str


def gaussian(
    d: int, columns: int, generator: torch.Generator, dtype: torch.dtype, device: Device
) -> Float[Tensor, "d B"]:
    """Independent standard normal entries.

    >>> gaussian(3, 2, torch.Generator().manual_seed(0), torch.float64, "cpu").shape
    torch.Size([3, 2])
    """
    Z = torch.randn(d, columns, generator=generator, dtype=dtype, device=generator.device)
    return Z.to(device)


def rademacher(
    d: int, columns: int, generator: torch.Generator, dtype: torch.dtype, device: Device
) -> Float[Tensor, "d B"]:
    """Independent entries ±1 with equal probability.

    >>> rademacher(3, 2, torch.Generator().manual_seed(0), torch.float64, "cpu").abs().sum().item()
    6.0
    """
    bits = torch.randint(0, 2, (d, columns), generator=generator, device=generator.device)
    return (2 * bits - 1).to(device=device, dtype=dtype)
