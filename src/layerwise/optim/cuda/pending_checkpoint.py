"""Checkpoints what deferred examples would produce.

Activations are no part of a checkpoint. But all pending examples are looked at before the next batch, and until then
factors stay as they are: the basis that a layer will have at its turn can be made in advance, on a copy, as a run that
goes on from the checkpoint will make it. The scalings in that basis are saved beside those of now, and taken at the
turn. Where the basis has become another by then (other turns, another solver), they are left.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.optim.cuda.deferred_examples import PENDING, PendingExamples
from layerwise.optim.rule import Health, State
from layerwise.optim.step.refresh_schedule import freshness, is_due
from layerwise.optim.step.stack import Stack

SCALINGS, TURN = "s_due", "due"
EIGENVALUES = {"s_P_due": "values_P", "s_Q_due": "values_Q"}
"""Of the basis that the scalings belong to."""
SAME, SLIGHT = 1e-3, 1e-5
"""Of each eigenvalue, and of the largest: a basis whose eigenvalues differ by less, each from the one in its place, is
the same."""


@dataclass
class PendingScalings:
    """Layers whose scalings are known, in the basis of their turn."""

    groups: slice
    step: int
    scalings: Tensor
    eigenvalues: dict[str, Tensor]

    def look(self, stack: Stack) -> None:
        """Take them, where the basis is the one that was made in advance."""
        s, same = stack.state["s"][self.groups], torch.ones((), dtype=torch.bool, device=self.scalings.device)
        for name, values in self.eigenvalues.items():
            off = (getattr(stack.state["basis"], name)[self.groups] - values).abs()
            same = same & (off <= SAME * values + SLIGHT * values.amax(-1, keepdim=True)).all(-1)
        s.copy_(torch.where(same.view(-1, 1, 1), self.scalings, s))


@torch.no_grad()
@in_own_arithmetic
def pending(stack: Stack, every: int, step: int) -> dict[str, dict[str, Tensor]]:
    """After a step: what is saved of each layer beside its state, by name."""
    found: dict[str, dict[str, Tensor]] = {spec.name: {} for spec in stack.specs}
    for one in stack.memory.get(PENDING, []):
        if isinstance(one, PendingExamples) and not one.intact:
            continue
        ahead = one if isinstance(one, PendingScalings) else _ahead(stack, one, every, step)
        start = one.groups.start
        for spec, groups in stack.layers:
            if start <= groups.start < one.groups.stop:
                found[spec.name] |= _portable(stack, ahead, slice(groups.start - start, groups.stop - start))
    return found


def _ahead(stack: Stack, one: PendingExamples, every: int, step: int) -> PendingScalings:
    """The examples looked at in the basis of their turn."""
    rule, groups, turn = stack.rule, one.groups, max(one.step, step + 1)
    state: State = {}
    for name, entry in stack.state.items():
        part = entry[groups] if isinstance(entry, Tensor) else entry.narrow(groups)
        renewed = name in stack.requires.renewed if isinstance(entry, Tensor) else entry.renewed
        state[name] = part.clone() if renewed else part  # what a refresh may change
    slot = next(turn.slot for turn in stack.memory["turns"] if turn.groups == groups)
    whole, memory = slice(0, groups.stop - groups.start), dict[str, Any](fresh=freshness(stack)[groups])
    factors = [state[name] for name in ("P", "Q") if name in state]
    for later in range(step + 1, turn + 1):
        context = replace(one.context, step=later, memory=memory, health=Health(), device_step=None)
        due = is_due(later, slot, every) or not all(memory["fresh"])
        if due and all(bool((factor.trace() > 0).all()) for factor in factors):
            rule.refresh(state, whole, context)
            memory["fresh"] = [True] * whole.stop
    rule.observe(state, one.seen, replace(one.context, health=Health()))
    return PendingScalings(
        groups, turn, state["s"], {name: getattr(state["basis"], name) for name in EIGENVALUES.values()}
    )


def _portable(stack: Stack, ahead: PendingScalings, groups: slice) -> dict[str, Tensor]:
    """Of one layer, without padding."""
    shape = stack.shape
    own = {"values_P": shape.own_outputs, "values_Q": shape.own_inputs}
    found = {SCALINGS: stack.own(ahead.scalings[groups]).clone()}
    for saved, name in EIGENVALUES.items():
        found[saved] = ahead.eigenvalues[name][groups, : own[name]].clone()
    return found | {TURN: torch.full((groups.stop - groups.start,), ahead.step)}


def resume(stack: Stack, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Take up what was saved: scalings until their turn."""
    if not stack.requires.examples or "basis" not in stack.state:
        return
    waiting = []
    for spec, groups in stack.layers:
        found = saved.get(spec.name, {})
        if {SCALINGS, TURN, *EIGENVALUES} <= set(found):
            shape, basis = stack.shape, stack.state["basis"]
            own = {"s_P_due": shape.own_outputs, "s_Q_due": shape.own_inputs}
            scalings = _padded(found[SCALINGS], stack.state["s"][groups], (shape.own_outputs, shape.own_inputs))
            values = {
                name: _padded(found[key], getattr(basis, name)[groups], (own[key],))
                for key, name in EIGENVALUES.items()
            }
            known = {name: X for name, X in values.items() if X is not None}
            if scalings is not None and len(known) == len(values):
                waiting.append(PendingScalings(groups, int(found[TURN][0]), scalings, known))
    stack.memory[PENDING] = waiting


def _padded(X: Tensor, like: Tensor, own: tuple[int, ...]) -> Tensor | None:
    """As this stack has it; None where it has another size."""
    if tuple(X.shape[1:]) != own or len(X) != len(like):
        return None
    found = torch.zeros_like(like)
    found[(slice(None), *map(slice, own))] = X.to(found)
    return found
