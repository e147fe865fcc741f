"""`Layout`: which part of a tensor each rank holds.

A rank holds a box, one range of each axis: `fully_shard` cuts axis 0 into as many pieces as there are ranks, the last
ones shorter or empty. With a 2-D mesh (HSDP) there are several copies of a tensor, each cut over some of the ranks.
"""

import itertools
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
class MeshAxis:
    """What an axis of a mesh means for a tensor."""

    ranks: int
    cuts: int | None = None
    """The tensor's axis that is cut along it; None: each rank has a copy."""
    last: bool = False
    """Whether it cuts pieces that other axes have cut before."""


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
    def cut(cls, shape: Sequence[int], axes: Sequence["MeshAxis"]) -> "Layout":
        """Over a mesh with these axes, its ranks in the mesh's own order.

        >>> layout = Layout.cut((5, 2), [MeshAxis(2), MeshAxis(2, cuts=0)])
        >>> layout.boxes[1], layout.replica
        (((3, 5), (0, 2)), (0, 0, 1, 1))
        """
        boxes, copies = list[Box](), list[int]()
        order = sorted(range(len(axes)), key=lambda i: axes[i].last)
        for places in itertools.product(*(range(axis.ranks) for axis in axes)):
            box: Box = tuple((0, size) for size in shape)
            copy = 0
            for i in order:
                axis = axes[i]
                if axis.cuts is None:
                    copy = copy * axis.ranks + places[i]
                else:
                    box = _piece(box, axis.cuts, places[i], axis.ranks)
            boxes.append(box)
            copies.append(copy)
        return cls(tuple(shape), tuple(boxes), tuple(copies))

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


def layout_of(name: str, p: Tensor, ranks: Sequence[int], mesh: Any = None) -> Layout:
    """Of a parameter, over these ranks (by their global numbers), which are those of `mesh`.

    A parameter on some axes of the mesh alone, such as a norm's beside tensor parallelism, has copies along the others.
    """
    if not is_sharded(p):
        return Layout.whole(p.shape, len(ranks))
    held: Any = p
    mesh = held.device_mesh if mesh is None else mesh
    own = held.device_mesh.mesh_dim_names or ()
    if held.device_mesh == mesh:
        placements = list(held.placements)
    elif own and set(own) <= set(mesh.mesh_dim_names or ()):
        of_axis = dict(zip(own, held.placements, strict=True))
        placements = [of_axis.get(axis) for axis in mesh.mesh_dim_names]
    else:
        raise UnsupportedError(
            describe(
                f"parameter {name!r} on {held.device_mesh}",
                f"one mesh for all sharded parameters, {mesh}, or axes of it that have names",
                "shard the whole model over one mesh made by init_device_mesh(..., mesh_dim_names=...), or give the "
                "parameters of each mesh an optimizer of their own",
            )
        )
    axes = [_mesh_axis(name, placement, mesh.size(place)) for place, placement in enumerate(placements)]
    by_mesh = Layout.cut(tuple(p.shape), axes)
    places = {rank: place for place, rank in enumerate(mesh.mesh.flatten().tolist())}
    order = [places[rank] for rank in ranks]
    return Layout(by_mesh.shape, tuple(by_mesh.boxes[i] for i in order), tuple(by_mesh.replica[i] for i in order))


def _mesh_axis(name: str, placement: Any, ranks: int) -> MeshAxis:
    kind = "Replicate" if placement is None else type(placement).__name__
    if kind == "Replicate":
        return MeshAxis(ranks)
    if placement is not None and kind in (
        "Shard",
        "_StridedShard",
    ):  # FSDP over tensor parallelism cuts what that has cut
        return MeshAxis(ranks, placement.dim, last=kind == "_StridedShard")
    raise UnsupportedError(
        describe(
            f"parameter {name!r} with placement {placement}",
            "Shard or Replicate along every axis of the mesh",
            "reduce it, or shard the module by fully_shard or parallelize_module",
        )
    )
