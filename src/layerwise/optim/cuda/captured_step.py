"""Whole steps captured as CUDA graphs.

A step is some hundred kernels, and of a small model the host needs longer to launch them than the device to run them.
So it is captured, in two graphs. The first gathers gradients, asks whether they are finite and takes their
statistics; the second makes directions and subtracts them. Between them are what the host decides: statistics of inputs
and output gradients, and refreshes, which have graphs of their own.

A graph reads and writes the same memory whenever it is replayed. Where gradients lie and learning rates are therefore
tables on the device (`pieces`); gradients that kernels cannot find by a table are copied to one place; and whatever
else the host knows of a step is part of the key under which it is captured. A step that is not like those before, such
as one with a gradient missing, is taken as it is.
"""

from collections.abc import Hashable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from layerwise.optim.cuda.graphs import Graphs
from layerwise.optim.rule import Context, Requirements, UpdateRule
from layerwise.optim.statistics.accumulate import Sums

SETTLED = 3
"""Steps that are taken as they are, while state is made and kernels are compiled."""

KEPT = 16
"""Variants that are kept of each of the two graphs: every one holds the memory of a step's gradients and results, and
batches may have many sizes."""


class Key:
    """What graphs are found by: hashed once, since it has some hundred numbers and is looked up six times a step."""

    __slots__ = ("hashed", "told")

    def __init__(self, told: Hashable) -> None:
        self.told, self.hashed = told, hash(told)

    def __hash__(self) -> int:
        return self.hashed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.told == other.told


