"""`Processes`: reductions and ownership over the ranks of `torch.distributed`; with one process, nothing happens.

Statistics are sums, so that one flattened reduction makes them those of the joined batch. A decomposition is made by
one owner and sent to the others; owners are balanced by cubic cost.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Processes:
    """The ranks that train one model."""

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        self.group = group

    @property
    def count(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """Which one this is."""
        return dist.get_rank(self.group) if self.count > 1 else 0

    def add_up(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all ranks, in one flattened reduction (a precision is reduced as one)."""
        if self.count == 1 or not tensors:
            return list(tensors)
        found: list[Tensor] = list(tensors)
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            flat = torch.cat([tensors[i].reshape(-1) for i in places])
            dist.all_reduce(flat, group=self.group)
            for i, piece in zip(places, flat.split([tensors[i].numel() for i in places]), strict=True):
                found[i] = piece.view_as(tensors[i])
        return found

    def owners(self, costs: Sequence[float]) -> list[int]:
        """One rank for each piece of work: the dearest first, to whoever has least so far."""
        load = [0.0] * self.count
        owner = [0] * len(costs)
        for place in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            owner[place] = min(range(self.count), key=lambda rank: (load[rank], rank))
            load[owner[place]] += costs[place]
        return owner

    def share(self, pieces: Sequence[tuple[int, Tensor]]) -> None:
        """Send every tensor from its owner to all, in place; one message an owner and precision."""
        if self.count == 1:
            return
        for owner, dtype in sorted({(o, t.dtype) for o, t in pieces}, key=lambda pair: (pair[0], str(pair[1]))):
            mine = [t for o, t in pieces if o == owner and t.dtype == dtype]
            flat = torch.cat([t.reshape(-1) for t in mine])
            source = owner if self.group is None else dist.get_global_rank(self.group, owner)
            dist.broadcast(flat, source, group=self.group)
            for t, piece in zip(mine, flat.split([t.numel() for t in mine]), strict=True):
                t.copy_(piece.view_as(t))
