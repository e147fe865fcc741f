"""Whose turn it is to be refreshed: layers one by one on a CPU; on a GPU as few batches as keep the steps alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from layerwise.optim.rule import Shape


@dataclass(frozen=True)
class Turn:
    """Groups of a stack that are refreshed together, at every step that leaves this remainder."""

    groups: slice
    slot: int


def one_by_one(number: int, layers: Sequence[slice], every: int) -> list[Turn]:
    """A layer a step; stacks begin one after the other.

    >>> [turn.slot for turn in one_by_one(1, [slice(0, 1), slice(1, 2)], 2)]
    [1, 0]
    """
    return [Turn(groups, (number + place) % every) for place, groups in enumerate(layers)]


def balanced(stacks: Sequence[tuple[Sequence[slice], float]], every: int) -> list[list[Turn]]:
    """For stacks of layers with the cost of one group each: batches of about an equal share of the work, the dearest
    first to the slot that has least so far.

    >>> fast, slow = balanced([([slice(0, 1), slice(1, 2)], 1.0), ([slice(0, 1), slice(1, 2)], 8.0)], 3)
    >>> [(turn.groups, turn.slot) for turn in fast], [turn.slot for turn in slow]
    ([(slice(0, 2, None), 2)], [0, 1])
    """
    share = sum(cost * _count(groups) for layers, cost in stacks for groups in layers) / every
    batches = [
        (number, batch, cost) for number, (layers, cost) in enumerate(stacks) for batch in _cut(layers, cost, share)
    ]
    load, found = [0.0] * every, [list[Turn]() for _ in stacks]
    for number, batch, cost in sorted(batches, key=lambda b: -b[2] * _count(b[1])):
        slot = load.index(min(load))
        load[slot] += cost * _count(batch)
        found[number].append(Turn(batch, slot))
    return [sorted(turns, key=lambda turn: turn.groups.start) for turns in found]


def _cut(layers: Sequence[slice], cost: float, share: float) -> list[slice]:
    """Neighbours together, up to the share (a little more rather than a remainder of a few)."""
    total = sum(_count(groups) for groups in layers)
    pieces = max(1, min(len(layers), round(cost * total / share))) if share > 0 else 1
    bounds = [len(layers) * i // pieces for i in range(pieces + 1)]
    return [slice(layers[a].start, layers[b - 1].stop) for a, b in pairwise(bounds) if b > a]


def _count(groups: slice) -> int:
    return groups.stop - groups.start


def decomposition_cost(shape: Shape, left: bool, right: bool) -> float:
    """Of one group, up to a factor: cubic in the sides that have a factor."""
    return float(left * shape.outputs**3 + (right and not shape.one_hot) * shape.inputs**3) + 1.0
