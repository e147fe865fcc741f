"""One step over all stacks: statistics are observed, decompositions refreshed, directions made, sized and subtracted.

`Executor` is how that is carried out. `EagerExecutor`, below, is the order in which a step happens: the host looks at
values whenever it wants to know. On a GPU `cuda.executor.AsynchronousExecutor` takes the same steps without waiting
for the device.

How large an update is: as the member's formula has it, or (``scale="adam"``) as large as AdamW's. Then a matrix member
is AdamW with another direction. It keeps AdamW's two moments of the gradient, m and v; the rule preconditions m instead
of the gradient, and the result takes the norm of AdamW's own update:

    W ← (1 − η·decay) W − η · D ‖m̂/(√v̂ + ε)‖ / ‖D‖,    D = P⁻ᵖ m Q⁻ᑫ

matrix by matrix, and cut along its largest singular value where that is too large (`spectral_cap`). So η, its schedule
and the decay mean what they mean for AdamW, whatever the scale of the loss: D is linear in m, relative damping makes P
and Q free of units, and ε is relative to the first gradient (`unit_of`). Of large matrices the norm of AdamW's update
is measured on some rows, and v is kept for these alone (`rows_apart`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.sharded import local
from layerwise.optim.backend import norms
from layerwise.optim.rule import Context, Health, Observation, UpdateRule
from layerwise.optim.statistics.accumulate import Accumulator, Sums
from layerwise.optim.step.clip import Clip
from layerwise.optim.step.damping import Damping
from layerwise.optim.step.graft import Graft, begin_adam
from layerwise.optim.step.refresh_schedule import RefreshSchedule, freshness, give_turns
from layerwise.optim.step.spectral_cap import capped
from layerwise.optim.step.stack import Stack, gradients

BETAS = (0.9, 0.999)
"""AdamW's; the first is the group's momentum, where it has one."""
EPS = 1e-8
MOST_CHANGE = 0.2
"""Of its norm that a step may change a matrix by, weight decay aside; see `UpdateSize.bounded`."""
SEEN, LEAST_SEEN, LEAST_ENTRIES = 128, 512, 2**18
"""Rows of a matrix, about, by which the norm of AdamW's update is measured, and the size from which not all are."""
USUAL_GRADIENT = 1e-3
"""The root mean square of a gradient beside which AdamW's ε = 1e-8 is usual."""


