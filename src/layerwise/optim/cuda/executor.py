"""`AsynchronousExecutor`: steps without any host–device synchronization.

The same order as `step.update.EagerExecutor`, which is the one to read first. What the host would have to ask the
device for stays there: whether gradients are finite is a mask (`DeviceStep.all_finite`); where it is false the gathered
gradient is zero, and kernels write nothing. Counts are added up on the device. So that no step is slow, refreshes are
staggered (`stagger`), statistics and examples of a batch deferred, and whole steps captured as CUDA graphs
(`captured_step`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerwise.optim.cuda import adamw, deferred_statistics, elementwise, spectral_cap
from layerwise.optim.cuda.captured_step import CapturedStep
from layerwise.optim.cuda.deferred_examples import DeferredExamples
from layerwise.optim.cuda.deferred_statistics import DeferredStatistics
from layerwise.optim.cuda.device_step import DeviceStep
from layerwise.optim.cuda.gradient_sizes import MOST_GRADIENT, GradientSizes, bounds, sizes_of
from layerwise.optim.cuda.graphs import Graphs
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.pieces import Tables
from layerwise.optim.cuda.scaled import Scaled, parts, unscaled
from layerwise.optim.cuda.stagger import LAUNCHES, SWEEPS_LAUNCHES, Work, balanced, decomposition_cost
from layerwise.optim.cuda.triton.device import on_gpu
from layerwise.optim.cuda.update_ratio import divisor
from layerwise.optim.rule import Context, Observation, kept
from layerwise.optim.statistics.accumulate import Sums
from layerwise.optim.step.refresh_schedule import freshness, is_due
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update import Executor, Part, SolveTogether


@dataclass
class Gathered:
    """What a step begins with, stack by stack."""

    all_finite: dict[torch.device, Tensor]
    """Whether the step is taken, as each device knows."""
    grads: list[Tensor | Half]
    """Of stacks whose step is AdamW's none is gathered (`adamw`); in fp16 where it is only rotated."""
    active: list[list[bool]]
    """Which layers have a gradient."""
    largest: list[Tensor | None]
    """What no entry of each group exceeds, for stacks that split their gradient into fp16."""
    scale: float
    """What gradients are multiplied by; gathered ones have been."""


