"""Products ``P X Q`` in fp16 alone, with symmetric P and Q: two products with fp16 results, and no search for scales.

P and Q are scaled by the fullest of their rows, not by their largest entry. So no entry of a product is larger than
those of X, which are scaled once.
"""

import torch
from jaxtyping import Float16, Float32
from torch import Tensor

from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.triton import splits as triton_splits
from layerwise.optim.cuda.triton.device import MOST_MATRICES, available

ROW = 2.0**15
"""Times the largest sum of a row's magnitudes: taken for the largest entry, it makes that sum at most 1 once it is
scaled, so that a product with the matrix exceeds nothing that the other operand does not."""


def row_bound(X: Float32[Tensor, "K n n"]) -> Float32[Tensor, "K"]:
    """What a symmetric matrix in fp16 is scaled by, in place of its largest entry, for `half_between`.

    >>> row_bound(torch.tensor([[[1.0, -2.0], [-2.0, 1.0]]])).item() / ROW
    3.0
    """
    return torch.linalg.vector_norm(X, 1, dim=-1).amax(-1) * ROW


def half_between(P: Half | None, X: Float32[Tensor, "K O I"], Q: Half | None, largest: Tensor | None = None) -> Scaled:
    """``P X Q`` of matrices that are scaled by `row_bound`, with fp16 results: two products, and no search for scales.

    >>> P = Half(torch.full((1, 1, 1), 0.5).half(), torch.tensor([0.25]))
    >>> found = half_between(P, torch.full((1, 1, 1), 3.0), None)
    >>> found.C.dtype, (found.C.float() / found.scales[0] / found.scales[1]).item()
    (torch.float16, 6.0)
    """
    if available(X.device) and len(X) <= MOST_MATRICES:
        half = triton_splits.halved(X, amax=largest)
    else:
        half = split_fp16.halved(X)
    C, scales = half.hi, (half.scale,)
    if P is not None:
        C, scales = _half_product(P.hi, C), (*scales, P.scale)
    if Q is not None:
        C, scales = _half_product(C, Q.hi), (*scales, Q.scale)
    return Scaled(C, scales)


def _half_product(A: Float16[Tensor, "K m l"], B: Float16[Tensor, "K l n"]) -> Float16[Tensor, "K m n"]:
    return A @ B if A.device.type == "cuda" else (A.float() @ B.float()).half()
