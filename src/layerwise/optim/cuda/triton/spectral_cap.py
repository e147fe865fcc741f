"""`step.spectral_cap` as Triton's kernels: four launches a stack, of which the first one measures it as well, and the
last one reads it only to cut."""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.linalg.probes import probe_columns
from layerwise.optim.cuda.triton.device import MOST_MATRICES, ceil, kernels, on
from layerwise.optim.cuda.triton.elementwise import MOST_ENTRIES
from layerwise.optim.step.spectral_cap import PROBES

LEAST = 64
"""Rows and columns of matrices for which it is worth it."""
PROBE = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4, "num_stages": 1}
RIGHT = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 4}
LEFT = {"ROWS": 32, "COLUMNS": 128, "num_warps": 4}
CUT = {"ROWS": 16, "COLUMNS": 256, "num_warps": 4}
"""Tiles of the kernels. The first loads no tile ahead: of tiles that both tensor cores and registers read, some were
overwritten too early where four were on their way (Triton 3.6 on an H200, up to half of the launches; with one or two
never in 360). In single precision they have half the columns."""


def fits(D: Float[Tensor, "K O I"]) -> bool:
    """Whether the kernels take a stack."""
    K, O, I = D.shape
    taken = D.dtype in (torch.float16, torch.bfloat16, torch.float32) and D.is_contiguous()
    return taken and min(O, I) >= LEAST and K <= MOST_MATRICES and O * I <= MOST_ENTRIES


def cap_(D: Float[Tensor, "K O I"], share: float) -> Float[Tensor, "K"]:
    """Cut matrices in place, whose largest singular value is more than `share` of their norm; the norms before."""
    K, O, I = D.shape
    device = D.device
    probe, right, left, cut = ({**tile, "PROBES": PROBES} for tile in (PROBE, RIGHT, LEFT, CUT))
    probe["COLUMNS"] = PROBE["COLUMNS"] * 2 // D.element_size()
    Z = probe_columns(I, PROBES, like=torch.empty(0, dtype=D.dtype, device=device))
    Y = torch.empty(K, O, PROBES, dtype=torch.float32, device=device)
    X = torch.empty(K, PROBES, I, dtype=torch.float32, device=device)
    probed, columns, rows = ceil(O, probe["ROWS"]), ceil(I, right["COLUMNS"]), ceil(O, left["ROWS"])
    squares = torch.empty(K, probed, PROBES, dtype=torch.float32, device=device)
    lengths = torch.empty(K, columns, PROBES, dtype=torch.float32, device=device)
    u, sums, sizes = (torch.empty(K, n, dtype=torch.float32, device=device) for n in (O, rows, probed))
    norms = torch.empty(K, dtype=torch.float32, device=device)
    with on(device):
        launch = kernels("spectral_cap_kernels")
        launch.probe_kernel[(probed, K)](D, Z, Y, squares, sizes, O, I, D.stride(0), **probe)
        launch.right_kernel[(columns, K)](D, sizes, norms, Y, squares, X, lengths, O, I, D.stride(0), probed, **right)
        launch.left_kernel[(rows, K)](D, norms, X, lengths, u, sums, O, I, D.stride(0), columns, **left)
        launch.cut_kernel[(ceil(O, cut["ROWS"]), K)](
            D, norms, X, lengths, u, sums, share, O, I, D.stride(0), rows, columns, **cut
        )
    return norms