@dataclass
class AsynchronousExecutor(Executor):
    """The host asks the device for nothing."""

    factor_every: int = 1
    statistics_over: int | None = None
    draws_labels: bool = False
    """Whether statistics are of labels drawn from the model: one backward brings all of them, and they are deferred."""
    cuda_graphs: bool | None = None
    graphs: Graphs = field(default_factory=Graphs)
    _places: dict[torch.device, dict] = field(default_factory=dict)
    """Which sizes of gradients belong together, on each device."""

    def __post_init__(self) -> None:
        self.processes = self.accumulator.processes
        self._stagger()
        for stack in self.stacks:
            observed(stack)  # of a state that was loaded: before a step changes it
        by_device = dict[torch.device, list[Stack]]()
        for stack in self.stacks:
            by_device.setdefault(stack.shape.device, []).append(stack)
        self.tables = {device: Tables(own, device) for device, own in by_device.items()}
        there = on_gpu(self.stacks[0].shape.device) if self.stacks else False
        requires, alone = self.rule.requirements(), self.processes.count == 1 and not self.damping.adaptive
        self.examples = DeferredExamples.of(requires, self.factor_every, there, self.processes.count)
        by_itself = there and (self.draws_labels or self.examples.over > 1)
        self.statistics = DeferredStatistics.of(self.statistics_over, self.factor_every, by_itself, alone)
        self.captured = CapturedStep(self, self.cuda_graphs)

    def _stagger(self) -> None:
        """When each part of a stack is refreshed: in few batches of equal work."""
        works = []
        for stack in self.stacks:
            requires = stack.rule.requirements(stack.shape)
            powers = requires.powers or (None, None)
            has = (_has(stack, "P", powers[0]), _has(stack, "Q", powers[1]))
            works.append(Work([groups for _, groups in stack.layers], decomposition_cost(stack.shape, *has)))
        inverts = 1.0 in (self.rule.requirements().powers or ())
        launches = LAUNCHES if inverts else SWEEPS_LAUNCHES
        for stack, turns in zip(self.stacks, balanced(works, self.every, launches), strict=True):
            stack.memory["turns"] = turns
        deferred_statistics.limit_parts([stack for stack in self.stacks if stack.rule is self.rule])

    # --- a step ----------------------------------------------------------------------------------------------

    def run(
        self, contexts: Sequence[Context], seen: dict[str, Sums], scale: float, together: SolveTogether | None
    ) -> None:
        """Captured, where it can be."""
        self.health.on_device = True
        try:
            for tables in self.tables.values():
                tables.send()
            if together is not None or not self.captured.run(contexts, seen, scale):
                parts = self.parts(contexts, self.gather(scale, whole=together is not None))
                if together is not None and all(part.context.is_taken() for part in parts):
                    together(list(parts), seen)
                self.learn(parts, seen)
                self.descend(parts)
        except BaseException:  # whatever has become of the weights
            for tables in self.tables.values():
                tables.forget_norms()
            raise
        finally:
            self.health.on_device = False

    def gather(self, scale: float, places: dict[torch.device, dict] | None = None, *, whole: bool = False) -> Gathered:
        """All gradients times a number, whether they are finite, and how large they are.

        `places` remembers on the devices which sizes belong together, in place of the memory of other steps. With
        `whole` every gradient is gathered, also where a step would read it where it lies.
        """
        places = self._places if places is None else places
        sizes: dict[torch.device, GradientSizes] = {}
        for device, tables in self.tables.items():
            on_device = sizes_of([stack for stack in self.stacks if stack.shape.device == device], tables)
            if on_device is not None:
                sizes[device] = on_device
        finite = self._all_finite(scale, sizes)
        grads, active, largest = [], [], dict[int, Tensor]()
        for device, on_device in finite.items():
            split = [stack for stack in self.stacks if stack.shape.device == device and multiplies_in_fp16(stack)]
            if split and device in sizes:
                largest |= bounds(split, sizes[device], on_device, scale, places.setdefault(device, {}))
        for stack in self.stacks:
            grad, on = self._gradient(stack, scale, finite[stack.shape.device], largest.get(id(stack)), whole)
            grads.append(grad)
            active.append(on)
        return Gathered(finite, grads, active, [largest.get(id(stack)) for stack in self.stacks], scale)

    def _gradient(
        self, stack: Stack, scale: float, finite: Tensor, largest: Tensor | None, whole: bool = False
    ) -> tuple[Tensor | Half, list[bool]]:
        """All gradients times a number, and which layers have one; zero where there is none or the step is left out."""
        tables = self.tables[stack.shape.device]
        own, plain = tables.reads(stack), not whole and self.is_plain
        if own is not None and plain and adamw.takes(self, own):
            return own.like[:0], [True] * len(stack.specs)
        if own is not None:
            half = plain and len(stack.specs) == stack.groups and takes_half(stack) and not looks_ahead(stack)
            return tables.gather(own, scale, finite, largest if half else None), [True] * len(stack.specs)
        grad, active = stack.gradient(scale)
        return torch.where(finite.to(grad.device), grad, 0.0).contiguous(), active

    def _all_finite(self, scale: float, sizes: dict[torch.device, GradientSizes]) -> dict[torch.device, Tensor]:
        """Whether this step is taken, as each device sees it; else gradients are zero.

        A gradient that overflows when it is scaled is not finite, nor is one whose squares would overflow.
        """
        if not sizes:  # nothing has a gradient
            return {device: torch.ones((), dtype=torch.bool, device=device) for device in self.tables}
        grows = abs(scale) > 1
        flags = [(s.largest * abs(scale) < MOST_GRADIENT).all() if grows else s.finite for s in sizes.values()]
        taken = flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).all()
        self.health.count("skipped_steps", (~taken).to(torch.int64))
        return {stack.shape.device: taken.to(stack.shape.device) for stack in self.stacks}

    @property
    def is_plain(self) -> bool:
        """Whether directions are taken as they are: not clipped, grafted, or asked what they would change."""
        return self.clip.kind is None and self.graft.method is None and not self.damping.adaptive

    def parts(self, contexts: Sequence[Context], gathered: Gathered) -> list[Part]:
        """Everything a step knows of each stack."""
        found, replays = [], {device: self._replay_on(device) for device in self.tables}
        read = {device: list[bool]() for device in self.tables}
        for stack, context, grad, active, largest in zip(
            self.stacks, contexts, gathered.grads, gathered.active, gathered.largest, strict=True
        ):
            device = stack.shape.device
            own = grad if multiplies_in_fp16(stack) else None
            finite = gathered.all_finite[device]
            context.device_step = DeviceStep(finite, own, largest, replays[device], gathered.scale, read[device])
            found.append(Part(stack, context, grad, active, grad, rates=self.tables[device].rate_of(stack)))
        return found

    # --- what rules learn --------------------------------------------------------------------------------------

    def learn(self, parts: Sequence[Part], seen: dict[str, Sums], by_gradient: bool = True) -> None:
        """Statistics, and decompositions whose turn it is."""
        for part in parts:
            stack, rule, context, requires = part.stack, part.stack.rule, part.context, part.stack.requires
            if not requires.learns:  # AdamW's stacks: in those of norm layers every number is a group
                part.before = self.former_state(part)
                continue
            known, on = observed(stack), stack.by_group(part.active)
            # Factors of a gradient may be averaged only after this step's refreshes, by the rule's direction. A rule
            # that has not begun does both at once.
            of_gradients = requires.refreshes and not (requires.inputs or requires.outgrads)
            after = of_gradients and not requires.gradient and any(freshness(stack))
            if of_gradients and not after and (context.observes or not requires.gradient):
                remember(stack, on)
            found = self.accumulator.observation(stack, seen) if seen and rule is self.rule else None
            # Of an earlier batch: no part of this step, so that layers without a gradient keep them too.
            if found is not None:
                deferred_statistics.take_all(stack)
            else:
                deferred_statistics.take_due(stack, context.step, self.every)
            part.before = self.former_state(part)
            if found is not None:
                self.statistics.take(stack, found, context, whole=part.before is None)
                deferred_statistics.take_due(stack, context.step, self.every)
                # Of layers that are not active the step takes all of it back.
                remember(stack, [seen and active for seen, active in zip(found.known, on, strict=True)])
            if by_gradient:
                self.learn_gradient(part)
            if requires.refreshes:
                self._refresh_due(stack, context, on, known)
            if after and any(new and not seen for new, seen in zip(on, known, strict=True)) and context.is_taken():
                remember(stack, on)
            if requires.examples:
                examples = None if found is None else replace(found, A=None, G=None)
                part.examples = self.examples.run(stack, examples, context, on)

    @staticmethod
    def learn_gradient(part: Part) -> None:
        """The gradient's own statistics, where this step takes some."""
        if part.context.observes and part.stack.requires.gradient:
            part.stack.rule.observe(part.stack.state, Observation(gradient=part.handed), part.context)

    def _refresh_due(self, stack: Stack, context: Context, active: Sequence[bool], before: Sequence[bool]) -> None:
        """All groups at the first step and, while statistics are young, at its doublings; then each in its turn. Not
        what the step will take back, groups that are not active, unless other processes may see them otherwise.

        `before`: which had statistics before this step, which count again if it is left out.
        """
        step, fresh = context.step, freshness(stack)
        active = active if self.processes.count == 1 else [True] * stack.groups
        due = list[slice]()
        for turn in stack.memory["turns"]:
            on = is_due(step, turn.slot, self.every)
            if on or not all(fresh[turn.groups]):
                due += [groups for groups in known_runs(stack, turn.groups, active) if on or not all(fresh[groups])]
        if not due:  # by the clock and what all processes know: others have nothing to share either
            return
        owners = self.processes.owners([float(groups.stop - groups.start) for groups in due])
        for groups, owner in zip(due, owners, strict=True):
            if not all(fresh[groups]) and not context.is_taken():  # the host asks the device at first steps alone
                observed(stack)[groups] = before[groups]
                continue
            if owner == self.processes.rank:
                stack.rule.refresh(stack.state, groups, context)
            if not all(fresh[groups]):
                stack.state["fresh"][groups] = 1
                fresh[groups] = [True] * (groups.stop - groups.start)
        if self.processes.count > 1:
            pairs = zip(due, owners, strict=True)
            self.processes.share([(owner, X) for groups, owner in pairs for X in stack.renewed(groups)])

    def _replay_on(self, device: torch.device) -> Callable[..., bool] | None:
        """What captures refreshes: where there is one process, a damping that stays as it is, and a GPU."""
        steady = self.damping.schedule is None and not self.damping.adaptive
        repeats = device.type == "cuda" and steady and self.processes.count == 1
        return partial(self.graphs.run, device=device) if repeats else None

    # --- the update --------------------------------------------------------------------------------------------

    def descend(self, parts: Sequence[Part]) -> None:
        """Directions, and what is made of them; one stack after the other where none has to wait for all others."""
        if self.clip.kind is None and not self.damping.adaptive:
            for part in parts:
                if adamw.is_gathered(part.grad):
                    self._finish(part, self._direction(part), 1.0)
                else:
                    adamw.step_(part, self.tables[part.stack.shape.device])
            return
        directions = [self._direction(part) for part in parts]
        # Before momentum: an average of former directions may have any sign beside the present gradient.
        factor = self._clip_factor(parts, directions)
        self.health.count("clipped_steps", (factor < 1).to(torch.int64) if isinstance(factor, Tensor) else factor < 1)
        if not self.damping.adaptive:
            for part, D in zip(parts, directions, strict=True):
                self._finish(part, D, factor)
            return
        updates = []
        for part, D in zip(parts, directions, strict=True):
            updates.append(self._with_momentum(part, unscaled(D), factor))
            self._subtract(part, updates[-1])
        lrs = [part.context.lr for part in parts]
        self.damping.predict(self.stacks, updates, [part.grad for part in parts], lrs)

    def _direction(self, part: Part) -> Tensor | Scaled:
        """What a stack subtracts, before the learning rate; layers without a gradient keep their state."""
        stack, context = part.stack, part.context
        if not any(part.active):
            return self._none(part)
        as_tensor = self.damping.adaptive or self.graft.method or self.clip.kind == "norm"
        context.gradient = part.handed
        if part.examples is not None:
            stack.rule.observe(stack.state, part.examples, context)
        if self.size.sets(stack):
            D = self._of_adams_size(part)
        else:
            D: Any = stack.rule.direction(stack.state, part.handed, context)
            D = unscaled(D) if as_tensor else D
        if self.graft.method is not None:
            D = self.graft.apply(stack, part.handed, D, context)
        if part.before is not None:
            stack.restore(part.before, part.active)
        return D

    def _of_adams_size(self, part: Part) -> Scaled:
        """What `UpdateSize.direction` is, without a pass of its own: the ratio is one more scale to divide by."""
        stack = part.stack
        D, wanted = self.size.unsized(stack, part.handed, part.context)
        C, scales = parts(D)
        C, size = spectral_cap.capped(part, C)
        by = divisor(
            self.size, stack, wanted, size, scales, part.lr, self.tables[stack.shape.device].weight_norms(stack)
        )
        return Scaled(C.contiguous(), (*scales, by.to(C.device)))

    def _clip_factor(self, parts: Sequence[Part], directions: Sequence[Tensor | Scaled]) -> float | Tensor:
        """What all directions are multiplied by, at most 1: a tensor on the device."""
        if self.clip.kind is None:
            return 1.0
        if self.clip.kind == "norm":
            terms, bound = [(1.0, dot(D, D)) for D in map(unscaled, directions)], self.clip.bound**2
        else:
            terms = [
                (part.lr**2, dot(D, part.grad))
                for part, D in zip(parts, directions, strict=True)
                if part.stack.requires.matrices_only
            ]
            bound = self.clip.bound
        if not terms:
            return 1.0
        total = torch.stack([weight * term.to(terms[0][1]) for weight, term in terms]).sum()
        return torch.where(total > 0, (bound / total).sqrt().clamp(max=1.0), 1.0)

    def _finish(self, part: Part, D: Tensor | Scaled, factor: float | Tensor) -> None:
        """Momentum, decay and descent in one pass, where there are kernels and every layer has a gradient."""
        stack, tables = part.stack, self.tables[part.stack.shape.device]
        factor = self._factor(part, factor)
        own = tables.pieces.get(id(stack)) if all(part.active) else None
        if own is None:
            self._subtract(part, self._with_momentum(part, unscaled(D).to(stack.shape.dtype), factor))
            return
        mu, momentum = self._momentum(part), None
        if mu:
            if "momentum" not in stack.state:
                stack.state["momentum"] = stack.shape.zeros(stack.shape.outputs, stack.shape.inputs)
            momentum = stack.state["momentum"] = own.laid_out(stack.state["momentum"])
        by = factor if isinstance(factor, Tensor) else None
        tables.finish_(own, D, momentum, mu, stack.group["nesterov"], by, part.context.device_step.all_finite)

    def _subtract(self, part: Part, update: Tensor) -> None:
        """``W ← (1 − η·decay) W − η · update`` for active layers, by plain torch; nothing in a step left out."""
        stack, tables = part.stack, self.tables[part.stack.shape.device]
        finite, shape = part.context.device_step.all_finite.to(update.device), stack.shape
        tables.forget_norms()
        rates = {name: tables.rate_of(stack, name).to(update) for name in (None, *stack.own_groups)}
        for (spec, groups), on in zip(stack.layers, part.active, strict=True):
            if not on:
                continue
            own = update[groups, : shape.own_outputs, : shape.own_inputs]
            for piece, entries in spec.form.split(own):
                target = piece.of(stack.params)
                keep, lr = rates[piece.name if piece.name in rates else None]
                new = keep * target.to(update.dtype) - lr * entries
                target.copy_(torch.where(finite, new.to(target.dtype), target))

    def _with_momentum(self, part: Part, D: Tensor, factor: float | Tensor) -> Tensor:
        """``μ · buffer + factor · D``, kept; with Nesterov's, one step ahead of it."""
        stack, mu, factor = part.stack, self._momentum(part), self._factor(part, factor)
        D = D if isinstance(factor, float) and factor == 1.0 else D * factor
        if not mu:
            return D
        if "momentum" not in stack.state:
            stack.state["momentum"] = torch.zeros_like(D)
        old = stack.state["momentum"]  # in place: a captured step finds it where it was
        buffer = torch.where(part.context.device_step.all_finite.to(D.device), D + mu * old, old)
        for (_, groups), on in zip(stack.layers, part.active, strict=True):
            if not on:
                buffer[groups] = old[groups]
        old.copy_(buffer)
        return D + mu * buffer if stack.group["nesterov"] else buffer

    # --- checkpoints -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """All deferred statistics."""
        for stack in self.stacks:
            deferred_statistics.take_all(stack)


