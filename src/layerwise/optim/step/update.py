"""One step over all stacks: gradients are gathered, rules learn from them, and what they say is subtracted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerwise.optim.cuda.deferred_examples import Spread
from layerwise.optim.cuda.deferred_statistics import Statistics, take_all_in, take_due
from layerwise.optim.cuda.elementwise import finish_
from layerwise.optim.cuda.found_inf import bounds, sizes_of
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.unscaled import unscaled
from layerwise.optim.rule import Context, Health, Observation, State, UpdateRule
from layerwise.optim.statistics.accumulate import Collector, Sums
from layerwise.optim.step.damping import Damping
from layerwise.optim.step.graft import Clip, Graft
from layerwise.optim.step.refresh_schedule import Refreshes, remember
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update_scale import UpdateScale


@dataclass
class Gathered:
    """What a step begins with, stack by stack."""

    gates: dict[torch.device, Tensor]
    """Whether the step is taken, as each device knows; none where the host may ask."""
    grads: list[Tensor]
    active: list[list[bool]]
    """Which layers have a gradient."""
    largest: list[Tensor | None]
    """What no entry of each group exceeds, for stacks that split their gradient into halves."""


@dataclass
class Part:
    """One stack's part of a step."""

    stack: Stack
    context: Context
    grad: Tensor
    active: list[bool]
    handed: Tensor
    """What the rule gets in the gradient's place; the gradient, mostly."""
    observed: Observation | None = None
    before: State | None = None
    """The state as it was, where some layers have no gradient and keep theirs."""
    rates: Tensor | None = None
    """``(1 − η·decay, η)`` on the device, where a recorded step reads them; None: the host's are taken."""

    @property
    def lr(self) -> float | Tensor:
        """η, wherever it is."""
        return self.context.lr if self.rates is None else self.rates[1]


