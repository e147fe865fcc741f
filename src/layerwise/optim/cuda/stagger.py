"""Staggered refreshes: when each part of a stack is refreshed, in as few batches as keep the steps alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from layerwise.optim.rule import Shape
from layerwise.optim.step.refresh_schedule import Turn

FINE = (0.5, 1, 1.5, 2, 3, 4)
"""Numbers of batches for each step that are tried."""
LAUNCHES = 4e11
"""What a batch costs in addition, however few its matrices are, as work (`decomposition_cost`): the leaves of an
inverse come one after the other, 70 µs each on an H200 and about as much for the small products between them, so that
12 matrices of 3072 rows take little longer than 4."""
SWEEPS_LAUNCHES = 2e10
"""The same of the sweeps of a basis: some sixty launches, ten of them large products."""
NARROW = 1500
"""Rows up to which a matrix costs a GPU more by its memory and launches than by its products."""


@dataclass(frozen=True)
class Work:
    """A stack's layers, and what the refresh of one of their groups costs."""

    layers: Sequence[slice]
    cost: float

    @property
    def total(self) -> float:
        """Of all layers."""
        return self.cost * sum(map(_count, self.layers))


def balanced(stacks: Sequence[Work], every: int, launches: float = 0.0) -> list[list[Turn]]:
    """Batches of neighbours that give every step about an equal share; each costs `launches` besides.

    Of some cuts into batches the one whose fullest step is least full. Batches go, the dearest first, to the step that
    has least so far; the last step first, since the first one is often that of statistics.

    >>> layers = [slice(0, 1), slice(1, 2)]
    >>> fast, slow = balanced([Work(layers, 1.0), Work(layers, 8.0)], 3)
    >>> [(turn.groups, turn.slot) for turn in fast], [turn.slot for turn in slow]
    ([(slice(0, 2, None), 0)], [2, 1])
    """
    share = sum(stack.total for stack in stacks) / every
    tried = [_placed(stacks, every, max(share / fine, launches), launches) for fine in FINE]
    return min(tried, key=lambda placed: placed[0])[1]


def _placed(
    stacks: Sequence[Work], every: int, size: float, launches: float
) -> tuple[tuple[float, int], list[list[Turn]]]:
    """Turns of batches of about a size; and the fullest step with the number of batches, which are to be small."""
    batches = [(number, batch) for number, stack in enumerate(stacks) for batch in _cut(stack, size)]
    load, turns = [0.0] * every, [list[Turn]() for _ in stacks]
    for number, batch in sorted(batches, key=lambda b: -stacks[b[0]].cost * _count(b[1])):
        slot = min(reversed(range(every)), key=load.__getitem__)
        load[slot] += stacks[number].cost * _count(batch) + launches
        turns[number].append(Turn(batch, slot))
    in_order = [sorted(found, key=lambda turn: turn.groups.start) for found in turns]
    return (max(load), len(batches)), in_order


def _cut(stack: Work, size: float) -> list[slice]:
    """Neighbours together, in pieces of about a size (a little more rather than a remainder of a few)."""
    layers = stack.layers
    pieces = max(1, min(len(layers), round(stack.total / size))) if size > 0 else 1
    bounds = [len(layers) * i // pieces for i in range(pieces + 1)]
    return [slice(layers[a].start, layers[b - 1].stop) for a, b in pairwise(bounds) if b > a]


def _count(groups: slice) -> int:
    return groups.stop - groups.start


def decomposition_cost(shape: Shape, left: bool, right: bool) -> float:
    """Of one group, up to a factor: cubic in the sides that have a factor, at least where these are wide."""
    sides = [left * shape.outputs, (right and not shape.one_hot) * shape.inputs]
    return float(sum(n * n * (n + NARROW) for n in sides)) + 1.0
