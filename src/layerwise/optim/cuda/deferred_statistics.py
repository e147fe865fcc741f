"""Deferred statistics: a batch's second moments are taken in, some layers at a time, over the steps that follow.

The products of all layers' rows cost as much as most of a step. With labels drawn from the model one step in
`factor_every` has all of that to do. But a factor is only read when its layer is refreshed: where rows are kept for the
step (`rows`), they can be kept until then. Every refresh sees the same factors as it would otherwise, and steps are
alike; the price is the memory of the rows. Whatever else looks at factors (a checkpoint, a report) has all taken in
before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.optim.backend import Factor
from layerwise.optim.cuda.device_step import DeviceStep
from layerwise.optim.cuda.rows import StackRows
from layerwise.optim.rule import Context, Observation, kept
from layerwise.optim.step.refresh_schedule import Turn, freshness, is_due
from layerwise.optim.step.stack import Stack

PENDING, OVERWRITTEN, MOST_GROUPS = "pending statistics", "rows overwritten", "groups taken in together"
"""Where a stack's memory has what is not taken in yet; that some could not be; and how many groups a part has."""
SHARES = 2
"""Into about so many parts the statistics of all stacks are divided. Each is some ten launches outside of graphs, half
a millisecond of the host's, however few its layers are; refreshes, which are replayed, are cut finer."""


@dataclass(frozen=True, eq=False)
class PendingRows:
    """Some layers of a stack, with their rows of a batch."""

    groups: slice
    slots: tuple[int, ...]
    """Of the turns in which its layers are refreshed."""
    step: int
    """When it is due; earlier, if its layers are refreshed before."""
    seen: Observation
    context: Context
    """Of the step that took the batch."""
    versions: tuple[int, ...]

    @classmethod
    def of(cls, groups: slice, slots: tuple[int, ...], step: int, seen: Observation, context: Context) -> "PendingRows":
        """Its layers' part of what was seen."""
        part = replace(seen, A=_some(seen.A, groups), G=_some(seen.G, groups))
        part = replace(part, known=seen.known[groups], recorded=[], groups=seen.groups[groups])
        return cls(groups, slots, step, part, context, _versions(part))

    def is_due(self, step: int, every: int) -> bool:
        """By the clock, or because some of its layers are refreshed."""
        return self.step <= step or any(is_due(step, slot, every) for slot in self.slots)

    def take_in(self, stack: Stack) -> None:
        """As at the step of the batch. Not, and counted, if somebody has written over the rows since: those of such a
        stack are no longer deferred.
        """
        if _versions(self.seen) != self.versions:
            self.context.health.skipped_statistics += len(self.seen.known)
            stack.memory[OVERWRITTEN] = True
            return
        state = {name: _narrowed(X, self.groups) for name, X in _factors(stack).items()}
        stack.rule.observe(state, self.seen, self.context)


@dataclass(frozen=True)
class DeferredStatistics:
    """Over how many steps those of a batch are taken in; 1: at once, and nothing is kept."""

    over: int = 1

    @classmethod
    def of(cls, asked: int | None, every: int, by_itself: bool, alone: bool) -> "DeferredStatistics":
        """For batches at every so many steps; `by_itself` unless somebody asks. Not where others look at factors, or
        add to them, between refreshes: `alone` says that nobody does.
        """
        over = (every if by_itself else 1) if asked is None else asked
        return cls(min(over, every) if alone else 1)

    def take(self, stack: Stack, seen: Observation, context: Context, whole: bool = True) -> None:
        """What a step has seen of a stack: in at once, or later, before its layers are refreshed or the next batch
        comes.

        At once where the stack is not `whole`: of layers that are not active the step takes its changes back.
        """
        seen = replace(seen, recorded=[])
        if self.over == 1 or not whole or not _deferrable(stack, seen):
            stack.rule.observe(stack.state, seen, context)
            return
        seen = replace(  # rows of a side that is too large for a factor are of no use to anybody
            seen, A=seen.A if "Q" in stack.state else None, G=seen.G if "P" in stack.state else None
        )
        now = of_the_batch(context)
        stack.memory[PENDING] = [
            PendingRows.of(groups, slots, context.step + min(slot % self.over for slot in slots), seen, now)
            for groups, slots in joined(stack.memory["turns"], stack.memory.get(MOST_GROUPS, 1))
        ]


