"""One step over all stacks: statistics are observed, decompositions refreshed, directions made and subtracted.

`Executor` is how that is carried out. `EagerExecutor`, below, is the order in which a step happens: the host looks at
values whenever it wants to know. On a GPU `cuda.executor.AsynchronousExecutor` takes the same steps without waiting
for the device.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerwise.optim.rule import Context, Health, Observation, UpdateRule
from layerwise.optim.statistics.accumulate import Accumulator, Sums
from layerwise.optim.step.clip import Clip
from layerwise.optim.step.damping import Damping
from layerwise.optim.step.graft import Graft
from layerwise.optim.step.refresh_schedule import RefreshSchedule, give_turns
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update_size import UpdateSize


@dataclass
class Part:
    """One stack's part of a step."""

    stack: Stack
    context: Context
    grad: Tensor
    active: list[bool]
    """Which layers have a gradient."""
    handed: Tensor
    """What the rule gets in the gradient's place; the gradient, mostly."""
    before: dict[str, Tensor] | None = None
    """The state as it was, where some layers have no gradient and keep theirs."""


SolveTogether = Callable[[list[Part], dict[str, Sums]], None]
"""For members that look at all layers at once: replaces `Part.handed`."""


@dataclass
class Executor(ABC):
    """Of one optimizer's stacks."""

    stacks: list[Stack]
    rule: UpdateRule
    """The optimizer's own; other stacks have the fallback."""
    health: Health
    damping: Damping
    clip: Clip
    graft: Graft
    size: UpdateSize
    accumulator: Accumulator
    every: int
    """Steps between decompositions."""

    @abstractmethod
    def run(
        self, contexts: Sequence[Context], seen: dict[str, Sums], scale: float, together: SolveTogether | None
    ) -> None:
        """Take a step with all gradients times `scale`, and what was seen of each layer."""

    def settle(self) -> None:
        """Take in all that was put off, before anybody looks at the state. Nothing, where nothing is."""
        return

    def pending(self, step: int) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint has beside the state, layer by layer."""
        return {}

    def resume(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Take that up again."""
        return

    def _momentum(self, part: Part) -> float:
        """Momentum of the direction: none where the gradient was averaged before, where the rule takes the option
        itself, or is a fallback with its own."""
        stack = part.stack
        own = stack.requires.own_momentum
        averaged = self.size.sets(stack) or own == "momentum" or (own and stack.rule is not self.rule)
        return 0.0 if averaged else stack.group["momentum"]

    def _factor(self, part: Part, factor: Any) -> Any:
        """A clip is for matrices alone, where the others are to have AdamW's own step."""
        return factor if self.size.method == "formula" or part.stack.rule is self.rule else 1.0


@dataclass
class EagerExecutor(Executor):
    """The host may look at values."""

    def __post_init__(self) -> None:
        give_turns(self.stacks, self.every)
        processes = self.accumulator.processes
        self.schedule = RefreshSchedule(self.every, processes if processes.count > 1 else None)

    def run(
        self, contexts: Sequence[Context], seen: dict[str, Sums], scale: float, together: SolveTogether | None
    ) -> None:
        """Gradients, what is learnt of them, and the update; nothing, if a gradient is not finite."""
        parts = []
        for stack, context in zip(self.stacks, contexts, strict=True):
            grad = stack.gradient(scale)
            parts.append(Part(stack, context, grad, stack.active(), grad))
        for part in parts:
            if not math.isfinite(float(part.grad.sum())) and not bool(torch.isfinite(part.grad).all()):
                self.health.skipped_steps += 1
                return
        if together is not None:
            together(parts, seen)
        for part in parts:
            self._learn(part, seen)
        self._descend(parts)

    def _learn(self, part: Part, seen: dict[str, Sums]) -> None:
        """Statistics, and decompositions that are due."""
        stack, rule, context = part.stack, part.stack.rule, part.context
        observed = self.accumulator.observation(stack, seen) if seen and rule is self.rule else None
        part.before = stack.copied() if False in part.active else None
        if observed is not None:
            rule.observe(stack.state, replace(observed, recorded=[]) if observed.recorded else observed, context)
        if context.observes:
            rule.observe(stack.state, Observation(gradient=part.handed), context)
        if stack.requires.refreshes:
            self.schedule.run(stack, context)
        if observed is not None and observed.recorded:  # in the basis as it is now
            rule.observe(stack.state, replace(observed, A=None, G=None), context)

    def _descend(self, parts: Sequence[Part]) -> None:
        """Directions, and what is made of them: W ← (1 − η·decay) W − η · momentum(clip(graft(direction)))."""
        directions, factor = [self._direction(part) for part in parts], 1.0
        if self.clip.kind is not None:
            # Before momentum: an average of former directions may have any sign beside the present gradient.
            grads, lrs = [part.grad for part in parts], [part.context.lr for part in parts]
            factor = self.clip.factor(self.stacks, directions, grads, lrs)
            self.health.clipped_steps += factor < 1
        updates = []
        for part, D in zip(parts, directions, strict=True):
            update = self._with_momentum(part, D, factor)
            updates.append(update)
            for target, piece, lr, decay in part.stack.pieces(update, part.context.lr, part.active):
                if decay:
                    target.mul_(1 - lr * decay)
                target.add_(piece.to(target.dtype), alpha=-lr)
        if self.damping.adaptive:
            lrs = [part.context.lr for part in parts]
            self.damping.predict(self.stacks, updates, [part.grad for part in parts], lrs)

    def _direction(self, part: Part) -> Tensor:
        """What a stack subtracts, before the learning rate; layers without a gradient keep their state."""
        stack, context = part.stack, part.context
        context.gradient = part.handed
        if self.size.method == "adam" and stack.requires.matrices_only:
            D = self.size.direction(stack, part.handed, context, context.lr)
        else:
            D = stack.rule.direction(stack.state, part.handed, context)
            D = D if isinstance(D, Tensor) else stack.backend.tensor(D)
        if self.graft.method is not None:
            D = self.graft.apply(stack, part.handed, D, context)
        if part.before is not None:
            stack.restore(part.before, part.active)
        return D

    def _with_momentum(self, part: Part, D: Tensor, factor: float) -> Tensor:
        """``μ · buffer + factor · D``, kept; with Nesterov's, one step ahead of it."""
        stack, mu, factor = part.stack, self._momentum(part), self._factor(part, factor)
        D = D if factor == 1.0 else D * factor
        if not mu:
            return D
        old = stack.state.get("momentum")
        buffer = stack.state["momentum"] = D.clone() if old is None else D + mu * old
        if False in part.active:
            for (_, groups), on in zip(stack.layers, part.active, strict=True):
                if not on:
                    buffer[groups] = 0.0 if old is None else old[groups]
        return D + mu * buffer if stack.group["nesterov"] else buffer
