"""What a sweep of `jacobi.tracked_basis` has beside its products, on a GPU, in few launches.

Entries of a rotation are bounded, so that their powers of two need no search: rounding leaves at most 2⁻³⁸ beside 11
bits. What is not bounded so overflows and is found in the first row of the result.
"""

from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Float16, Float32
from torch import Tensor

from layerwise.foundations.linalg.probes import signs
from layerwise.optim.cuda.linalg.split_fp16 import Half
from layerwise.optim.cuda.triton.device import ceil, kernels, on

UNIT = 2.0**14  # scale of E, of E + E²/2 and of I − VᵀV
PROBES = 16  # columns, the least that tensor cores take
APPLICATIONS, MARGIN = 4, 1.15  # as in `jacobi`, which says why
ROWS, COLUMNS, FINISH_ROWS, DIAGONAL = 16, 128, 512, 1024
DOTS = {"EACH": 64, "ROWS": 16, "COLUMNS": 128, "num_warps": 2}
"""Of `column_dots`: EACH rows a program, ROWS at a time. Half a warp reads one row of halves, 16 bytes a thread."""


@dataclass(frozen=True)
class Rotation:
    """``beta·E``, E in half precision and antisymmetric; ``alpha = UNIT beta²/2``; eigenvalues and coupling."""

    E: Half
    alpha: Float32[Tensor, "K"]
    beta: Float32[Tensor, "K"]
    values: Float32[Tensor, "K n"]
    left: Float32[Tensor, "K"]


def rotation(S: Float32[Tensor, "K n n"], damping: int | float, still: int | float) -> Rotation:
    """`jacobi.rotation`, second order eigenvalues and coupling of symmetric matrices, in few launches."""
    K, n = S.shape[:2]
    scale, unit, alpha, beta, left = torch.empty(5, K, device=S.device)
    diagonal, width, weight, squares, couplings, first, second, values = torch.empty(8, K, n, device=S.device)
    E = torch.empty(K, n, n, dtype=torch.float16, device=S.device)
    images = torch.empty(K, n, PROBES, dtype=torch.float16, device=S.device)
    found, grid = kernels("jacobi_kernels"), (ceil(n, ROWS), K)
    more = APPLICATIONS - 2  # the first is in a kernel, the last below
    with on(S.device):
        found.diagonal_kernel[(K,)](
            S, scale, diagonal, width, weight, unit, float(still), float(damping), UNIT, n, S.stride(0),
            BLOCK=DIAGONAL, num_warps=4,
        )  # fmt: skip
        found.row_sums_kernel[grid](
            S, scale, diagonal, width, weight, squares, couplings, n, S.stride(0),
            ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
        found.rotation_kernel[grid](
            E, S, scale, diagonal, width, squares, first, second, _probes(n, S.device), images, UNIT, n, S.stride(0),
            PROBES=PROBES, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
        for _ in range(more):  # a quarter each, so that what E magnifies stays below fp16's last number
            images = (_applied(E, images) * (0.25 / UNIT)).half()
        found.finish_kernel[(K,)](
            images, _applied(E, images), scale, diagonal, first, second, couplings, alpha, beta, values, left, UNIT,
            MARGIN, n,
            PROBES=PROBES, BLOCK=FINISH_ROWS, num_warps=8,
        )  # fmt: skip
    return Rotation(Half(E, unit), alpha, beta, values, left)


def column_dots(
    C: Float[Tensor, "K n m"], V: Float16[Tensor, "K n m"]
) -> tuple[Float32[Tensor, "K m"], Float32[Tensor, "K m"]]:
    """``Σᵢ C_ij V_ij`` and ``Σᵢ V_ij²``, added in an order that does not change."""
    K, n, m = V.shape
    parts = ceil(n, DOTS["EACH"])
    found = torch.empty(2, K, parts, m, dtype=torch.float32, device=V.device)
    with on(V.device):
        kernels("jacobi_kernels").column_dots_kernel[(ceil(m, DOTS["COLUMNS"]), parts, K)](
            found[0], found[1], C, V, n, m, C.stride(0), V.stride(0), **DOTS
        )
    dots, squares = found.sum(2)
    return dots, squares


def _applied(E: Tensor, images: Tensor) -> Float32[Tensor, "K n k"]:
    if E.device.type == "cuda":
        return torch.bmm(E, images, out_dtype=torch.float32)
    return E.float() @ images.float()


@cache
def _probes(n: int, device: torch.device) -> Float16[Tensor, "n k"]:
    return signs(n, PROBES, torch.zeros((), dtype=torch.float16, device=device))