@dataclass(frozen=True)
class UpdateSize:
    """ "formula": the direction is what the rule says. "adam": of the size of AdamW's update."""

    method: str = "formula"
    betas: tuple[float, float] | None = None
    """AdamW's, where they were given."""

    def __post_init__(self) -> None:
        if self.method not in ("adam", "formula"):
            raise InputError(not_one_of("scale", self.method, ("adam", "formula")))

    def check(self, rule: UpdateRule, graft: str | None) -> None:
        """What an update of AdamW's size cannot be combined with, and what only goes with one."""
        if self.method == "formula":
            if self.betas is not None:
                raise InputError(
                    describe(
                        f'betas={self.betas!r} with scale="formula", which has no moments of AdamW',
                        'momentum=β₁, or scale="adam"',
                        "pass one of them",
                    )
                )
            return
        if graft is not None:
            raise InputError(
                describe(
                    f'graft={graft!r} with scale="adam", which sets the norm itself',
                    'scale="formula" with graft, or scale="adam" alone',
                    "leave graft out",
                )
            )
        if not rule.requirements().matrices_only:
            raise InputError(
                describe(
                    f'scale="adam" for {rule.name}, whose formula says how large its update is',
                    "a member that preconditions matrices",
                    "leave scale out",
                )
            )

    def sets(self, stack: Stack) -> bool:
        """Whether the updates of a stack are AdamW's in size."""
        return self.method == "adam" and stack.requires.matrices_only

    def direction(self, stack: Stack, grad: Float[Tensor, "K O I"], context: Context, lr: float | Tensor) -> Tensor:
        """That of the averaged gradient, of the norm of AdamW's update and within bounds."""
        averaged, wanted = self._averaged(stack, grad, context)
        D = stack.rule.direction(stack.state, averaged, context)
        D = (D if isinstance(D, Tensor) else stack.backend.tensor(D)).to(stack.shape.dtype)
        size = norms(D)
        ratio = self.ratio(stack, wanted, size, lr).to(D.dtype).view(-1, 1, 1)
        shape = stack.shape
        D = D if stack.requires.flat_spectrum else capped(D, size, (shape.own_outputs, shape.own_inputs))
        return D * ratio  # zeros stay so

    def unsized(self, stack: Stack, grad: Any, context: Context) -> tuple[Any, Float[Tensor, "K"]]:
        """The same direction as the rule leaves it, and the norm of AdamW's update; for `ratio`."""
        averaged, wanted = self._averaged(stack, grad, context)
        return stack.rule.direction(stack.state, averaged, context), wanted

    def ratio(self, stack: Stack, wanted: Tensor, size: Tensor, lr: float | Tensor) -> Float[Tensor, "K"]:
        """What a direction of some norm is multiplied by, group by group."""
        limits = torch.finfo(size.dtype)
        return (self.bounded(stack, wanted, lr) / size.clamp_min(limits.tiny)).clamp(max=limits.max)

    def _averaged(self, stack: Stack, grad: Any, context: Context) -> tuple[Any, Float[Tensor, "K"]]:
        """What the rule gets in the gradient's place, and the norm of AdamW's update."""
        mu, (b1, b2) = 0.0 if stack.requires.own_momentum else stack.group["momentum"], self.betas or BETAS
        state, apart = stack.state, _rows_apart(stack)
        _begin_moments(stack)
        moments = {"m": state["graft_m"], "v": state["graft_v"], "steps": state["graft_steps"]}
        wanted = context.backend.adam_norms_(moments, grad, (mu or b1, b2), EPS * context.unit, context, apart)
        state["graft_m"], state["graft_v"] = m, _ = moments["m"], moments["v"]  # a backend may lay them out anew
        if not mu or stack.requires.averages:  # none is wanted, or the rule has its own
            return grad, wanted
        return (grad.lerp(m, mu) if stack.group["nesterov"] else m), wanted

    @staticmethod
    def bounded(stack: Stack, wanted: Float[Tensor, "K"], lr: float | Tensor) -> Float[Tensor, "K"]:
        """So much of a norm that a step of η changes no matrix by more than `MOST_CHANGE` of its own.

        A matrix that begins at zero would never move: its norm counts as no less than that of one which torch
        initialises, entries uniform within ``±1/√I``.
        """
        most = MOST_CHANGE * weight_norms(stack).to(wanted).clamp_min(least_norm(stack))
        step = (lr * wanted).clamp_min(torch.finfo(wanted.dtype).tiny)
        return wanted * (most / step).clamp(max=1.0)


