"""`HalfPair.value` on a GPU, in one pass instead of three."""

import torch
from jaxtyping import Float32
from torch import Tensor

from layerwise.optim.cuda.linalg.fp16 import HalfPair
from layerwise.optim.cuda.triton.device import MOST_MATRICES, available, ceil, kernels, on

BLOCK = 4096


def takes(pair: HalfPair) -> bool:
    """Whether a pair lies on a GPU with Triton, as a stack whose matrices have contiguous entries.

    >>> takes(HalfPair(torch.ones(1, 2, 2).half(), torch.zeros(1, 2, 2).half(), torch.ones(1)))
    False
    """
    few = len(pair.hi) <= MOST_MATRICES
    return available(pair.device) and few and all(_contiguous_matrices(half) for half in (pair.hi, pair.lo))


def value(pair: HalfPair) -> Float32[Tensor, "K m n"]:
    """``(hi + lo)/scale`` in float32."""
    out = torch.empty(pair.shape, dtype=torch.float32, device=pair.device)
    K, m, n = out.shape
    if out.numel():
        with on(pair.device):
            kernels("join_kernels").join_kernel[(ceil(m * n, BLOCK), K)](
                out, pair.hi, pair.lo, pair.scale.contiguous(), m * n, pair.hi.stride(0), pair.lo.stride(0),
                BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
    return out


def _contiguous_matrices(half: Tensor) -> bool:
    return half.ndim == 3 and half.stride(2) == 1 and half.stride(1) == half.shape[2]
