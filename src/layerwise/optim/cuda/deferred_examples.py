"""Deferred examples: a batch's examples are looked at over the steps after it, so that no step is slow.

EKFAC's scalings are second moments of per-example gradients in the present basis. Those of all layers at once cost
several steps' work. On a GPU layers are looked at in turn instead, each right after its basis has been refreshed if
statistics are taken as often as that, and their inputs and output gradients are kept until then. Between the batch and
its turn a layer has the scalings of before, or those that its refresh has begun anew. For what is saved in between, see
`pending_checkpoint`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from layerwise.optim.cuda.deferred_statistics import of_the_batch
from layerwise.optim.rule import Context, Observation, Requirements
from layerwise.optim.step.stack import Stack

PENDING = "pending examples"
"""Where a stack's memory has what is not looked at yet."""
LATE = 100
"""Steps after which examples of layers that are no longer trained are let go."""


class Pending(Protocol):
    """Some layers of a stack, until their turn."""

    groups: slice
    step: int
    """When it is due."""

    def look(self, stack: Stack) -> None:
        """Give the layers their scalings."""


@dataclass
class PendingExamples:
    """Some layers of a stack, with their examples."""

    groups: slice
    step: int
    """When it is due."""
    seen: Observation
    context: Context
    """Of the step that took the batch."""
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = self._versions()

    def look(self, stack: Stack) -> None:
        """In the present basis, whenever the batch was; not, if somebody has written over its tensors since."""
        if self.intact:
            stack.rule.observe(narrowed(stack, self.groups), self.seen, self.context)

    @property
    def intact(self) -> bool:
        """Whether nobody has written over its tensors, as far as torch knows."""
        return self._versions() == self.versions

    def _versions(self) -> list[int]:
        """How often inputs and output gradients have been written to."""
        calls = [call for layer in self.seen.recorded for recorded in layer for call in recorded.io.calls]
        return [X._version for call in calls for X in (call.x, call.dy) if X is not None]


def narrowed(stack: Stack, groups: slice) -> dict:
    """Some groups of the state that examples change or are seen in, over the same memory."""
    own = {name: entry for name, entry in stack.state.items() if name in ("basis", "s")}
    return {name: X[groups] if isinstance(X, Tensor) else X.narrow(groups) for name, X in own.items()}


@dataclass(frozen=True)
class DeferredExamples:
    """Over how many steps; 1: a step looks at its own batch, and nothing is kept."""

    over: int = 1

    @classmethod
    def of(cls, requires: Requirements, every: int, by_itself: bool, processes: int) -> "DeferredExamples":
        """For statistics taken at every so many steps; `by_itself` unless the rule says otherwise.

        Not with several processes, which add their squares up: one that saves its state would wait for the others.
        """
        if not requires.examples or processes > 1:
            return cls()
        over = requires.examples_over
        over = (every if by_itself else 1) if over is None else over
        return cls(min(over, every))

    @torch.no_grad()
    def run(
        self, stack: Stack, seen: Observation | None, context: Context, active: Sequence[bool]
    ) -> Observation | None:
        """Look at examples whose turn it is, after those of a new batch have got theirs; returns what the step is to
        look at itself.

        Layers that are not active keep their state at this step, so that theirs wait for another, `LATE` at most.
        """
        if seen is not None:
            finish(stack)
        if seen is not None and self.over > 1:
            stack.memory[PENDING] = self._pending(stack, seen, context)
            seen = None
        pending: list[Pending] = stack.memory.get(PENDING, [])
        if pending:
            due = [one.step <= context.step and all(active[one.groups]) for one in pending]
            stack.memory[PENDING] = [
                one for one, now in zip(pending, due, strict=True) if not now and context.step < one.step + LATE
            ]
            for one, now in zip(pending, due, strict=True):
                if now:
                    one.look(stack)
        return seen

    def _pending(self, stack: Stack, seen: Observation, context: Context) -> list[PendingExamples]:
        """Layers that are refreshed together, so many steps after the batch as their turn says."""
        now = of_the_batch(context)
        return [
            PendingExamples(turn.groups, context.step + turn.slot % self.over, some(seen, turn.groups), now)
            for turn in stack.memory["turns"]
        ]


def some(seen: Observation, groups: slice) -> Observation:
    """What was seen of some layers: their examples alone."""
    starts = [sum(seen.groups[:place]) for place in range(len(seen.groups))]
    layers = [place for place, start in enumerate(starts) if groups.start <= start < groups.stop]
    return Observation(
        seen=None if seen.seen is None else seen.seen[groups],
        recorded=[seen.recorded[place] for place in layers],
        groups=[seen.groups[place] for place in layers],
        known=seen.known[groups],
        examples=seen.examples,
        add_up=seen.add_up,
    )


@torch.no_grad()
def finish(stack: Stack) -> None:
    """Look at all that are pending: before a new batch."""
    for one in stack.memory.pop(PENDING, []):
        one.look(stack)
