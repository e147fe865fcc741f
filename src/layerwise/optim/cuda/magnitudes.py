"""One pass over all gradients: whether they are finite, and how large each is."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Magnitudes:
    """The largest magnitude of each of some tensors."""

    finite: Bool[Tensor, ""]
    """Whether all entries of all of them are finite."""
    largest: Float[Tensor, "T"]
    """In float32 (or float64)."""
    places: tuple[int, ...]
    """Where each tensor's is found; −1 for one without entries."""


@torch.no_grad()
def magnitudes(tensors: Sequence[Float[Tensor, "..."]]) -> Magnitudes:
    """The largest magnitudes of tensors on one device; nothing is asked of it.

    >>> found = magnitudes([torch.tensor([1.0, -3.0]), torch.zeros(0), torch.ones(2, 2)])
    >>> found.largest, found.places, found.finite
    (tensor([3., 1.]), (0, -1, 1), tensor(True))
    """
    kinds: dict[torch.dtype, list[int]] = {}
    for place, X in enumerate(tensors):
        if X.numel():
            kinds.setdefault(X.dtype, []).append(place)
    device = tensors[0].device if len(tensors) else None
    if not kinds:
        empty = torch.zeros(0, device=device)
        return Magnitudes(torch.ones((), dtype=torch.bool, device=device), empty, (-1,) * len(tensors))
    found = []
    for alike in kinds.values():  # torch fuses lists of one type only
        norms = torch._foreach_norm([tensors[place] for place in alike], torch.inf)  # pyright: ignore[reportPrivateImportUsage]
        found.append(torch.stack(norms))
    widest = torch.float64 if torch.float64 in kinds else torch.float32
    largest = found[0].to(widest) if len(found) == 1 else torch.cat([of_kind.to(widest) for of_kind in found])
    order = [place for alike in kinds.values() for place in alike]
    places = [-1] * len(tensors)
    for at, place in enumerate(order):
        places[place] = at
    return Magnitudes((largest < torch.inf).all(), largest, tuple(places))