@dataclass
class Descent:
    """Of one optimizer's stacks."""

    stacks: list[Stack]
    rule: UpdateRule
    """The optimizer's own; other stacks have the fallback."""
    health: Health
    damping: Damping
    clip: Clip
    graft: Graft
    collector: Collector
    refreshes: Refreshes
    spread: Spread = field(default_factory=Spread)
    statistics: Statistics = field(default_factory=Statistics)
    scale: UpdateScale = field(default_factory=UpdateScale)
    _places: dict[torch.device, dict] = field(default_factory=dict)

    # --- gradients -----------------------------------------------------------------------------------------

    def gather(self, scale: float, waits: bool, places: dict[torch.device, dict] | None = None) -> Gathered:
        """All gradients times a number, and where nobody waits whether they are finite and how large they are.

        `places` remembers on the devices which sizes belong together, in place of the memory of other steps.
        """
        places = self._places if places is None else places
        sizes = {} if waits else sizes_of(p for stack in self.stacks for p in stack.params.values())
        gates = self._find_gates(scale, sizes)
        grads, active, largest = [], [], dict[int, Tensor]()
        for stack in self.stacks:
            grad, on = stack.gradient(scale, gates.get(stack.shape.device))
            grads.append(grad)
            active.append(on)
        for device, gate in gates.items():
            split = [stack for stack in self.stacks if stack.splits_gradient and stack.shape.device == device]
            if split and device in sizes:
                largest |= bounds(split, sizes[device], gate, scale, places.setdefault(device, {}))
        return Gathered(gates, grads, active, [largest.get(id(stack)) for stack in self.stacks])

    def _find_gates(self, scale: float, sizes: dict) -> dict[torch.device, Tensor]:
        """Whether this step is taken, as each device sees it; behind a gate that is shut, gradients are zero.

        A gradient that overflows when it is scaled is not finite.
        """
        if not sizes:
            return {}
        grows = abs(scale) > 1
        flags = [(s.largest * abs(scale) < torch.inf).all() if grows else s.finite for s in sizes.values()]
        gate = flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).all()
        self.health.gate = gate
        self.health.count("skipped_steps", (~gate).to(torch.int64))
        return {device: gate.to(device) for device in sizes}

    def parts(self, contexts: Sequence[Context], gathered: Gathered) -> list[Part]:
        """Everything a step knows of each stack."""
        found = []
        for stack, context, grad, active, largest in zip(
            self.stacks, contexts, gathered.grads, gathered.active, gathered.largest, strict=True
        ):
            context.gate, context.largest = gathered.gates.get(stack.shape.device), largest
            context.gradient = grad if stack.splits_gradient and context.gate is not None else None
            found.append(Part(stack, context, grad, active, grad))
        return found

    @staticmethod
    def finite(parts: Sequence[Part]) -> bool:
        """Whether all gradients are; the host waits."""
        grads = [part.grad for part in parts]
        sums = [grad.sum() for grad in grads]
        return all(math.isfinite(float(s)) for s in sums) or all(bool(torch.isfinite(g).all()) for g in grads)

    # --- what rules learn ----------------------------------------------------------------------------------

    def learn(self, parts: Sequence[Part], seen: dict[str, Sums], waits: bool, by_gradient: bool = True) -> None:
        """Statistics, and decompositions whose turn it is."""
        for part in parts:
            stack, rule, context = part.stack, part.stack.rule, part.context
            self.health.gate = context.gate
            if rule.refreshes and not (rule.needs_inputs or rule.needs_outgrads):
                remember(stack, stack.by_group(part.active))
            if rule is self.rule:
                part.observed = self.collector.observation(stack, seen, self.refreshes.processes)
            self._take_waiting(part)
            part.before = None if all(part.active) else {k: v.clone() for k, v in stack.state.items()}
            if part.observed is not None:
                self.statistics.take(stack, part.observed, context, self.health, whole=part.before is None)
                take_due(stack, context.step, self.refreshes.is_due, self.health)
                remember(stack, part.observed.known)
            if by_gradient:
                self.learn_gradient(part)
            if rule.refreshes:
                self.refreshes.run(stack, context, waits)
            if rule.keeps_recorded:
                part.observed = self.spread.run(stack, part.observed, context, stack.by_group(part.active))

    def _take_waiting(self, part: Part) -> None:
        """Statistics of an earlier batch: no part of this step, so that layers without a gradient keep them too."""
        if part.observed is not None:
            take_all_in(part.stack, self.health)
        else:
            take_due(part.stack, part.context.step, self.refreshes.is_due, self.health)

    def learn_gradient(self, part: Part) -> None:
        """The gradient's own statistics, where this step takes some."""
        if part.context.observes:
            stack, self.health.gate = part.stack, part.context.gate
            stack.rule.observe_gradient(stack.state, part.handed, stack.group["factor_decay"], self.health)

    # --- the step ------------------------------------------------------------------------------------------

    def descend(self, parts: Sequence[Part], waits: bool) -> None:
        """Directions, and what is made of them."""
        directions = [self._direction(part, waits) for part in parts]
        # Before momentum: an average of former directions may have any sign beside the present gradient.
        factor = self.clip.factor(self.stacks, directions, [p.grad for p in parts], [p.lr for p in parts], waits)
        self.health.count("clipped_steps", (factor < 1).to(torch.int64) if isinstance(factor, Tensor) else factor < 1)
        if not waits and not self.damping.adaptive:
            for part, D in zip(parts, directions, strict=True):
                self._finish(part, D, factor)
            return
        updates = []
        for part, D in zip(parts, directions, strict=True):
            updates.append(self._momentum(part, unscaled(D), factor))
            self._subtract(part, updates[-1])
        self.damping.predict(self.stacks, updates, [(p.grad, p.active) for p in parts], [p.context.lr for p in parts])

    def _direction(self, part: Part, waits: bool) -> Tensor | Scaled:
        """What a stack subtracts, before the learning rate; layers without a gradient keep their state."""
        stack, rule, context = part.stack, part.stack.rule, part.context
        self.health.gate = context.gate
        looked_at = waits or self.damping.adaptive or self.graft.method or self.clip.kind == "norm"
        context.asks_along = self.clip.kind == "kl" and not looked_at
        rule.rescale(stack.state, part.observed, part.handed, context)
        if self.scale.sets(rule):
            D = self._sized(part)
        else:
            direction = rule.direction if looked_at else rule.scaled_direction
            D = direction(stack.state, part.handed, context, self.health)
        D = self.graft.apply(stack, part.handed, D, self.health)
        if part.before is not None:
            made = {k: torch.zeros_like(v) for k, v in stack.state.items() if k not in part.before}
            stack.restore({**made, **part.before}, part.active)
        return D

    def _sized(self, part: Part) -> Tensor:
        """The direction of an averaged gradient, of AdamW's size."""
        stack, context = part.stack, part.context
        averaged, wanted = self.scale.average(stack, part.handed, context, self.health)
        D = stack.rule.direction(stack.state, averaged, context, self.health)
        return self.scale.apply(stack, D.to(stack.shape.dtype), wanted, part.lr)

    def _factor(self, part: Part, factor: float | Tensor) -> float | Tensor:
        """A clip is for matrices alone, where the others are to have AdamW's own step."""
        return factor if self.scale.method == "formula" or part.stack.rule is self.rule else 1.0

    def _finish(self, part: Part, D: Tensor | Scaled, factor: float | Tensor) -> None:
        """Momentum, decay and descent in one pass, where the stack's layers allow it."""
        stack, context, listed = part.stack, part.context, part.stack.listed
        factor = self._factor(part, factor)
        factor = factor.to(stack.shape.device) if isinstance(factor, Tensor) else factor
        layers = listed.parameters() if listed is not None and all(part.active) else None
        if listed is None or layers is None:
            self._subtract(part, self._momentum(part, unscaled(D).to(stack.shape.dtype), factor))
            return
        mu = self._mu(part)
        finish_(
            *layers,
            listed.directions(D),
            listed.matrices(stack.momentum()) if mu else None,
            lr=context.lr,
            decay=stack.group["weight_decay"],
            rates=part.rates,
            mu=mu,
            nesterov=stack.group["nesterov"],
            factor=factor,
            gate=context.gate,
        )

    @staticmethod
    def _subtract(part: Part, update: Tensor) -> None:
        lr = part.context.lr
        part.stack.subtract(update, lr, part.active, lr * part.stack.group["weight_decay"], part.context.gate)

    def _mu(self, part: Part) -> float:
        """Momentum of the direction: none where the gradient was averaged before, where the rule takes the option
        itself, or is a fallback with its own."""
        rule, own = part.stack.rule, part.stack.rule.own_momentum
        averaged = self.scale.sets(rule) or own == "momentum" or (own and rule is not self.rule)
        return 0.0 if averaged else part.stack.group["momentum"]

    def _momentum(self, part: Part, D: Tensor, factor: float | Tensor) -> Tensor:
        """``μ · buffer + factor · D``, kept; with Nesterov's, one step ahead of it."""
        stack, gate = part.stack, part.context.gate
        mu, factor = self._mu(part), self._factor(part, factor)
        D = D if isinstance(factor, float) and factor == 1.0 else D * factor
        if not mu:
            return D
        old = stack.state.get("momentum")
        buffer = D.clone() if old is None else D + mu * old
        if gate is not None:  # what it was, where the step is left out
            buffer = torch.where(gate.to(D.device), buffer, 0.0 if old is None else old)
        stack.state["momentum"] = buffer
        if not all(part.active):
            stack.restore({"momentum": torch.zeros_like(D) if old is None else old}, part.active)
        return D + mu * buffer if stack.group["nesterov"] else buffer
