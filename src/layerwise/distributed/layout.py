"""`Layout`: which part of a tensor each rank holds.

A rank holds a box, one range of each axis: `fully_shard` cuts axis 0 into as many pieces as there are ranks, the last
ones shorter or empty. With a 2-D mesh (HSDP) there are several copies of a tensor, each cut over some of the ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from layerwise.foundations.errors import UnsupportedError, describe
from layerwise.foundations.sharded import is_sharded

Box = tuple[tuple[int, int], ...]
"""First and last entry of each axis."""


@dataclass(frozen=True)
class Layout:
    """Of one tensor over the ranks of a group."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """What each rank holds."""
    replica: tuple[int, ...]
    """To which copy of the tensor each rank's part belongs; the parts of one copy are disjoint and cover it."""

    @classmethod
    def whole(cls, shape: Sequence[int], ranks: int) -> "Layout":
        """Of a tensor that every rank has for itself."""
        box = tuple((0, size) for size in shape)
        return cls(tuple(shape), (box,) * ranks, tuple(range(ranks)))

    @classmethod
    def cut(cls, shape: Sequence[int], axes: Sequence[tuple[int | None, int]]) -> "Layout":
        """Of a mesh with so many ranks along each axis, and the tensor's axis that is cut there (None: copies).

        >>> Layout.cut((5, 2), [(None, 2), (0, 2)]).boxes[1], Layout.cut((5, 2), [(None, 2), (0, 2)]).replica
        (((3, 5), (0, 2)), (0, 0, 1, 1))
        """
        found: list[tuple[Box, int]] = [(tuple((0, size) for size in shape), 0)]
        for axis, count in axes:
            found = [
                (box, copy * count + place) if axis is None else (_piece(box, axis, place, count), copy)
                for box, copy in found
                for place in range(count)
            ]
        return cls(tuple(shape), tuple(box for box, _ in found), tuple(copy for _, copy in found))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Entries that each rank holds."""
        return tuple(math.prod(stop - start for start, stop in box) for box in self.boxes)

    @property
    def copies(self) -> int:
        """How many there are of the whole tensor."""
        return max(self.replica) + 1

    def peers(self, rank: int) -> list[int]:
        """The ranks that hold the same copy as this one, those with empty parts left out."""
        mine = self.replica[rank]
        return [
            r for r, (copy, count) in enumerate(zip(self.replica, self.counts, strict=True)) if copy == mine and count
        ]

    def shape_at(self, rank: int) -> tuple[int, ...]:
        """Of the part that a rank holds."""
        return tuple(stop - start for start, stop in self.boxes[rank])

    def part(self, t: Tensor, rank: int) -> Tensor:
        """That part of a whole tensor, a view."""
        return t[tuple(slice(*ends) for ends in self.boxes[rank])] if self.boxes[rank] else t


def _piece(box: Box, axis: int, place: int, count: int) -> Box:
    """As `torch.chunk` cuts: pieces of ⌈n/count⌉ entries, the last ones shorter or empty."""
    start, stop = box[axis]
    each = -(-(stop - start) // count)
    ends = min(start + place * each, stop), min(start + (place + 1) * each, stop)
    return (*box[:axis], ends, *box[axis + 1 :])


def layout_of(name: str, p: Tensor, ranks: Sequence[int]) -> Layout:
    """Of a parameter, over these ranks (by their global numbers)."""
    if not is_sharded(p):
        return Layout.whole(p.shape, len(ranks))
    held: Any = p
    axes = list[tuple[int | None, int]]()
    for place, placement in enumerate(held.placements):
        kind = type(placement).__name__
        if kind not in ("Shard", "Replicate"):
            raise UnsupportedError(
                describe(
                    f"parameter {name!r} with placement {placement}",
                    "Shard or Replicate along every axis of the mesh",
                    "apply fully_shard alone, or with tensor parallelism that cuts another axis of the weight "
                    "(RowwiseParallel), or shard this module over one mesh axis",
                )
            )
        axes.append((placement.dim if kind == "Shard" else None, held.device_mesh.size(place)))
    by_mesh = Layout.cut(tuple(p.shape), axes)
    places = {rank: place for place, rank in enumerate(held.device_mesh.mesh.flatten().tolist())}
    if set(places) != set(ranks):
        raise UnsupportedError(
            describe(
                f"parameter {name!r} on a mesh of ranks {sorted(places)}",
                f"one mesh for all sharded parameters, as the first has it: ranks {sorted(ranks)}",
                "shard the whole model over one mesh, or give the parameters of each mesh an optimizer of their own",
            )
        )
    order = [places[rank] for rank in ranks]
    return Layout(by_mesh.shape, tuple(by_mesh.boxes[i] for i in order), tuple(by_mesh.replica[i] for i in order))