class CapturedStep:
    """The captured steps of an optimizer's stacks."""

    def __init__(self, executor: Any, wanted: bool | None = None) -> None:
        self._executor, self._wanted = executor, wanted
        self._params = list({id(p): p for stack in executor.stacks for p in stack.params.values()}.values())
        # Apart from each other and from those of refreshes: what the first makes is still read in the second, and
        # graphs that share their memory may use it for something else in between.
        self._gathering, self._descending = Graphs(KEPT), Graphs(KEPT)
        self._places_of_sizes: dict[torch.device, dict] = {}
        """Not shared with steps that are taken as they are, which would replace the index that graphs read."""
        self._made: dict[Hashable, Any] = {}
        """What the captured first graph leaves for the second, by its key."""
        self._held: list[Tensor] = []
        self._copied: list[torch.nn.Parameter] = []
        """Parameters whose gradients are copied there."""
        self._places: tuple[Any, ...] | None = None
        self._last: Key | None = None
        """That of the last step, which is mostly that of the next."""
        self._allowed: bool | None = None
        self._steps = 0

    def run(self, contexts: Sequence[Context], seen: dict[str, Sums], scale: float) -> bool:
        """Take a step, if it is one that can be captured; returns whether it was taken."""
        if not self._possible():
            return False
        self._steps += 1
        grads = self._gradients() if self._steps > SETTLED else None
        if grads is None or not self._lies_as_before():
            return False
        if grads:
            torch._foreach_copy_(self._held, grads)  # pyright: ignore[reportPrivateImportUsage]
        key = self._key(contexts, scale)
        gathered, fixed = self._gather(key, contexts, scale)
        parts = self._executor.parts(contexts, gathered)
        self._executor.learn(parts, seen, by_gradient=False)
        if any(part.examples is not None for part in parts):
            self._executor.descend(parts)  # examples, which are others every time
        else:
            self._descend(key, parts, fixed)
        return True

    # --- what can be captured ------------------------------------------------------------------------------

    def _possible(self) -> bool:
        """Whether steps of this optimizer can be: one GPU, one process, and rules that are known to allow it."""
        if self._allowed is None:
            self._allowed = self._wanted is not False and len(self._params) > 0 and self._allows()
        return self._allowed and capturable(self._params[0].device)

    def _allows(self) -> bool:
        executor, device = self._executor, self._params[0].device
        return (
            all(p.device == device for p in self._params)
            and executor.processes.count == 1
            and executor.damping.schedule is None
            and not executor.damping.adaptive
            and all(stack.requires.capturable for stack in executor.stacks)
        )

    def _lies_as_before(self) -> bool:
        """Whether everything lies where it lay at the last step; if not, graphs are begun anew."""
        kept, (tables,) = list[Tensor](), self._executor.tables.values()
        for stack in self._executor.stacks:
            for entry in stack.state.values():  # as `rule.tensors` has them, without their names
                if isinstance(entry, Tensor):
                    kept.append(entry)
                else:
                    kept += entry.tensors().values()
        state, order = [X.data_ptr() for X in kept], [X.stride() for X in kept]
        held = [X.data_ptr() for X in self._held]
        if self._places is not None and self._places[0] is tables.places and self._places[1:] == (state, order, held):
            return True
        self._places = (tables.places, state, order, held)
        self._gathering, self._descending = Graphs(KEPT), Graphs(KEPT)
        self._made.clear()
        return False

    def _gradients(self) -> list[Tensor] | None:
        """Those that no table has, if all gradients are there and these dense; and room to hold them."""
        (tables,), stacks = self._executor.tables.values(), self._executor.stacks
        if tables.complete:
            self._copied, self._held = [], []
            return []
        grads = [p.grad for p in self._params]
        if any(grad is None or grad.layout is not torch.strided for grad in grads):
            return None
        by_table = {id(p) for stack in stacks if tables.reads(stack) is not None for p in stack.params.values()}
        self._copied = [p for p in self._params if id(p) not in by_table]
        found = [p.grad for p in self._copied if p.grad is not None]
        if len(self._held) != len(found) or any(
            h.shape != g.shape or h.dtype is not g.dtype or h.stride() != g.stride()
            for h, g in zip(self._held, found, strict=True)
        ):
            self._held = [torch.empty_like(grad) for grad in found]
        return found

    def _key(self, contexts: Sequence[Context], scale: float) -> Key:
        """All that the host decides in a step, but for learning rates and decay; rules may be changed too."""
        (tables,), stacks = self._executor.tables.values(), self._executor.stacks
        told = list[Hashable]((scale, tables.aligned, *map(id, self._copied)))
        for stack, c in zip(stacks, contexts, strict=True):
            group = stack.group
            told += (c.observes and _observes_in_graphs(stack.requires), c.damping, c.examples, c.unit)
            told += (group.get("momentum"), group.get("nesterov"), group.get("factor_decay"), group.get("betas"))
        rules = {id(stack.rule): stack.rule for stack in stacks}  # few, and which is whose stays
        told += [tuple(settings(rule)) for rule in rules.values()]
        key = tuple(told)
        if self._last is None or self._last.told != key:
            self._last = Key(key)
        return self._last

    # --- the two graphs ------------------------------------------------------------------------------------

    def _gather(self, key: Hashable, contexts: Sequence[Context], scale: float) -> tuple[Any, bool]:
        """Gradients with the mask, and whether they lie where the recording left them."""
        made: list[Any] = []

        def call() -> None:
            with _in_place_of_gradients(self._copied, self._held):
                gathered = self._executor.gather(scale, self._places_of_sizes)
            for part in self._executor.parts(contexts, gathered):
                self._executor.learn_gradient(part)
            made.append(gathered)

        fixed = self._gathering.run(key, call, self._params[0].device)
        if made and fixed:  # captured just now
            self._made[key] = made[-1]
        return (self._made[key] if fixed else made[-1]), fixed

    def _descend(self, key: Hashable, parts: Sequence[Any], fixed: bool) -> None:
        """Directions and descent; captured, if what they read will be in the same place again."""
        device = self._params[0].device
        replayed = self._descending.run(key, lambda: self._executor.descend(parts), device, capture=fixed)
        if replayed:
            torch.autograd.graph.increment_version(self._params)


def _observes_in_graphs(requires: Requirements) -> bool:
    """Whether graphs of a step with statistics differ from those of others: moments of inputs and output gradients are
    taken outside of them, and a rule that treats entries one by one (AdamW, under every member) takes none."""
    return requires.gradient or not (requires.inputs or requires.outgrads or requires.elementwise)


def settings(rule: UpdateRule) -> list[Hashable]:
    """A rule's numbers and names, such as a momentum that is raised while a model warms up."""
    plain = (bool, int, float, str)
    return [
        (name, value)
        for name, value in vars(rule).items()
        if isinstance(value, plain) or (isinstance(value, tuple) and all(isinstance(x, plain) for x in value))
    ]


def capturable(device: torch.device) -> bool:
    """Whether graphs can be captured on a device now: it has them, and nobody else is recording."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


@contextmanager
def _in_place_of_gradients(params: Sequence[torch.nn.Parameter], held: Sequence[Tensor]):
    """While gradients are gathered, those that are held take their places."""
    grads = [p.grad for p in params]
    try:
        for p, X in zip(params, held, strict=True):
            p.grad = X
        yield
    finally:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
