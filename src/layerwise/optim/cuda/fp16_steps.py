"""Steps in an eigenbasis written as halves at once, their scales foreseen.

A step is rotated back in float16, scaled by a power of two that depends on its largest entry, which is known when all
of it has been computed. But steps are alike: the pass writes with the scale that the last step's largest entry asks
for, with `HEADROOM`, and finds the largest of its own. A second launch looks whether the scale fits, and computes again
the groups where it does not: where a largest entry has grown or shrunk by more than about eight times. Elsewhere it
reads two numbers.

Without the kernels a step is written in float32, and then rounded.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.backend import Average
from layerwise.optim.cuda import elementwise
from layerwise.optim.cuda.checks import check_alike, check_whole
from layerwise.optim.cuda.device_step import all_finite
from layerwise.optim.cuda.eigenbasis_elementwise import damped_quotient, scaled
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.orthogonal import ROOM, with_room
from layerwise.optim.cuda.scaled import Scaled, parts
from layerwise.optim.cuda.triton import elementwise as triton_elementwise
from layerwise.optim.cuda.triton.arguments import bits, byte, listed
from layerwise.optim.cuda.triton.device import kernels, on
from layerwise.optim.cuda.triton.splits import HEADROOM


def moves(average: Average, s: Tensor, R: Tensor) -> bool:
    """Whether the pass of a quotient moves averages, too: where it is a kernel, and they are divided as they are."""
    by_kernel = elementwise.implementation_for(s, others=(R,), half=True) is triton_elementwise
    ahead = average.nesterov and average.M is not None
    return by_kernel and all_finite(average.context) is not None and not ahead


Numbers = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor]


@torch.no_grad()
def damped_half(
    R: Float[Tensor, "K O I"] | Scaled,
    s: Float[Tensor, "K O I"],
    added: Numbers,
    before: Float[Tensor, "K"],
    average: Average | None = None,
) -> Half:
    """`eigenbasis_elementwise.damped_quotient` in fp16 with headroom.

    `added` are its s_P, s_Q, left, right and constant. `before`, the largest magnitudes of the last step or zeros,
    becomes those of this one. An `average` that it `moves` is updated with R first, and unchanged in a step that is
    left out.

    >>> before, none = torch.zeros(1), (None, None, None, None, torch.ones(1))
    >>> half = damped_half(torch.full((1, 1, 1), 6.0), torch.full((1, 1, 1), 2.0), none, before)
    >>> (half.hi / half.scale).item(), before.item()
    (2.0, 2.0)
    """
    X, scales = parts(R)
    check_alike(s, {"R": X})
    if elementwise.implementation_for(s, others=(X,), half=True) is not triton_elementwise:
        return with_room(damped_quotient(R, s, *added, largest=before), before)
    K, O, I = s.shape
    numbers = [None if x is None or added[2] is None else x.contiguous() for x in added[:4]] + [added[4].contiguous()]
    hi, scale, largest = _room(X)
    tiny, strides = torch.finfo(s.dtype).tiny, (s.stride(0), hi.stride(0))
    finite, M, numbers_of_averages, squares = None, None, (0.0, 0.0, 1.0), None
    if average is not None:
        finite, M, squares = all_finite(average.context), average.M, average.squares_decay
        kept = 1.0 if squares is None else squares
        numbers_of_averages = (float(1 - average.decay), float(1 - kept), float(average.context.examples))
    with on(s.device):
        grid, has_factors = (triton_elementwise.tiles(O, I), K), added[2] is not None
        kernels("eigenbasis_kernels").damped_quotient_kernel[grid](
            X, listed(scales, 0), s, hi, *numbers, bits(largest), bits(before), tiny, byte(finite, s.device), M,
            *numbers_of_averages, O, I, X.stride(0), *strides, 0 if M is None else M.stride(0), HAS_LARGEST=True,
            AVERAGED=M is not None, SQUARED=squares is not None, **_kinds(scales, HAS_FACTORS=has_factors),
        )  # fmt: skip
        X, scales = (X, scales) if M is None else (M, ())  # which has been moved by now
        kernels("eigenbasis_kernels").quotient_again_kernel[grid](
            X, listed(scales, 0), s, hi, *numbers, bits(largest), bits(before), scale, tiny,
            O, I, X.stride(0), *strides, **_kinds(scales, HAS_FACTORS=has_factors),
        )  # fmt: skip
    before.copy_(largest)
    return Half(hi, scale)


@torch.no_grad()
def scaled_half(
    R: Float[Tensor, "K O I"] | Scaled,
    a: Float[Tensor, "K O"] | None,
    b: Float[Tensor, "K I"] | None,
    before: Float[Tensor, "K"],
) -> Half:
    """`eigenbasis_elementwise.scaled` as a half with room; otherwise as `damped_half`.

    >>> before = torch.zeros(1)
    >>> half = scaled_half(torch.ones(1, 1, 2), torch.tensor([[3.0]]), torch.tensor([[1.0, 2.0]]), before)
    >>> (half.hi / half.scale).tolist(), before.item()
    ([[[3.0, 6.0]]], 6.0)
    """
    X, scales = parts(R)
    check_whole(X, "R")
    others = tuple(x for x in (a, b) if x is not None)
    if elementwise.implementation_for(X, others=others, half=True) is not triton_elementwise:
        return with_room(scaled(R, a, b, out=X, largest=before), before)
    K, O, I = X.shape
    hi, scale, largest = _room(X)
    sides = [None if x is None else x.contiguous() for x in (a, b)]
    shape = (O, I, X.stride(0), hi.stride(0))
    kinds = _kinds(scales, HAS_ROWS=a is not None, HAS_COLUMNS=b is not None)
    with on(X.device):
        grid, factors = (triton_elementwise.tiles(O, I), K), listed(scales, 0)
        kernels("eigenbasis_kernels").scaled_kernel[grid](
            X, factors, hi, *sides, bits(largest), bits(before), *shape,
            HAS_LARGEST=True, **kinds,
        )  # fmt: skip
        kernels("eigenbasis_kernels").scaled_again_kernel[grid](
            X, factors, hi, *sides, bits(largest), bits(before), scale, *shape, **kinds
        )
    before.copy_(largest)
    return Half(hi, scale)


def _room(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For the half, its scales, and the largest magnitudes."""
    numbers = torch.zeros(2, len(X), dtype=torch.float32, device=X.device)
    return torch.empty(X.shape, dtype=torch.float16, device=X.device), numbers[0], numbers[1]


def _kinds(scales: tuple[Tensor, ...], **kinds: bool) -> dict[str, Any]:
    return {"SCALES": len(scales), "ROOM": ROOM, "HEADROOM": HEADROOM, **kinds, **triton_elementwise.TILE}
