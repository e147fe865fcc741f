"""Statistics of a batch: taken in by the step that has seen it, or layer by layer over the steps that follow.

The products of all layers' rows cost as much as most of a step. With labels drawn from the model one step in
`factor_every` has all of that to do. But a factor is only read when its layer is refreshed: where rows are kept for the
step (`rows`), they can be kept until then. Every refresh sees the same factors as it would otherwise, and steps are
alike; the price is the memory of the rows. Whatever else looks at factors (a checkpoint, a report) has all taken in
before.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.optim.cuda.rows import RowsOfStack
from layerwise.optim.cuda.stagger import Turn
from layerwise.optim.rule import Context, Health, Observation
from layerwise.optim.step.refresh_schedule import freshness
from layerwise.optim.step.stack import Stack

AWAITED, WRITTEN_OVER = "statistics", "rows written over"
"""Where a stack's memory has the shares that are not taken in yet; and that some could not be."""


@dataclass(frozen=True, eq=False)
class RowsShare:
    """Some layers of a stack, with their rows of a batch."""

    turn: Turn
    step: int
    """When it is due; earlier, if its layers are refreshed before."""
    seen: Observation
    decay: float
    gate: Tensor | None
    """Of the step that took the batch."""
    versions: tuple[int, ...]

    @classmethod
    def of(cls, turn: Turn, step: int, seen: Observation, decay: float, gate: Tensor | None) -> "RowsShare":
        """Its layers' part of what was seen."""
        part = replace(seen, inputs=_some(seen.inputs, turn.groups), outgrads=_some(seen.outgrads, turn.groups))
        part = replace(part, known=seen.known[turn.groups], recorded=[], groups=seen.groups[turn.groups])
        return cls(turn, step, part, decay, gate, _versions(part))

    def take_in(self, stack: Stack, health: Health) -> None:
        """As at the step of the batch. Not, and counted, if somebody has written over the rows since: those of such a
        stack no longer wait.
        """
        if _versions(self.seen) != self.versions:
            health.skipped_statistics += len(self.seen.known)
            stack.memory[WRITTEN_OVER] = True
            return
        state = {name: X[self.turn.groups] for name, X in stack.state.items()}
        present, health.gate = health.gate, self.gate
        try:
            stack.rule.observe(state, self.seen, self.decay, health)
        finally:
            health.gate = present


@dataclass(frozen=True)
class Statistics:
    """Over how many steps those of a batch are taken in; 1: at once, and nothing is kept."""

    over: int = 1

    @classmethod
    def of(cls, asked: int | None, every: int, by_itself: bool, alone: bool) -> "Statistics":
        """For batches at every so many steps; `by_itself` unless somebody asks. Not where others look at factors, or
        add to them, between refreshes: `alone` says that nobody does.
        """
        over = (every if by_itself else 1) if asked is None else asked
        return cls(min(over, every) if alone else 1)

    def take(self, stack: Stack, seen: Observation, context: Context, health: Health, whole: bool = True) -> None:
        """What a step has seen of a stack: in at once, or in shares that wait for their turns.

        At once where the stack is not `whole`: of layers that are not active the step takes its changes back.
        """
        decay = stack.group["factor_decay"]
        if self.over == 1 or not whole or not _can_wait(stack, seen):
            stack.rule.observe(stack.state, seen, decay, health)
            return
        gate = None if context.gate is None else context.gate.clone()  # a recorded step writes over it
        seen = replace(  # rows of a side that is too large for a factor are of no use to anybody
            seen,
            inputs=seen.inputs if "Q" in stack.state else None,
            outgrads=seen.outgrads if "P" in stack.state else None,
        )
        stack.memory[AWAITED] = [
            RowsShare.of(turn, context.step + turn.slot % self.over, seen, decay, gate)
            for turn in stack.memory["turns"]
        ]


def take_due(stack: Stack, step: int, refreshed: Callable[[int, int], bool], health: Health) -> None:
    """Shares whose turn it is, and those of layers that this step refreshes (`refreshed`, by step and slot)."""
    waiting: list[RowsShare] = stack.memory.get(AWAITED, [])
    for share in [share for share in waiting if share.step <= step or refreshed(step, share.turn.slot)]:
        waiting.remove(share)
        share.take_in(stack, health)


@torch.no_grad()
@in_own_arithmetic
def take_all_in(stack: Stack, health: Health) -> None:
    """Everything that waits: before a new batch, and before anybody but a refresh looks at factors."""
    for share in stack.memory.pop(AWAITED, []):
        share.take_in(stack, health)


def _can_wait(stack: Stack, seen: Observation) -> bool:
    """Whether all that was seen is rows, the rule reads factors at refreshes alone, and these have their turns."""
    rule, any_rows = stack.rule, seen.inputs is not None or seen.outgrads is not None
    only_rows = any_rows and seen.A is None and seen.G is None and seen.seen is None
    allows = "factors_wait" in vars(type(rule)) and rule.factors_wait(stack.state)
    return only_rows and allows and all(freshness(stack)) and WRITTEN_OVER not in stack.memory


def _some(rows: RowsOfStack | None, layers: slice) -> RowsOfStack | None:
    return None if rows is None else RowsOfStack(rows.layers[layers], rows.count)


def _versions(seen: Observation) -> tuple[int, ...]:
    """How often tensors have been written to, as far as torch knows."""
    return tuple(layer.x._version for rows in (seen.inputs, seen.outgrads) if rows for layer in rows.layers)
