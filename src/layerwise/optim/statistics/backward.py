"""Which backward is under way: whether parameters learn from it, and whether another may follow through the same graph.

``torch.autograd.grad(loss, x)`` passes through every layer and leaves no gradient of a parameter: it is no part of what
a step is about. Nor is a backward of many cotangents at once (``is_grads_batched=True``, `torch.func.vmap`). Two losses
with ``retain_graph=True`` add up their gradients: so do those of a layer's outputs, which are kept until no further
backward can come.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from layerwise.layers.capture.model_call import graph_tensors, own_tensors
from layerwise.layers.capture.tape import Event, Tape
from layerwise.layers.table import LayerSpec


def reaches(params: Iterable[Tensor]) -> bool:
    """Whether the present backward computes the gradient of one of these."""
    for p in params:
        if p.requires_grad:
            try:
                if torch._C._will_engine_execute_node(get_gradient_edge(p).node):  # type: ignore[attr-defined]
                    return True
            except RuntimeError:  # torch does not answer for a leaf that `autograd.grad` was asked for
                return True
    return False


def graph_is_kept() -> bool:
    """Whether another backward may follow the present one, which has ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]


def is_of_many(g: Tensor) -> bool:
    """Whether a gradient is of several cotangents at once, which `torch.vmap` hides: it has no entries to read."""
    of = torch._C._functorch  # type: ignore[attr-defined]
    return of.is_legacy_batchedtensor(g) or of.is_batchedtensor(g)


def _nothing() -> None:
    return


class Watch:
    """Tells the backwards through one forward apart."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._task, self._counts = model, -1, False
        self.begins: Callable[[], None] = _nothing
        """Called at the first gradient of a backward that counts."""

    def counts(self, g: Tensor) -> bool:
        """Whether parameters get a gradient from the backward under way, of which `g` is one; asked once for each."""
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        if task != self._task:
            self._task = task
            self._counts = not is_of_many(g) and reaches(graph_tensors(self._model))
            if self._counts:
                self.begins()
        return self._counts


class Arrivals:
    """Output gradients of a forward's layers, handed over as soon as a layer has all of its own.

    In a backward that keeps its graph they wait for those of the next, up to the one that does not or to the step.
    """

    def __init__(
        self,
        tape: Tape,
        watch: Watch,
        keep: Callable[[LayerSpec, bool], None],
        keep_rows: Callable[[LayerSpec, Tensor, Tensor], bool],
    ) -> None:
        self._tape, self._watch, self._keep, self._keep_rows = tape, watch, keep, keep_rows
        self._remaining, self._missing = tape.subscriptions()
        self._waits = self._again = False
        watch.begins = self._begin
        tape.notify(self.arrived)

    def _begin(self) -> None:
        if self._waits and torch.autograd._is_checkpoint_valid() and not self._has_gradients():  # type: ignore[attr-defined]
            self.forget()  # the user has let go of what the last backward left
        self._again = graph_is_kept()
        self._waits = self._waits or self._again
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _has_gradients(self) -> bool:
        params = own_tensors(self._tape.model.modules())
        return any(p.grad is not None and bool(p.grad.any()) for p in params)

    def arrived(self, event: Event, g: Tensor) -> None:
        """A gradient has reached a recorded output."""
        if not self._watch.counts(g):
            return
        g = g.detach() if g.requires_grad else g
        if self._waits:
            event.grad = g.unsqueeze(0) if event.grad is None else event.grad + g
            return
        specs = self._remaining.pop(id(event), [])
        plain = len(specs) == 1 and not event.lent and len(self._tape.calls_of(specs[0])) == 1
        if plain and self._keep_rows(specs[0], event.x, g):
            return
        event.grad = g.unsqueeze(0)
        for spec in specs:
            left = self._missing[spec.name] = self._missing[spec.name] - 1
            if left == 0:
                self._keep(spec, False)

    def _end(self) -> None:
        """At the end of a backward; where the graph is gone, nothing can be added any more."""
        if not self._again:
            self.flush()

    def flush(self) -> None:
        """Hand over what has come; calls that no backward reached (of targets, of other outputs) do not count."""
        for spec in {spec.name: spec for specs in self._remaining.values() for spec in specs}.values():
            if self._missing[spec.name] and any(event.grad is not None for event in self._tape.calls_of(spec)):
                self._missing[spec.name] = 0
                self._keep(spec, True)
        self._waits = False

    def close(self) -> None:
        """Hand over the rest; nothing that the graph or the user keeps holds the layers' inputs after this."""
        self.flush()
        self._watch.begins = _nothing

    def forget(self) -> None:
        """What waits is of a gradient that is not kept."""
        if self._waits:
            for event in self._tape.events:
                event.grad = None
