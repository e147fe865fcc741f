"""Points of a square in two classes, with a disc of the other class in each half: easy and difficult regions."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.foundations.random import stream

RADIUS = 0.3
CENTRES = {"diagonal": ((0.5, -0.5), (-0.5, 0.5)), "left": ((-0.5, -0.5), (-0.5, 0.5))}
"""Of the two discs, by variant."""


class YinYang(NamedTuple):
    """Points and their labels, −1 or 1; unpacks as ``x, y``."""

    x: Float[Tensor, "N 2"]
    y: Float[Tensor, "N"]


def yin_yang(n: int, seed: int, variant: str = "diagonal") -> YinYang:
    """`n` points, uniform in ``[−1, 1]²``: 1 in the lower half and −1 in the upper, the reverse inside two discs.

    >>> x, y = yin_yang(100, seed=0)
    >>> x.shape, sorted(set(y.tolist()))
    (torch.Size([100, 2]), [-1.0, 1.0])

    Args:
        n: number of points.
        seed: of their places.
        variant: "diagonal" (discs at (0.5, −0.5) and (−0.5, 0.5)) or "left" (at (−0.5, ∓0.5)).
    """
    if n < 1:
        raise InputError(describe(f"n={n}", "a point at least", "take e.g. n=100"))
    x = 2 * torch.rand(n, 2, generator=stream(seed, "yin-yang"), dtype=torch.float64) - 1
    return YinYang(x, yin_yang_labels(x, variant))


def yin_yang_grid(side: int, variant: str = "diagonal") -> YinYang:
    """A regular grid of ``side²`` points, at the middles of as many equal squares, with the labels."""
    if side < 1:
        raise InputError(describe(f"side={side}", "a point at least", "take e.g. side=60"))
    axis = (2 * torch.arange(side, dtype=torch.float64) + 1) / side - 1
    x = torch.cartesian_prod(axis, axis)
    return YinYang(x, yin_yang_labels(x, variant))


def yin_yang_labels(x: Float[Tensor, "N 2"], variant: str = "diagonal") -> Float[Tensor, "N"]:
    """1 where ``x₂ ≤ 0`` and −1 above, the reverse inside the discs."""
    half = torch.where(x[:, 1] <= 0, 1.0, -1.0).to(x)
    return torch.where(in_discs(x, variant), -half, half)


def in_discs(x: Float[Tensor, "N 2"], variant: str = "diagonal") -> Bool[Tensor, "N"]:
    """Where labels are reversed."""
    return to_discs(x, variant) <= RADIUS


def easy(x: Float[Tensor, "N 2"], variant: str = "diagonal") -> Bool[Tensor, "N"]:
    """The parts without a disc: two quadrants, or the right half for the variant "left"."""
    to_discs(x[:0], variant)
    return x[:, 0] * x[:, 1] > 0 if variant == "diagonal" else x[:, 0] > 0


def to_discs(x: Float[Tensor, "N 2"], variant: str = "diagonal") -> Float[Tensor, "N"]:
    """The distance to the nearer centre."""
    if variant not in CENTRES:
        raise NameLookupError(unknown("variant", variant, CENTRES))
    return torch.cdist(x, torch.tensor(CENTRES[variant]).to(x)).amin(1)
