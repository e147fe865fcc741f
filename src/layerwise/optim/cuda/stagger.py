"""Staggered refreshes: when each part of a stack is refreshed, in as few batches as keep the steps alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add

from layerwise.optim.rule import Shape
from layerwise.optim.step.refresh_schedule import Turn

MORE_ROUNDS = 1.5
"""That factors which are hard to follow may take in addition, by what three rounds cost; see `inverse`."""
ALLOWED, ALLOWED_MORE = 0.2, 0.4
"""Shares that a step may have beyond its own; and where factors are hard to follow. A refresh is about a third of a
step, and the slowest step is to be within 1.2 of others."""
FINE, CUT_FINER, TRIED = (1, 1.5, 2, 4), 6, 10
"""Batches a share to begin with; then so many of the dearest stacks are cut as it suits best, in so many ways."""
CHANGES, SEARCHED = 12, 5000
"""In all; and batches times steps of a round up to which that takes less than a second."""
PRICE, LAUNCHES = 0.02, 5e9
"""Of a batch: in shares, for products that fill a GPU less well; and in work (`decomposition_cost`), for launches."""
NARROW = 1500
"""Rows up to which a matrix costs a GPU more by its memory and launches than by its products."""


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
    of one kind. So each kind is spread over the steps as well: into as many batches as keep the fullest step from much
    more than others have, should any one of the stacks cost what it may. A batch has a price: `launches`, and a little.

    >>> layers = [slice(0, 1), slice(1, 2)]
    >>> fast, slow = balanced([Work(layers, 1.0), Work(layers, 8.0)], 3)
    >>> [(turn.groups, turn.slot) for turn in fast], [turn.slot for turn in slow]
    ([(slice(0, 2, None), 0)], [2, 1])
    """
    share = sum(stack.total for stack in stacks) / every
    price = PRICE * share + launches
    if share * every < launches:  # nothing is gained by a further batch
        return _Placed.of(stacks, (1,) * len(stacks), every, price).turns
    starts = {tuple(_pieces(stack, share / fine) for stack in stacks) for fine in FINE}
    found = [_Placed.of(stacks, pieces, every, price) for pieces in sorted(starts)]
    if max(every * sum(placed.pieces) for placed in found) <= SEARCHED:
        found = [_improved(placed, stacks, every, price) for placed in found]
    return min(found, key=lambda placed: placed.excess).turns


def _improved(best: "_Placed", stacks: Sequence[Work], every: int, price: float) -> "_Placed":
    """With other numbers of pieces, one after the other, as long as that helps."""
    dearest = sorted(range(len(stacks)), key=lambda number: -stacks[number].total)[:CUT_FINER]
    for _ in range(CHANGES):
        tried = (
            _Placed.of(stacks, (*best.pieces[:number], count, *best.pieces[number + 1 :]), every, price)
            for number in dearest
            for count in _counts(min(len(stacks[number].layers), every))
        )
        found = min(tried, key=lambda placed: placed.excess, default=best)
        if found.excess >= best.excess:
            break
        best = found
    return best


@dataclass
class _Placed:
    """Stacks cut into so many pieces each, the dearest piece first to the slot that has least so far; the last slot
    first, since the first one is often that of a step with statistics."""

    pieces: tuple[int, ...]
    turns: list[list[Turn]]
    excess: float
    """Work of the fullest step beyond what is allowed, summed over who may cost more; and the price of all batches."""

    @classmethod
    def of(cls, stacks: Sequence[Work], pieces: tuple[int, ...], every: int, price: float) -> "_Placed":
        batches = [
            (number, batch)
            for number, (stack, count) in enumerate(zip(stacks, pieces, strict=True))
            for batch in _cut(stack.layers, count)
        ]
        load, more, turns = [0.0] * every, [[0.0] * every for _ in stacks], [list[Turn]() for _ in stacks]
        for number, batch in sorted(batches, key=lambda b: -stacks[b[0]].cost * _count(b[1])):
            extra = more[number]
            slot = min(reversed(range(every)), key=lambda slot: load[slot] + extra[slot])
            load[slot] += stacks[number].cost * _count(batch)
            extra[slot] += stacks[number].more * _count(batch)
            turns[number].append(Turn(batch, slot))
        share = sum(load) / every
        beyond = [max(load) - (1 + ALLOWED) * share] + [
            max(map(add, load, extra)) - sum(extra) / every - (1 + ALLOWED_MORE) * share for extra in more
        ]
        in_order = [sorted(found, key=lambda turn: turn.groups.start) for found in turns]
        return cls(pieces, in_order, sum(max(0.0, x) for x in beyond) + len(batches) * price)


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
    """Of one group, up to a factor: cubic in the sides that have a factor, at least where these are wide."""
    sides = [left * shape.outputs, (right and not shape.one_hot) * shape.inputs]
    return float(sum(n * n * (n + NARROW) for n in sides)) + 1.0
