"""The passes of `elementwise` as Triton's kernels: one launch a stack; two where numbers of tiles are added up."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from layerwise.optim.cuda.triton.arguments import (
    AllFinite,
    always,
    bits,
    byte,
    listed,
)
from layerwise.optim.cuda.triton.device import ceil, kernels, on
from layerwise.optim.step.seen_rows import USUAL_UPDATE
from layerwise.optim.step.update import MOST_CHANGE

TILE = {"ROWS": 16, "COLUMNS": 128, "num_warps": 4}
BLOCK = {"BLOCK": 2048, "num_warps": 4}
OF_GROUP = {"TILES": 1024, "ACROSS": 8, "ROWS": 512, "num_warps": 8}
"""How much of what tiles have found of a group is added up at a time."""
SMALL = 256  # entries of groups that one block takes several of
MOST_GROUPS = 65535  # of the second axis of a grid
MOST_ENTRIES = 2**31 - 2**16  # of one group: offsets in it are 32 bits


def ema_(mean: Tensor, new: Tensor, weight: Tensor, divisor: Tensor | int | float) -> None:
    """`elementwise.ema_`, with mean and new as stacks of matrices."""
    K, rows, width = mean.shape
    divisor_at = divisor.contiguous() if isinstance(divisor, Tensor) else None
    host = 1.0 if isinstance(divisor, Tensor) else float(divisor)
    with on(mean.device):
        kernels("elementwise_kernels").ema_kernel[(tiles(rows, width), K)](
            mean, new, weight.contiguous(), divisor_at, host, rows, width, new.shape[1], new.shape[2],
            mean.stride(0), new.stride(0), new.stride(1), HAS_DIVISOR=divisor_at is not None, **TILE,
        )  # fmt: skip


def adam_(
    M: Tensor,
    V: Tensor,
    G: Tensor,
    scales: Sequence[Tensor],
    step: Tensor,
    factor: int | float,
    beta1: int | float,
    beta2: int | float,
    eps: int | float,
    correction1: Tensor,
    correction2: Tensor,
    rotated: bool,
    floor: Tensor | None,
    all_finite: AllFinite,
) -> None:
    """`elementwise.adam_` and `elementwise.rotated_adam_`."""
    entries, groups = M[0].numel(), len(M)
    flat = entries if entries < SMALL and not scales and all(X.is_contiguous() for X in (M, V, G, step)) else 0
    if flat and entries * groups <= MOST_ENTRIES:
        entries, groups = entries * groups, 1
    with on(M.device):
        kernels("elementwise_kernels").adam_kernel[(blocks(entries), groups)](
            M, V, G, listed(scales, 0), step, byte(all_finite, M.device), correction1.contiguous(),
            correction2.contiguous(), correction2 if floor is None else floor.contiguous(),
            float(1 - beta1), float(beta2), float(1 - beta2), float(eps), float(factor), entries, max(flat, 1),
            M.stride(0), V.stride(0), G.stride(0), step.stride(0),
            SCALES=len(scales), ROTATED=rotated, FLAT=flat > 0 and groups == 1, HAS_FLOOR=floor is not None, **BLOCK,
        )  # fmt: skip


def adam_norms_(
    M: Tensor,
    V: Tensor,
    G: Tensor,
    scales: Sequence[Tensor],
    beta1: int | float,
    beta2: int | float,
    eps: int | float,
    correction1: Tensor,
    correction2: Tensor,
    all_finite: AllFinite,
    apart: int,
) -> tuple[Tensor, Tensor]:
    """`elementwise.adam_norms_`: where rows are apart, a first pass over all of them tells which are not zero."""
    (groups, rows, width), device, seen, some = G.shape, M.device, V.shape[1], apart > 1
    averaged, taken = some and M.shape[1] == rows, byte(all_finite, device)
    n, across, corrections = tiles(seen, width), ceil(width, TILE["COLUMNS"]), (correction1, correction2)
    partial = torch.empty(groups, n, dtype=torch.float32, device=device)
    flags = torch.empty(groups, across, rows, dtype=torch.int8, device=device) if some else None
    norms, largest = torch.empty(groups, dtype=torch.float32, device=device), M.new_zeros(groups, dtype=torch.float32)
    divided = {"SCALES": len(scales)}
    with on(device):
        launch = kernels("elementwise_kernels")
        if some:
            launch.average_kernel[(tiles(rows, width), groups)](
                M, G, listed(scales, 0), bits(largest), flags, taken, float(1 - beta1), rows, width,
                M.stride(0), G.stride(0), HAS_M=averaged, **divided, **TILE,
            )  # fmt: skip
        launch.adam_norm_kernel[(n, groups)](
            M, V, G, listed(scales, 0), partial, bits(largest), taken, *(c.contiguous() for c in corrections),
            float(1 - beta1), float(beta2), float(1 - beta2), float(eps), seen, width, apart,
            M.stride(0), V.stride(0), G.stride(0), AVERAGED=averaged, **divided, **TILE,
        )  # fmt: skip
        launch.norm_of_all_kernel[(groups,)](
            partial, flags, norms, USUAL_UPDATE, n, across, rows, width, seen, apart, SOME=some, **OF_GROUP
        )
    return norms, largest


def momentum_update_(
    M: Tensor, G: Tensor, mu: int | float, nesterov: bool, all_finite: AllFinite
) -> tuple[Tensor, Tensor]:
    """`elementwise.momentum_update_`."""
    entries = M[0].numel()
    update = torch.empty(M.shape, dtype=M.dtype, device=M.device)
    partial = torch.empty(len(M), blocks(entries), dtype=torch.float32, device=M.device)
    with on(M.device):
        kernels("elementwise_kernels").momentum_update_kernel[(blocks(entries), len(M))](
            M, G, update, partial, byte(all_finite, M.device), float(1 - mu), float(mu), entries, M.stride(0),
            G.stride(0), NESTEROV=nesterov, **BLOCK,
        )  # fmt: skip
    return update, partial.sum(1)


def corrections_(
    steps: Tensor,
    correction1: Tensor,
    correction2: Tensor,
    beta1: int | float,
    beta2: int | float,
    all_finite: AllFinite,
) -> None:
    """`elementwise.corrections_`."""
    logs = (math.log(max(beta, 1e-300)) for beta in (beta1, beta2))
    with on(steps.device):
        kernels("elementwise_kernels").corrections_kernel[(blocks(len(steps)),)](
            steps, correction1, correction2, byte(all_finite, steps.device), *logs, len(steps), **BLOCK
        )  # fmt: skip


def divisor(
    wanted: Tensor, norms: Tensor, weights: Tensor, least: float, scales: Sequence[Tensor], lr: Tensor
) -> Tensor:
    """`update_ratio.divisor`."""
    out = torch.empty_like(wanted)
    with on(wanted.device):
        kernels("elementwise_kernels").divisor_kernel[(blocks(len(out)),)](
            out, wanted.contiguous(), norms.contiguous(), weights.contiguous(), listed(scales, 0), lr,
            MOST_CHANGE, float(least), torch.finfo(torch.float32).tiny, len(out), SCALES=len(scales), **BLOCK,
        )  # fmt: skip
    return out


# --- in an eigenbasis ----------------------------------------------------------------------------------------


def squares_ema_(s: Tensor, R: Tensor, scales: Sequence[Tensor], weight: Tensor, factor: int | float) -> None:
    """`eigenbasis_elementwise.squares_ema_`."""
    entries = s[0].numel()
    with on(s.device):
        kernels("eigenbasis_kernels").squares_ema_kernel[(blocks(entries), len(s))](
            s, R, listed(scales, 0), weight.contiguous(), float(factor), entries, s.stride(0), R.stride(0),
            SCALES=len(scales), **BLOCK,
        )  # fmt: skip


def damped_quotient(
    R: Tensor,
    scales: Sequence[Tensor],
    s: Tensor,
    s_P: Tensor | None,
    s_Q: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    constant: Tensor,
    out: Tensor,
    largest: Tensor | None,
) -> None:
    """`eigenbasis_elementwise.damped_quotient`."""
    K, O, I = s.shape
    factors = [None if X is None or left is None else X.contiguous() for X in (s_P, s_Q, left, right)]
    with on(s.device):
        kernels("eigenbasis_kernels").damped_quotient_kernel[(tiles(O, I), K)](
            R, listed(scales, 0), s, out, *factors, constant.contiguous(), bits(largest), None,
            torch.finfo(s.dtype).tiny, always(s.device), None, 0.0, 0.0, 1.0, O, I, R.stride(0), s.stride(0),
            out.stride(0), 0, SCALES=len(scales), HAS_FACTORS=left is not None, HAS_LARGEST=largest is not None,
            AVERAGED=False, SQUARED=False, ROOM=0, HEADROOM=0, **TILE,
        )  # fmt: skip


def scaled(
    R: Tensor,
    scales: Sequence[Tensor],
    a: Tensor | None,
    b: Tensor | None,
    out: Tensor,
    largest: Tensor | None,
) -> None:
    """`eigenbasis_elementwise.scaled`."""
    K, O, I = R.shape
    sides = [None if x is None else x.contiguous() for x in (a, b)]
    with on(R.device):
        kernels("eigenbasis_kernels").scaled_kernel[(tiles(O, I), K)](
            R, listed(scales, 0), out, *sides, bits(largest), None, O, I, R.stride(0), out.stride(0),
            SCALES=len(scales), HAS_ROWS=a is not None, HAS_COLUMNS=b is not None, HAS_LARGEST=largest is not None,
            ROOM=0, HEADROOM=0, **TILE,
        )  # fmt: skip


# --- how many --------------------------------------------------------------------------------------------------


def tiles(rows: int, columns: int) -> int:
    """How many tiles cover a matrix."""
    return -(-rows // TILE["ROWS"]) * -(-columns // TILE["COLUMNS"])


def blocks(entries: int) -> int:
    """How many blocks cover so many entries."""
    return -(-entries // BLOCK["BLOCK"])
