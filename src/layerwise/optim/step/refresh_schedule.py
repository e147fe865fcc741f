"""When and how decompositions are renewed: whose turn it is, who owns it, and how it is run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from layerwise.distributed.processes import Processes
from layerwise.optim.cuda.graphs import Graphs
from layerwise.optim.cuda.stagger import LAUNCHES, MORE_ROUNDS, Work, balanced, decomposition_cost, one_by_one
from layerwise.optim.rule import Context, Health
from layerwise.optim.step.damping import Damping
from layerwise.optim.step.stack import Stack


@dataclass
class Refreshes:
    """Of one optimizer's stacks."""

    every: int
    damping: Damping
    processes: Processes
    health: Health
    graphs: Graphs = field(default_factory=Graphs)

    def give_turns(self, stacks: Sequence[Stack], waits: bool, labels: bool = False) -> None:
        """When each part of a stack is refreshed; where nobody waits for the device, in few batches of equal work.

        With `labels` of the model's own, factors of output gradients may be hard to follow (`refined`).
        """
        layers = [[groups for _, groups in stack.slices()] for stack in stacks]
        if waits:
            # A stack without decompositions takes no turn from others: a parameter added later changes nobody's.
            before = [0, *accumulate(not stack.fallback for stack in stacks)]
            turns = [one_by_one(number, of_stack, self.every) for number, of_stack in zip(before, layers, strict=False)]
        else:
            sides = [stack.rule.sides(stack.shape) for stack in stacks]
            works = [
                Work(
                    of_stack,
                    decomposition_cost(stack.shape, *has),
                    MORE_ROUNDS * decomposition_cost(stack.shape, has[0], False) if labels else 0.0,
                )
                for stack, of_stack, has in zip(stacks, layers, sides, strict=True)
            ]
            turns = balanced(works, self.every, LAUNCHES)
        for stack, found in zip(stacks, turns, strict=True):
            stack.memory["turns"] = found

    def run(self, stack: Stack, context: Context, waits: bool) -> None:
        """All groups at the first step and, while statistics are young, at its doublings; then each in its turn."""
        step, turns, fresh = context.step, stack.memory["turns"], freshness(stack)
        due = [
            groups
            for t in turns
            for groups in ([t.groups] if waits else known_runs(stack, t.groups))
            if self.is_due(step, t.slot) or not all(fresh[groups])
        ]
        regular = {
            groups.start for t in turns if self.is_due(step, t.slot) for groups in due if _within(groups, t.groups)
        }
        owners = self.processes.owners([float(groups.stop - groups.start) for groups in due])
        for groups, owner in zip(due, owners, strict=True):
            for part in self._ready_parts(stack, groups, waits):
                if groups.start not in regular and part != groups and all(fresh[part]):
                    continue  # only its neighbours are new
                if owner == self.processes.rank:
                    self._refresh(stack, part, context)
                if not all(fresh[part]):
                    stack.state["fresh"][part] = 1
                    fresh[part] = [True] * (part.stop - part.start)
        if self.processes.count > 1:
            self.processes.share(
                [
                    (owner, stack.state[name][groups])
                    for groups, owner in zip(due, owners, strict=True)
                    for name in stack.rule.refreshed
                    if name in stack.state
                ]
            )

    def is_due(self, step: int, slot: int) -> bool:
        """Whether a step renews what has this slot."""
        young = step < self.every and step & (step - 1) == 0  # 1, 2, 4, 8, …
        return young or (step - 1 - slot) % self.every == 0

    def _refresh(self, stack: Stack, groups: slice, context: Context) -> None:
        rule, state, health = stack.rule, stack.state, self.health
        counted, replayed = health.refreshes, False
        for part in rule.parts(state, rule.plan(state, groups, context, health)):
            call = partial(rule.refresh, state, groups, replace(context, plan=part), health)
            if part is not None and self._repeats(stack, part):
                key = (id(stack), groups.start, groups.stop, context.damping, part)
                kind = "exact" if part.exact else "refined"
                replayed = self.graphs.run(key, call, stack.shape.device, kind=kind) or replayed
            else:
                call()
        # Once, whatever the number of parts; a rule that had nothing to do counts nothing.
        health.refreshes = counted + (replayed or health.refreshes > counted)
        rule.report(groups, context)

    def _repeats(self, stack: Stack, plan: Any) -> bool:
        """Whether a refresh can be recorded: one process, a damping that stays as it is, and state alone."""
        steady = self.damping.schedule is None and not self.damping.adaptive
        on_gpu = stack.shape.device.type == "cuda"
        return on_gpu and steady and self.processes.count == 1 and stack.rule.replayable(stack.state, plan)

    def _ready_parts(self, stack: Stack, groups: slice, waits: bool) -> list[slice]:
        """All groups, or those that have something to decompose: an expert without tokens stops no other."""
        if self._ready(stack, groups, waits):
            return [groups]
        if not waits:
            return []
        single = [slice(k, k + 1) for k in range(groups.start, groups.stop)]
        return [one for one in single if stack.rule.ready(stack.state, one)] if len(single) > 1 else []

    def _ready(self, stack: Stack, groups: slice, waits: bool) -> bool:
        """Whether there is anything to decompose; where nobody waits, as far as the host knows."""
        if waits:
            return stack.rule.ready(stack.state, groups)
        if all(freshness(stack)[groups]):
            return True
        return self.health.gate is None or bool(self.health.gate)  # asked at the first steps alone


def _within(groups: slice, others: slice) -> bool:
    return others.start <= groups.start and groups.stop <= others.stop


def freshness(stack: Stack) -> list[bool]:
    """Which groups were refreshed since they began; the host keeps a copy, so as not to ask the device."""
    if "fresh" not in stack.state:
        stack.state["fresh"] = torch.zeros(stack.groups, device=stack.shape.device)
    if "fresh" not in stack.memory:
        stack.memory["fresh"] = [bool(on) for on in stack.state["fresh"].tolist()]
    return stack.memory["fresh"]


def known_runs(stack: Stack, groups: slice) -> list[slice]:
    """Neighbours that have statistics, as far as the host knows: one layer that is never called stops no other."""
    seen, fresh, runs = stack.memory.get("observed", [False] * stack.groups), freshness(stack), list[slice]()
    for place in range(groups.start, groups.stop):
        if seen[place] or fresh[place]:
            start = runs.pop().start if runs and runs[-1].stop == place else place
            runs.append(slice(start, place + 1))
    return runs


def remember(stack: Stack, known: Sequence[bool]) -> None:
    """Which groups have statistics, as far as the host can know."""
    before = stack.memory.setdefault("observed", [False] * stack.groups)
    stack.memory["observed"] = [old or new for old, new in zip(before, known, strict=True)]
