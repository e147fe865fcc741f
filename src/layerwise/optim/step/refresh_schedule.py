"""When decompositions are renewed, layer by layer, and by which of several processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from layerwise.distributed.processes import Processes
from layerwise.optim.rule import Context
from layerwise.optim.step.stack import Stack


@dataclass(frozen=True)
class Turn:
    """Groups of a stack that are refreshed together, at every step that leaves this remainder."""

    groups: slice
    slot: int


def is_due(step: int, slot: int, every: int) -> bool:
    """Whether a step renews what has this slot: all at the first steps' doublings (1, 2, 4, …), then each in turn."""
    return (step < every and step & (step - 1) == 0) or (step - 1 - slot) % every == 0


def one_by_one(number: int, layers: Sequence[slice], every: int) -> list[Turn]:
    """A layer a step; stacks begin one after the other.

    >>> [turn.slot for turn in one_by_one(1, [slice(0, 1), slice(1, 2)], 2)]
    [1, 0]
    """
    return [Turn(groups, (number + place) % every) for place, groups in enumerate(layers)]


def give_turns(stacks: Sequence[Stack], every: int) -> None:
    """A stack without decompositions takes no turn from others: a parameter added later changes nobody's."""
    before = [0, *accumulate(not stack.fallback for stack in stacks)]
    for number, stack in zip(before, stacks, strict=False):
        stack.memory["turns"] = one_by_one(number, [groups for _, groups in stack.layers], every)


def freshness(stack: Stack) -> list[bool]:
    """Which groups were refreshed since they began; the host keeps a copy, so as not to ask the device."""
    if "fresh" not in stack.state:
        stack.state["fresh"] = torch.zeros(stack.groups, device=stack.shape.device)
    if "fresh" not in stack.memory:
        stack.memory["fresh"] = [bool(on) for on in stack.state["fresh"].tolist()]
    return stack.memory["fresh"]


@dataclass
class RefreshSchedule:
    """Of one optimizer's stacks; groups that are not fresh are refreshed as soon as they have statistics."""

    every: int
    processes: Processes | None = None
    """Those that train together, if there are several: each decomposition is made by one of them."""

    def run(self, stack: Stack, context: Context, active: Sequence[bool]) -> None:
        """Renew what is due at this step. Not what the step will take back, groups that are not active, unless other
        processes may see them otherwise."""
        step, every, fresh = context.step, self.every, freshness(stack)
        due, regular = list[slice](), list[bool]()
        for turn in stack.memory["turns"]:
            groups, slot = turn.groups, turn.slot
            if self.processes is None and not any(active[groups]):
                continue
            on = is_due(step, slot, every)
            if on or False in fresh[groups]:
                due.append(groups)
                regular.append(on)
        if not due:
            return
        owners, rank = [0] * len(due), 0
        if self.processes is not None:
            owners = self.processes.owners([float(groups.stop - groups.start) for groups in due])
            rank = self.processes.rank
        for groups, in_turn, owner in zip(due, regular, owners, strict=True):
            for part in [groups] if False not in fresh[groups] else self._ready_parts(stack, groups):
                if not in_turn and part != groups and all(fresh[part]):
                    continue  # only its neighbours are new
                if owner == rank:
                    stack.rule.refresh(stack.state, part, context)
                if False in fresh[part]:
                    stack.state["fresh"][part] = 1
                    fresh[part] = [True] * (part.stop - part.start)
        if self.processes is not None:
            pairs = zip(due, owners, strict=True)
            self.processes.share([(owner, X) for groups, owner in pairs for X in stack.renewed(groups)])

    @staticmethod
    def _ready_parts(stack: Stack, groups: slice) -> list[slice]:
        """Of groups that were never refreshed those that have something to decompose, or all together: an expert
        without tokens stops no other."""
        ready = []
        known = [factor.trace(groups) > 0 for factor in stack.factors]
        if all(bool(on.all()) for on in known):
            return [groups]
        for place, k in enumerate(range(groups.start, groups.stop)):
            if all(bool(on[place]) for on in known):
                ready.append(slice(k, k + 1))
        return ready if groups.stop - groups.start > 1 else []