def _has(stack: Stack, side: str, power: float | None) -> bool:
    """Whether a refresh costs something on a side."""
    return power is not None and (side in stack.state or not stack.state)


def multiplies_in_fp16(stack: Stack) -> bool:
    """Whether the rule multiplies the gradient by matrices that are kept in fp16."""
    if "multiplies in fp16" not in stack.memory:
        entries = kept(stack.state)
        stack.memory["multiplies in fp16"] = any(getattr(entry, "multiplies_in_fp16", False) for entry in entries)
    return stack.memory["multiplies in fp16"]


def takes_half(stack: Stack) -> bool:
    """Whether the rule does nothing with the gradient but rotate it, in fp16."""
    if "takes half" not in stack.memory:
        entries = kept(stack.state)
        stack.memory["takes half"] = stack.requires.only_rotates and any(
            getattr(entry, "takes_half", False) for entry in entries
        )
    return stack.memory["takes half"]


def looks_ahead(stack: Stack) -> bool:
    """Whether the step adds a gradient to AdamW's average before the rule has it: Nesterov's momentum."""
    requires = stack.requires
    averages = requires.averages or requires.own_momentum is not None
    return bool(stack.group.get("nesterov") and stack.group.get("momentum")) and not averages


def dot(X: Tensor | Scaled, Y: Tensor) -> Tensor:
    """``⟨X, Y⟩``; on a GPU in one pass, whatever their types."""
    if isinstance(X, Scaled):
        return elementwise.dot(X, Y.contiguous())
    if X.device.type == "cpu" or X.dtype == torch.float64:
        return (X * Y).sum()
    return elementwise.dot(X.contiguous(), Y.contiguous())


def known_runs(stack: Stack, groups: slice, active: Sequence[bool]) -> list[slice]:
    """Active neighbours that have statistics, as far as the host knows: one layer that is never called stops no
    other."""
    seen, fresh, runs = observed(stack), freshness(stack), list[slice]()
    for place in range(groups.start, groups.stop):
        if active[place] and (seen[place] or fresh[place]):
            start = runs.pop().start if runs and runs[-1].stop == place else place
            runs.append(slice(start, place + 1))
    return runs


def observed(stack: Stack) -> list[bool]:
    """Which groups have statistics, as far as the host knows: it asks the device about a state that was loaded."""
    if "observed" not in stack.memory:
        loaded = [factor.trace() > 0 for factor in stack.factors] if stack.memory.get("loaded") else []
        stack.memory["observed"] = torch.stack(loaded).all(0).tolist() if loaded else [False] * stack.groups
    return stack.memory["observed"]


def remember(stack: Stack, known: Sequence[bool]) -> None:
    """That groups have statistics, in a list of its own."""
    stack.memory["observed"] = [old or new for old, new in zip(observed(stack), known, strict=True)]
