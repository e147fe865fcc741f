"""Where the examples are in a layer's leading axes: found, not assumed.

A layer sees leading axes (batch, time, …) before its own. The examples may be on any of them, or merged with
positions into one (``x.flatten(0, 1)``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The axis that holds the examples, and whether positions are merged into it.

    `merged` is "major" for (N·T) with the example index running slowest, "minor" for (T·N) with it fastest.
    """

    axis: int = 0
    merged: Literal["major", "minor"] | None = None

    def fits(self, lead: tuple[int, ...], examples: int) -> bool:
        """Whether leading axes of these sizes can hold that many examples this way."""
        if self.axis >= len(lead) or examples == 0:
            return False
        size = lead[self.axis]
        return size == examples if self.merged is None else size % examples == 0 and size > examples

    def front(self, t: Tensor, lead: int, examples: int, offset: int = 0) -> Tensor:
        """Examples first: ``[*head, *lead, *rest] -> [*head, N, *positions, *rest]``, head of `offset` axes."""
        axis = offset + self.axis
        if self.merged == "major":
            t = t.unflatten(axis, (examples, -1))
        elif self.merged == "minor":
            t = t.unflatten(axis, (-1, examples))
            axis += 1
        return t.movedim(axis, offset)

    def narrow(self, t: Tensor, start: int, stop: int, examples: int, offset: int = 0) -> Tensor:
        """Some examples of a tensor, which keeps its layout."""
        axis = offset + self.axis
        if self.merged is None:
            return t.narrow(axis, start, stop - start)
        if self.merged == "major":
            size = t.shape[axis] // examples
            return t.narrow(axis, start * size, (stop - start) * size)
        rows = t.unflatten(axis, (-1, examples)).narrow(axis + 1, start, stop - start)
        return rows.flatten(axis, axis + 1)

    def join(self, parts: Sequence[Tensor], examples: Sequence[int], offset: int = 0) -> Tensor:
        """The inverse of `narrow`: several sets of examples as one."""
        if len(parts) == 1:
            return parts[0]
        axis = offset + self.axis
        if self.merged != "minor":
            return torch.cat(list(parts), dim=axis)
        apart = [t.unflatten(axis, (-1, n)) for t, n in zip(parts, examples, strict=True)]
        return torch.cat(apart, dim=axis + 1).flatten(axis, axis + 1)


def candidates(lead: tuple[int, ...], examples: int, first: int = 0) -> Iterator[Layout]:
    """Layouts that the sizes allow, likely ones first."""
    order = sorted(range(len(lead)), key=lambda axis: (axis != first, axis))
    for axis in order:
        if Layout(axis).fits(lead, examples):
            yield Layout(axis)
    for axis in order:
        for merged in ("major", "minor"):
            if Layout(axis, merged).fits(lead, examples):
                yield Layout(axis, merged)
