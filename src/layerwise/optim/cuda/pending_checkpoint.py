"""Examples that wait while a state is saved: what looking at them will have given is saved in their place.

Inputs and output gradients are no part of a checkpoint. But all that wait are looked at before the next batch, and
until then factors stay as they are: the basis that a layer will have at its turn can be made in advance, on a copy, as
a run that goes on from the checkpoint will make it. The scalings in that basis are saved beside those of now, and taken
at the turn. Where the basis has become another by then (other turns, another solver), they are left.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.optim.cuda import storage as stored
from layerwise.optim.cuda.basis_monitor import recalled
from layerwise.optim.cuda.deferred_examples import WAITING, Share
from layerwise.optim.cuda.monitor_checkpoint import lately
from layerwise.optim.rule import Health, State
from layerwise.optim.step.refresh_schedule import Refreshes, freshness
from layerwise.optim.step.stack import Stack

SCALINGS, TURN = "s_due", "due"
EIGENVALUES = {"s_P_due": "s_P", "s_Q_due": "s_Q"}
"""Of the basis that the scalings belong to."""
SAME, SLIGHT = 1e-3, 1e-5
"""Of each eigenvalue, and of the largest: a basis whose eigenvalues differ by less, each from the one in its place, is
the same."""


@dataclass
class Foreseen:
    """A share whose scalings are known, in the basis of its turn."""

    groups: slice
    step: int
    scalings: Tensor
    eigenvalues: State

    def look(self, stack: Stack) -> None:
        """Take them, where the basis is the one that was foreseen."""
        s, same = stack.state["s"][self.groups], torch.ones((), dtype=torch.bool, device=self.scalings.device)
        for name, values in self.eigenvalues.items():
            off = (stack.state[name][self.groups] - values).abs()
            same = same & (off <= SAME * values + SLIGHT * values.amax(-1, keepdim=True)).all(-1)
        s.copy_(torch.where(same.view(-1, 1, 1), self.scalings, s))


@torch.no_grad()
@in_own_arithmetic
def foreseen(stack: Stack, refreshes: Refreshes, step: int) -> dict[str, State]:
    """After a step: what is saved of layers whose examples wait, by name."""
    found: dict[str, State] = {}
    for share in stack.memory.get(WAITING, []):
        if isinstance(share, Share) and not share.intact:
            continue
        ahead = share if isinstance(share, Foreseen) else _ahead(stack, share, refreshes, step)
        start = share.groups.start
        for spec, groups in stack.slices():
            if start <= groups.start < share.groups.stop:
                found[spec.name] = _portable(stack, ahead, slice(groups.start - start, groups.stop - start))
    return found


def _ahead(stack: Stack, share: Share, refreshes: Refreshes, step: int) -> Foreseen:
    """The examples looked at in the basis of their turn."""
    rule, groups, turn = stack.rule, share.groups, max(share.step, step + 1)
    state = {
        name: X[groups].clone() if name in rule.refreshed else X[groups]  # what a refresh may change
        for name, X in stack.state.items()
    }
    slot = next(turn.slot for turn in stack.memory["turns"] if turn.groups == groups)
    whole, memory = slice(0, groups.stop - groups.start), {"fresh": freshness(stack)[groups]}
    memory |= {recalled(name): rows[groups] for name, rows in lately(stack).items()}
    for later in range(step + 1, turn + 1):
        context = replace(share.context, step=later, memory=memory, plan=None)
        due = refreshes.is_due(later, slot) or not all(memory["fresh"])
        if due and rule.ready(state, whole):
            rule.refresh(state, whole, context, Health())
            rule.report(whole, context)
            memory["fresh"] = [True] * whole.stop
    rule.look_at_examples(state, share.seen, share.context)
    return Foreseen(groups, turn, state["s"], {name: state[name] for name in EIGENVALUES.values()})


def _portable(stack: Stack, ahead: Foreseen, groups: slice) -> State:
    """Of one layer, without padding."""
    kept = {SCALINGS: ahead.scalings} | {saved: ahead.eigenvalues[name] for saved, name in EIGENVALUES.items()}
    found = {name: stored.widened(stored.own(name, X[groups], stack.shape)).clone() for name, X in kept.items()}
    return found | {TURN: torch.full((groups.stop - groups.start,), ahead.step)}


def take_up(stack: Stack, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Let what was saved of layers wait for their turn again."""
    if not stack.rule.keeps_recorded:
        return
    waiting = []
    for spec, groups in stack.slices():
        found = saved.get(spec.name, {})
        if {SCALINGS, TURN, *EIGENVALUES} <= set(found):
            scalings = _padded(found[SCALINGS], "s", groups, stack)
            values = {name: _padded(found[kept], name, groups, stack) for kept, name in EIGENVALUES.items()}
            known = {name: X for name, X in values.items() if X is not None}
            if scalings is not None and len(known) == len(values):
                waiting.append(Foreseen(groups, int(found[TURN][0]), scalings, known))
    stack.memory[WAITING] = waiting


def _padded(X: Tensor, name: str, groups: slice, stack: Stack) -> Tensor | None:
    """As this stack's state of that name; None where it has another size."""
    like = stack.state[name][groups] if name in stack.state else None
    if like is None or stored.own(name, like, stack.shape).shape != X.shape:
        return None
    found = torch.zeros_like(like)
    stored.own(name, found, stack.shape).copy_(X)
    return found