def limit_parts(stacks: Sequence[Stack]) -> None:
    """Let each stack's memory know how many of its groups make one of the `SHARES` of all statistics."""
    costs = [stack.shape.outputs**2 + stack.shape.inputs**2 for stack in stacks]
    share = sum(cost * stack.groups for cost, stack in zip(costs, stacks, strict=True)) / SHARES
    for cost, stack in zip(costs, stacks, strict=True):
        stack.memory[MOST_GROUPS] = max(1, int(share / cost))


def joined(turns: Sequence[Turn], most: int) -> list[tuple[slice, tuple[int, ...]]]:
    """Turns of neighbours together, as evenly as it goes, up to so many groups, or those of one turn: their groups, and
    all of their slots.

    >>> turns = [Turn(slice(0, 2), 5), Turn(slice(2, 4), 3), Turn(slice(4, 6), 1)]
    >>> joined(turns, 4), joined(turns, 1) == joined(turns, 2)
    ([(slice(0, 2, None), (5,)), (slice(2, 6, None), (3, 1))], True)
    """
    turns = sorted(turns, key=lambda turn: turn.groups.start)
    count = turns[-1].groups.stop - turns[0].groups.start
    parts = min(len(turns), -(-count // most))
    bounds = [len(turns) * place // parts for place in range(parts + 1)]
    runs = [turns[start:stop] for start, stop in pairwise(bounds)]
    return [(slice(run[0].groups.start, run[-1].groups.stop), tuple(turn.slot for turn in run)) for run in runs]


def of_the_batch(context: Context) -> Context:
    """What is remembered of the step that took a batch; whether it was taken is copied, since a captured step writes
    over that."""
    step = context.device_step
    kept_step = None if step is None else DeviceStep(step.all_finite.clone())
    return replace(context, device_step=kept_step, gradient=None, memory={}, options=dict(context.options))


def take_due(stack: Stack, step: int, every: int) -> None:
    """What is due at a step, and what belongs to layers that it refreshes."""
    pending: list[PendingRows] | None = stack.memory.get(PENDING)
    if not pending:
        return
    for one in [one for one in pending if one.is_due(step, every)]:
        pending.remove(one)
        one.take_in(stack)


@torch.no_grad()
@in_own_arithmetic
def take_all(stack: Stack) -> None:
    """Everything that is pending: before a new batch, and before anybody but a refresh looks at factors."""
    for one in stack.memory.pop(PENDING, []):
        one.take_in(stack)


def _factors(stack: Stack) -> dict:
    return {name: X for name, X in stack.state.items() if name in ("P", "Q")}


def _narrowed(X: Any, groups: slice) -> Any:
    """Some groups of a factor; itself where these are all, since a view of each of its tensors costs the host time."""
    if isinstance(X, Factor) and len(X.count) == groups.stop - groups.start:
        return X
    return X[groups] if isinstance(X, Tensor) else X.narrow(groups)


def _deferrable(stack: Stack, seen: Observation) -> bool:
    """Whether all that was seen is rows, the rule reads factors at refreshes alone, and these have their turns."""
    moments = [X for X in (seen.A, seen.G) if X is not None]
    only_rows = len(moments) > 0 and seen.seen is None and all(isinstance(X, StackRows) for X in moments)
    reads = any(getattr(entry, "reads_factors", False) for entry in kept(stack.state))
    allows = stack.requires.deferrable and not reads
    return only_rows and allows and all(freshness(stack)) and OVERWRITTEN not in stack.memory


def _some(rows: StackRows | None, layers: slice) -> StackRows | None:
    return None if rows is None else StackRows(rows.layers[layers], rows.count)


def _versions(seen: Observation) -> tuple[int, ...]:
    """How often tensors have been written to, as far as torch knows."""
    return tuple(layer.x._version for rows in (seen.A, seen.G) if rows is not None for layer in rows.layers)
