"""Passes over a stack's parameters and gradients as Triton kernels, one launch each; see `cuda.pieces`."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int32, Int64
from torch import Tensor

from layerwise.optim.cuda.linalg.orthogonal import ROOM
from layerwise.optim.cuda.triton.arguments import byte, listed
from layerwise.optim.cuda.triton.device import kernels, on

ROWS, COLUMNS = 32, 128
"""Of a tile, of which a program takes some rows, with some warps."""
READ, FINISH, ADAMW = (8, 2), (4, 2), (4, 4)
"""Rows and warps of the passes that read gradients, of the descent and of AdamW's step: whole tiles, too many numbers
at once, take up to 1.5 times as long (H200)."""
VECTOR = 8
"""Entries that are read at once where everything is aligned."""
FIELDS = 11
"""Numbers that say where a piece lies (`cuda.pieces.Piece`)."""


def _grid(tiles: Int32[Tensor, "T 3"], part: tuple[int, int]) -> tuple[int, int]:
    return len(tiles), ROWS // part[0]


def _how(aligned: bool, part: tuple[int, int]) -> dict[str, Any]:
    return {"ROWS": part[0], "num_warps": part[1], "COLUMNS": COLUMNS, "FIELDS": FIELDS, "ALIGNED": aligned}


def magnitudes_(
    bits: Int32[Tensor, "n"],
    tiles: Int32[Tensor, "T 3"],
    pieces: Int64[Tensor, "p f"],
    addresses: Int64[Tensor, "n"],
    like: Tensor,
    aligned: bool,
) -> None:
    """The largest magnitude of each tensor that the table has, where it is more than what is there."""
    with on(bits.device):
        kernels("piece_kernels").magnitude_kernel[_grid(tiles, READ)](
            bits, tiles, pieces, addresses, like, **_how(aligned, READ)
        )  # fmt: skip


def gather_(
    out: Float[Tensor, "K O I"],
    tiles: Int32[Tensor, "T 3"],
    pieces: Int64[Tensor, "p f"],
    addresses: Int64[Tensor, "n"],
    like: Tensor,
    factor: float,
    all_finite: Bool[Tensor, ""],
    scale: Float32[Tensor, "K"] | None,
    largest: Float32[Tensor, "K"] | None,
    aligned: bool,
) -> None:
    """Fill a stack with `factor` times the tensors; zeros in a step that is left out.

    With `largest`, which no entry of each group exceeds, `out` is of float16, times a power of two that leaves room for
    products with orthogonal matrices (`linalg.orthogonal`), and is written into `scale`.
    """
    with on(out.device):
        kernels("piece_kernels").gather_kernel[_grid(tiles, READ)](
            out, tiles, pieces, addresses, like, byte(all_finite, out.device), float(factor), scale, largest,
            float(ROOM), HALF=largest is not None, **_how(aligned, READ)
        )  # fmt: skip


def finish_(
    tiles: Int32[Tensor, "T 3"],
    pieces: Int64[Tensor, "p f"],
    addresses: Int64[Tensor, "n"],
    like: Tensor,
    D: Float[Tensor, "K O I"],
    scales: Sequence[Tensor],
    momentum: Float[Tensor, "K O I"] | None,
    rates: Float[Tensor, "r 2"],
    mu: float,
    nesterov: bool,
    factor: Tensor | None,
    all_finite: Bool[Tensor, ""],
    squares: Float32[Tensor, "K parts"] | None,
    aligned: bool,
) -> None:
    """The end of a step: momentum, decoupled decay and descent.

        momentum ← mu·momentum + factor·D,    W ← (1 − lr·decay) W − lr·momentum

    `rates` are ``(1 − lr·decay, lr)``. With `nesterov` the update is ``factor·D + mu·momentum``, without `momentum` it
    is ``factor·D``. D may be of half precision, and has `scales` that it is divided by, ``[K]`` each. `squares` gets
    the sum of squares of each part of a tile of W, tile by tile.
    """
    with on(D.device):
        kernels("piece_kernels").finish_kernel[_grid(tiles, FINISH)](
            tiles, pieces, addresses, like, D, listed(scales, 0), momentum, factor, rates,
            byte(all_finite, D.device), float(mu), squares,
            SCALES=len(scales), HAS_MOMENTUM=momentum is not None, NESTEROV=nesterov and momentum is not None,
            HAS_FACTOR=factor is not None, HAS_SQUARES=squares is not None, **_how(aligned, FINISH),
        )  # fmt: skip


def adamw_(
    tiles: Int32[Tensor, "T 3"],
    pieces: Int64[Tensor, "p f"],
    addresses: tuple[Int64[Tensor, "n"], Int64[Tensor, "n"]],
    like: Tensor,
    moments: tuple[Float[Tensor, "K O I"], Float[Tensor, "K O I"]],
    corrections: tuple[Float[Tensor, "K"], Float[Tensor, "K"]],
    rates: Float[Tensor, "r 2"],
    scale: float,
    betas: tuple[float, float],
    eps: float,
    all_finite: Bool[Tensor, ""],
    aligned: bool,
) -> None:
    """A whole step of AdamW, from gradients (the first addresses) times `scale` to parameters.

        m ← β₁ m + (1 − β₁) ∇L,    v ← β₂ v + (1 − β₂) ∇L²,    W ← (1 − lr·decay) W − lr (m/c₁) / (√(v/c₂) + ε)

    The corrections c are ``1 − βᵗ``, those of its first group for all of a piece.
    """
    (b1, b2), (M, V) = betas, moments
    with on(M.device):
        kernels("piece_kernels").adamw_kernel[_grid(tiles, ADAMW)](
            tiles, pieces, *addresses, like, M, V, *corrections, rates, byte(all_finite, M.device), float(scale),
            float(1 - b1), float(b2), float(1 - b2), float(eps), **_how(aligned, ADAMW),
        )  # fmt: skip


def empty_like(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What tells a kernel the type that addresses point to."""
    return torch.empty(1, dtype=dtype, device=device)
