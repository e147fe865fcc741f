"""Passes over a stack's parameters and gradients as Triton kernels, one launch each; see `cuda.pieces`."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from layerwise.optim.cuda.triton.arguments import byte, listed
from layerwise.optim.cuda.triton.device import kernels, on

ROWS, COLUMNS = 32, 128
"""Of the tile that a program takes."""
ADAMW_ROWS, ADAMW_WARPS = 4, 4
"""Of the part of it that a program of AdamW's step takes: whole tiles, too many numbers at once, take 1.5 times as
long."""
VECTOR = 8
"""Entries that are read at once where everything is aligned."""
FIELDS = 11
"""Numbers that say where a piece lies (`cuda.pieces.Piece`)."""


def _how(aligned: bool) -> dict[str, Any]:
    return {"ROWS": ROWS, "COLUMNS": COLUMNS, "FIELDS": FIELDS, "ALIGNED": aligned, "num_warps": 8}


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
        kernels("piece_kernels").magnitude_kernel[(len(tiles),)](
            bits, tiles, pieces, addresses, like, **_how(aligned)
        )  # fmt: skip


def gather_(
    out: Float[Tensor, "K O I"],
    tiles: Int32[Tensor, "T 3"],
    pieces: Int64[Tensor, "p f"],
    addresses: Int64[Tensor, "n"],
    like: Tensor,
    factor: float,
    all_finite: Bool[Tensor, ""],
    aligned: bool,
) -> None:
    """Fill a stack with `factor` times the tensors; zeros in a step that is left out."""
    with on(out.device):
        kernels("piece_kernels").gather_kernel[(len(tiles),)](
            out, tiles, pieces, addresses, like, byte(all_finite, out.device), float(factor), **_how(aligned)
        )


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
    aligned: bool,
) -> None:
    """The end of a step: momentum, decoupled decay and descent.

        momentum ← mu·momentum + factor·D,    W ← (1 − lr·decay) W − lr·momentum

    `rates` are ``(1 − lr·decay, lr)``. With `nesterov` the update is ``factor·D + mu·momentum``, without `momentum` it
    is ``factor·D``. D may be of half precision, and has `scales` that it is divided by, ``[K]`` each.
    """
    with on(D.device):
        kernels("piece_kernels").finish_kernel[(len(tiles),)](
            tiles, pieces, addresses, like, D, listed(scales, 0), momentum, factor, rates,
            byte(all_finite, D.device), float(mu),
            SCALES=len(scales), HAS_MOMENTUM=momentum is not None, NESTEROV=nesterov and momentum is not None,
            HAS_FACTOR=factor is not None, **_how(aligned),
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
    how = _how(aligned) | {"ROWS": ADAMW_ROWS, "num_warps": ADAMW_WARPS}
    with on(M.device):
        kernels("piece_kernels").adamw_kernel[(len(tiles), ROWS // ADAMW_ROWS)](
            tiles, pieces, *addresses, like, M, V, *corrections, rates, byte(all_finite, M.device), float(scale),
            float(1 - b1), float(b2), float(1 - b2), float(eps), **how,
        )  # fmt: skip


def empty_like(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What tells a kernel the type that addresses point to."""
    return torch.empty(1, dtype=dtype, device=device)