def rows_apart(outputs: int, inputs: int) -> int:
    """1, or every how many rows of a large matrix one is enough to know the norm of AdamW's update, within 1 % (the
    median) to 9 % (decision 31).

    An odd number, which seldom divides the width of a head, so that rows of all parts of it are seen.

    >>> [rows_apart(*shape) for shape in ((512, 64), (512, 512), (768, 768), (2304, 768), (3072, 768))]
    [1, 3, 5, 17, 23]
    """
    if outputs < LEAST_SEEN or outputs * inputs < LEAST_ENTRIES:
        return 1
    return (outputs // SEEN - 1) // 2 * 2 + 1


def moment_rows(outputs: int, inputs: int, own_momentum: bool) -> tuple[int, int]:
    """How many rows AdamW's m and v have, of which only the norm of the update is wanted; m is all there, unless the
    rule has a momentum of its own.

    >>> moment_rows(768, 768, own_momentum=False), moment_rows(768, 768, own_momentum=True)
    ((768, 154), (154, 154))
    """
    seen = len(range(0, outputs, rows_apart(outputs, inputs)))
    return (seen if own_momentum else outputs), seen


def _rows_apart(stack: Stack) -> int:
    return rows_apart(stack.shape.own_outputs, stack.shape.own_inputs)


def _begin_moments(stack: Stack) -> None:
    """AdamW's moments, unless they are there. Of a checkpoint with more rows those are taken that are still kept."""
    shape, state, apart = stack.shape, stack.state, _rows_apart(stack)
    of_m, of_v = moment_rows(shape.own_outputs, shape.own_inputs, stack.requires.keeps_momentum)
    rows = {"m": shape.outputs if of_m == shape.own_outputs else of_m, "v": shape.outputs if apart == 1 else of_v}
    known = {name: state[f"graft_{name}"].shape[1] for name in rows if f"graft_{name}" in state}
    if known == rows:
        return
    if all(known.get(name) in (rows[name], shape.outputs) for name in rows):
        for name in rows:
            if known[name] != rows[name]:
                state[f"graft_{name}"] = state[f"graft_{name}"][:, ::apart][:, : rows[name]].clone()
        return
    if known.get("v") in (rows["v"], shape.outputs):  # m was kept by a rule itself, in a form of its own
        if known["v"] != rows["v"]:
            state["graft_v"] = state["graft_v"][:, ::apart][:, : rows["v"]].clone()
        state["graft_m"] = shape.zeros(rows["m"], shape.inputs)
        return
    state |= {f"graft_{name}": shape.zeros(count, shape.inputs) for name, count in rows.items()}
    state["graft_steps"] = shape.zeros()


def least_norm(stack: Stack) -> float:
    """What the norm of a matrix counts as at least: that of one which torch initialises."""
    return math.sqrt(stack.shape.own_outputs / 3)


def weight_norms(stack: Stack) -> Float[Tensor, "K"]:
    """Of each matrix of weights, without a copy where every parameter is one."""
    if stack.weight_norms is not None:
        return stack.weight_norms
    found = []
    for spec in stack.specs:
        if spec.form.groups != 1 or len(spec.form.parts) != 1:
            return norms(stack.weight())
        p = stack.params[spec.parameters[0]] if stack.plain else spec.form.parts[0].of(stack.params)
        found.append(p.detach())
    return torch.stack(torch._foreach_norm(found, 2, stack.shape.dtype))  # pyright: ignore[reportPrivateImportUsage]


def unit_of(params: Iterable[nn.Parameter]) -> float | None:
    """The root mean square of all gradients over `USUAL_GRADIENT`: what ε = 1e-8 is multiplied by, so that a loss that
    is multiplied by a number takes the same steps. None where there is no gradient, or none that is finite."""
    grads = [local(p.grad) for p in params if p.grad is not None]
    if not grads:
        return None
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    found = torch._foreach_norm(dense, 2, torch.float64)  # pyright: ignore[reportPrivateImportUsage]
    squares = sum(norm**2 for norm in torch.stack([norm.to(dense[0].device) for norm in found]).tolist())
    count = sum(g.numel() for g in grads)
    unit = math.sqrt(squares / max(count, 1)) / USUAL_GRADIENT
    return unit if 0 < unit < math.inf else None


# --- a step ------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """One stack's part of a step."""

    stack: Stack
    context: Context
    grad: Any
    """``[K, O, I]``; a GPU may have gathered it in half precision (`Requirements.only_rotates`)."""
    active: list[bool]
    """Which layers have a gradient."""
    handed: Any
    """What the rule gets in the gradient's place; the gradient, mostly."""
    before: dict[str, Tensor] | None = None
    """The state as it was, where some layers have no gradient and keep theirs."""
    examples: Observation | None = None
    """On a GPU: examples that the step itself looks at, when its direction is made."""
    rates: Tensor | None = None
    """On a GPU: ``(1 − η·decay, η)`` on the device, where a captured step reads them; None: the host's are taken."""

    @property
    def lr(self) -> float | Tensor:
        """η, wherever it is."""
        return self.context.lr if self.rates is None else self.rates[1]


SolveTogether = Callable[[list[Part], dict[str, Sums]], None]
"""For members that look at all layers at once: replaces `Part.handed`."""


def averages_before(own_momentum: str | None, sized: bool, is_own_rule: bool) -> bool:
    """Whether a direction has no momentum: where the gradient was averaged before, where the rule takes the option
    itself, or is a fallback with its own."""
    return sized or own_momentum == "momentum" or (own_momentum is not None and not is_own_rule)


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
        found: dict[str, dict[str, Tensor]] = {}
        for stack in self.stacks:
            found |= stack.backend.pending(stack, self.every, step)
        return found

    def resume(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Take that up again."""
        for stack in self.stacks:
            stack.backend.resume(stack, saved)

    def begin_moments(self) -> None:
        """What a first step would add to the state of each stack, as zeros; for who looks at it before."""
        for stack in self.stacks:
            self._begin_moments(stack)
            if self.momentum_of(stack):
                stack.state["momentum"] = stack.shape.zeros(stack.shape.outputs, stack.shape.inputs)
            if stack.requires.refreshes:
                freshness(stack)

    def _begin_moments(self, stack: Stack) -> None:
        """AdamW's, where its update or its norm is wanted and they are not there yet, or of other rows."""
        if self.size.sets(stack):
            _begin_moments(stack)
        elif stack.requires.matrices_only and self.graft.method == "adam":
            begin_adam(stack)

    def former_state(self, part: Part) -> dict[str, Tensor] | None:
        """What layers without a gradient get back after the step; None, where all have one."""
        if all(part.active):
            return None
        self._begin_moments(part.stack)  # else a step might give them other rows than are copied
        if part.stack.requires.refreshes:
            freshness(part.stack)
        return part.stack.copied()

    @staticmethod
    def _none(part: Part) -> Tensor:
        """The direction of a stack no layer of which has a gradient: its rule is not asked, and begins when one has."""
        if part.before is not None:
            part.stack.restore(part.before, part.active)
        return torch.zeros_like(part.grad)

    def _momentum(self, part: Part) -> float:
        return self.momentum_of(part.stack)

    def momentum_of(self, stack: Stack) -> float:
        """Momentum of the direction, if it has one (`averages_before`)."""
        own, sized = stack.requires.own_momentum, self.size.sets(stack) or stack.requires.averages
        return 0.0 if averages_before(own, sized, stack.rule is self.rule) else stack.group["momentum"]

    def _total(self, value: float) -> float:
        """A sum over all stacks, wherever they are."""
        return value

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
        for stack, context, (grad, active) in zip(self.stacks, contexts, gradients(self.stacks, scale), strict=True):
            parts.append(Part(stack, context, grad, active, grad))
        for part in parts:
            if not math.isfinite(float(part.grad.sum())) and not bool(torch.isfinite(part.grad).all()):
                self.health.skipped_steps += 1
                return
        if together is not None:
            together(parts, seen)
        observed = [self._learn(part, seen) for part in parts]
        self._look_at_examples(parts, observed)
        self._descend(parts)

    def _learn(self, part: Part, seen: dict[str, Sums]) -> Observation | None:
        """Statistics, and decompositions that are due; returns what was observed."""
        stack, rule, context = part.stack, part.stack.rule, part.context
        observed = self.accumulator.observation(stack, seen) if seen and rule is self.rule else None
        part.before = self.former_state(part)
        if observed is not None:
            rule.observe(stack.state, replace(observed, recorded=[]) if observed.recorded else observed, context)
        if context.observes and stack.requires.gradient:
            rule.observe(stack.state, Observation(gradient=part.handed), context)
        if stack.requires.refreshes:
            self.schedule.run(stack, context, stack.by_group(part.active))
        return observed

    def _look_at_examples(self, parts: Sequence[Part], observed: Sequence[Observation | None]) -> None:
        """Examples one by one, in the bases as they are now."""
        for part, known in zip(parts, observed, strict=True):
            if known is not None and known.recorded:
                part.stack.rule.observe(part.stack.state, replace(known, A=None, G=None), part.context)

    def _descend(self, parts: Sequence[Part]) -> None:
        """Directions, and what is made of them: W ← (1 − η·decay) W − η · momentum(clip(graft(direction)))."""
        directions, factor = [self._direction(part) for part in parts], 1.0
        if self.clip.kind is not None:
            # Before momentum: an average of former directions may have any sign beside the present gradient.
            grads, lrs = [part.grad for part in parts], [part.context.lr for part in parts]
            factor = self.clip.factor(self.stacks, directions, grads, lrs, self._total)
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
            self.damping.predict(self.stacks, updates, [part.grad for part in parts], lrs, self._total)

    def _direction(self, part: Part) -> Tensor:
        """What a stack subtracts, before the learning rate; layers without a gradient keep their state."""
        stack, context = part.stack, part.context
        if not any(part.active):
            return self._none(part)
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
