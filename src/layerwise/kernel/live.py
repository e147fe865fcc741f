"""Positions at which the functions have a gradient, such as the last one of a next-token model.

Where few are live, the others are left out of a contraction. Which they are decides the shapes of all that follows, so
the host has to know; it reads all layers back at once, with one synchronization.
"""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from layerwise.foundations.device import Readback, sent
from layerwise.layers.io.layer_io import RecordedIO
from layerwise.layers.io.one_hot import OneHot
from layerwise.layers.io.standard import Standard

Live = Bool[np.ndarray, "N S"]
"""On the host: of each example, the positions at which some gradient is not zero."""


def live_positions(ios: Mapping[str, RecordedIO]) -> dict[str, Live]:
    """Of every layer, in one readback."""
    if not ios:
        return {}
    masks = {name: _mask(io) for name, io in ios.items()}
    flat = Readback(torch.cat([mask.flatten() for mask in masks.values()])).array()
    ends = np.cumsum([mask.numel() for mask in masks.values()])
    parts = zip(masks.items(), np.split(flat, ends[:-1]), strict=True)
    return {name: part.reshape(mask.shape) for (name, mask), part in parts}


def _mask(io: RecordedIO) -> Bool[Tensor, "N S"]:
    gradients = (call.outgrads(io.examples, io.dtype) for call in io.calls)  # V N S K O
    # A norm is one pass, and makes nothing of the size of the gradients; that of NaN is not zero either.
    masks = [torch.linalg.vector_norm(g, torch.inf, dim=(0, 3, 4)) != 0 for g in gradients]
    return masks[0] if len(masks) == 1 else torch.cat(masks, dim=1)


def at_live(standard: Standard, live: Live) -> Standard:
    """Without the positions at which every gradient of these examples is zero."""
    kept = np.flatnonzero(live.any(0))
    if len(kept) == live.shape[1]:
        return standard
    first, last = (int(kept[0]), int(kept[-1])) if len(kept) else (0, 0)  # one is left, for the shapes
    if last - first + 1 == max(len(kept), 1):
        return _at(standard, slice(first, last + 1))
    return _at(standard, sent(torch.from_numpy(kept), standard.g.device))


def _at(standard: Standard, kept: slice | Tensor) -> Standard:
    a, g = standard.a, standard.g[:, :, kept]
    if isinstance(a, OneHot):
        return Standard(OneHot(a.index.reshape(a.index.shape[0], -1)[:, kept], a.size), g)
    return Standard(a[:, kept], g)
