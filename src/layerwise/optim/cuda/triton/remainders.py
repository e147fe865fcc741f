"""``I − A B`` and ``X + R Y`` on a GPU, left in half precision: operands of rough products, which only correct.

Neither is searched for its largest entry. What a scale that is fixed cannot hold becomes infinite, so that the inverse
which it corrects is refused: entries of ``I − X M`` beyond 1023 have no place in an iteration that converges.
"""

import torch
from jaxtyping import Float32
from torch import Tensor

from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.linalg.fp16 import Half, HalfPair
from layerwise.optim.cuda.triton.device import ceil, kernels, on
from layerwise.optim.cuda.triton.products import pair_product

UNIT = 2.0**6
"""Scale of a remainder. Rounding leaves 2⁻³¹ beside 11 bits: nothing, even summed over thousands of columns."""
LARGE = 1024
"""Columns from which cuBLAS multiplies: on an H200 at 790 TFLOP/s for 3072 columns, against 430 of the fused kernel. It
writes float32, and a pass more makes a remainder of it; for small matrices that, and two launches more, is not won."""
BLOCK = 4096


def remainder(A: HalfPair, B: HalfPair) -> Half:
    """``I − A B`` of pairs, of square matrices: by cuBLAS and one pass, or as one kernel where they are small."""
    n = B.shape[-1]
    R = torch.empty(*A.shape[:-1], n, dtype=torch.float16, device=A.device)
    found = Half(R, torch.full(A.shape[:-2], UNIT, dtype=torch.float32, device=A.device))
    if n < LARGE:
        pair_product(A, B, alpha=-UNIT, identity=UNIT, out=R)
        return found
    C, _ = split_fp16.product(A, B, out_scaled=True)
    with on(A.device):
        kernels("remainder_kernels").remainder_kernel[(ceil(n * n, BLOCK), A.scale.numel())](
            R, C, A.scale.contiguous(), B.scale.contiguous(), UNIT, n * n, n, BLOCK=BLOCK, num_warps=8
        )
    return found


def improved(R: Half, Y: Half, X: Float32[Tensor, "*K n n"], scale: Float32[Tensor, "*K"]) -> Half:
    """``X + R Y``, known to be symmetric, at this scale."""
    half = Half(torch.empty(Y.shape, dtype=torch.float16, device=X.device), scale)
    pair_product(R, Y, add=X, alpha=scale, beta=scale, symmetric=True, out=half.hi)
    return half
