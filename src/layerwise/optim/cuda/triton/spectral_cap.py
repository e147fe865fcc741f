"""`step.spectral_cap` as Triton's kernels: four launches a stack, of which the first one measures it as well, and the
last one reads it only to cut."""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.linalg.probes import probe_columns
from layerwise.optim.cuda.triton.device import MOST_MATRICES, ceil, kernels, on
from layerwise.optim.cuda.triton.elementwise import MOST_ENTRIES, TILE, tiles
from layerwise.optim.step.spectral_cap import PROBES

LEAST = 64
"""Rows and columns of matrices for which it is worth it."""
LONG, WIDE = 128, 32
"""Of a tile, along the sum and across it."""


def fits(D: Float[Tensor, "K O I"]) -> bool:
    """Whether the kernels take a stack."""
    K, O, I = D.shape
    taken = D.dtype in (torch.float16, torch.bfloat16, torch.float32) and D.is_contiguous()
    return taken and min(O, I) >= LEAST and K <= MOST_MATRICES and O * I <= MOST_ENTRIES


def cap_(D: Float[Tensor, "K O I"], share: float) -> Float[Tensor, "K"]:
    """Cut matrices in place, whose largest singular value is more than `share` of their norm; the norms before."""
    K, O, I = D.shape
    device, along = D.device, {"ROWS": WIDE, "COLUMNS": LONG, "PROBES": PROBES, "num_warps": 4}
    Z = probe_columns(I, PROBES, like=torch.empty(0, dtype=torch.float32, device=device))
    Y = torch.empty(K, O, PROBES, dtype=torch.float32, device=device)
    X = torch.empty(K, PROBES, I, dtype=torch.float32, device=device)
    by_rows, by_columns = ceil(O, WIDE), ceil(I, 2 * WIDE)
    squares = torch.empty(K, by_rows, PROBES, dtype=torch.float32, device=device)
    lengths = torch.empty(K, by_columns, PROBES, dtype=torch.float32, device=device)
    u, sums, sizes = (torch.empty(K, n, dtype=torch.float32, device=device) for n in (O, by_rows, by_rows))
    with on(device):
        launch = kernels("spectral_cap_kernels")
        launch.probe_kernel[(by_rows, K)](D, Z, Y, squares, sizes, O, I, D.stride(0), **along)
        norms = sizes.sum(1).sqrt_()
        launch.right_kernel[(by_columns, K)](
            D, norms, Y, squares, X, lengths, O, I, D.stride(0), by_rows,
            ROWS=2 * WIDE, COLUMNS=2 * WIDE, PROBES=PROBES, num_warps=4,
        )  # fmt: skip
        launch.left_kernel[(by_rows, K)](D, norms, X, lengths, u, sums, O, I, D.stride(0), by_columns, **along)
        launch.cut_kernel[(tiles(O, I), K)](
            D, norms, X, lengths, u, sums, share, O, I, D.stride(0), by_rows, by_columns, PROBES=PROBES, **TILE
        )
    return norms
