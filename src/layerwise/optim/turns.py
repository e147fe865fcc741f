"""Whose turn it is to be refreshed: layers one by one on a CPU; on a GPU as few batches as keep the steps alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add

from layerwise.optim.rule import Shape

MORE_ROUNDS = 2.0
"""That factors which are hard to follow may take in addition; see `layerwise.optim.refined`."""
CUT_FINER, TRIED = 8, 12
"""So many of the dearest stacks are cut as it suits best, into so many numbers of batches at most."""
PRICE, LAUNCHES = 0.02, 1e9
"""Of a batch: in shares, for products that fill a GPU less well; and in work (cubic, see below), for its launches."""


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


@dataclass(frozen=True)
class Work:
    """A stack's layers, and what the refresh of one of their groups costs."""

    layers: Sequence[slice]
    cost: float
    more: float = 0.0
    """What it may cost in addition, if the factors of this stack are hard to follow."""

    @property
    def total(self) -> float:
        """Of all layers."""
        return self.cost * sum(map(_count, self.layers))


def balanced(stacks: Sequence[Work], every: int, launches: float = 0.0) -> list[list[Turn]]:
    """Batches of neighbours that give every step about an equal share.

    What a stack will cost is not known: factors that are hard to follow take several rounds, mostly those of all layers
    of one kind. So each kind is spread over the steps as well: into as many batches as make the fullest steps least
    full, should any one of the stacks cost what it may. A batch has a price: `launches`, and a little.

    >>> layers = [slice(0, 1), slice(1, 2)]
    >>> fast, slow = balanced([Work(layers, 1.0), Work(layers, 8.0)], 3)
    >>> [(turn.groups, turn.slot) for turn in fast], [turn.slot for turn in slow]
    ([(slice(0, 2, None), 2)], [0, 1])
    """
    share = sum(stack.total for stack in stacks) / every
    price = PRICE * share + launches
    starts = [[_pieces(stack, share / fine) for stack in stacks] for fine in (1, 2, 4)]
    best = min((_Placed.of(stacks, pieces, every, price) for pieces in starts), key=lambda placed: placed.excess)
    dearest = sorted(range(len(stacks)), key=lambda number: -stacks[number].total)[:CUT_FINER]
    while True:
        tried = (
            _Placed.of(stacks, [*best.pieces[:number], count, *best.pieces[number + 1 :]], every, price)
            for number in dearest
            for count in _counts(min(len(stacks[number].layers), every))
        )
        found = min(tried, key=lambda placed: placed.excess, default=best)
        if found.excess >= best.excess:
            return best.turns
        best = found


@dataclass
class _Placed:
    """Stacks cut into so many pieces each, the dearest piece first to the slot that has least so far."""

    pieces: list[int]
    turns: list[list[Turn]]
    excess: float
    """Work of the fullest step beyond an equal share, the root of its squares over who may cost more; and the price of
    all batches."""

    @classmethod
    def of(cls, stacks: Sequence[Work], pieces: list[int], every: int, price: float) -> "_Placed":
        batches = [
            (number, batch)
            for number, (stack, count) in enumerate(zip(stacks, pieces, strict=True))
            for batch in _cut(stack.layers, count)
        ]
        load, more, turns = [0.0] * every, [[0.0] * every for _ in stacks], [list[Turn]() for _ in stacks]
        for number, batch in sorted(batches, key=lambda b: -stacks[b[0]].cost * _count(b[1])):
            extra = more[number]
            slot = min(range(every), key=lambda slot: load[slot] + extra[slot])
            load[slot] += stacks[number].cost * _count(batch)
            extra[slot] += stacks[number].more * _count(batch)
            turns[number].append(Turn(batch, slot))
        beyond = [max(map(add, load, extra)) - (sum(load) + sum(extra)) / every for extra in [[0.0] * every, *more]]
        in_order = [sorted(found, key=lambda turn: turn.groups.start) for found in turns]
        return cls(pieces, in_order, math.hypot(*beyond) + len(batches) * price)


def _counts(most: int) -> range:
    return range(1, most + 1, math.ceil(most / TRIED))


def _pieces(stack: Work, size: float) -> int:
    """Of about a size (a little more rather than a remainder of a few)."""
    return max(1, min(len(stack.layers), round(stack.total / size))) if size > 0 else 1


def _cut(layers: Sequence[slice], pieces: int) -> list[slice]:
    """Neighbours together."""
    bounds = [len(layers) * i // pieces for i in range(pieces + 1)]
    return [slice(layers[a].start, layers[b - 1].stop) for a, b in pairwise(bounds) if b > a]


def _count(groups: slice) -> int:
    return groups.stop - groups.start


def decomposition_cost(shape: Shape, left: bool, right: bool) -> float:
    """Of one group, up to a factor: cubic in the sides that have a factor."""
    return float(left * shape.outputs**3 + (right and not shape.one_hot) * shape.inputs**3) + 1.0
