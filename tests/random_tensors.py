"""Tensors of standard normal numbers, the same wherever they are drawn with one seed."""

from functools import partial

import torch
from torch import Tensor


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Numbers of a generator of their own: those that other tests draw do not depend on this."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype, device=device)


randn64 = partial(randn, dtype=torch.float64)
cuda_randn = partial(randn, device="cuda")
cuda_randn64 = partial(cuda_randn, dtype=torch.float64)
