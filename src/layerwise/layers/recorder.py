"""`Recorder`: a model ready to be recorded batch after batch, examined at its first use."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from layerwise.foundations.asked import Asked, Checks
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods import Reading, Terms
from layerwise.foundations.random import stream
from layerwise.foundations.vectors import unwrap
from layerwise.layers.batch import Batch, add_batch_checks, add_output_check
from layerwise.layers.calling import (
    as_statistics,
    call,
    check_devices,
    example_count,
    refuse_train_mode_batch_norm,
    substituted,
    undisturbed,
)
from layerwise.layers.copies import Copies
from layerwise.layers.examine import Notes, examine, likely_axes
from layerwise.layers.generic import ExampleGradients
from layerwise.layers.io import CHUNK_BYTES, GradientIO, LayerIO
from layerwise.layers.layout import Layout
from layerwise.layers.table import LayerSpec, LayerTable
from layerwise.layers.tape import Tape


class Recorder:
    """Runs a model under a tape and hands out every layer's standard form."""

    def __init__(
        self,
        model: nn.Module,
        table: LayerTable,
        example_axis: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        seed: int = 0,
    ) -> None:
        self.seed = seed
        self.model, self.table = unwrap(model), table
        self.given_axis = example_axis
        self.chunk_bytes = chunk_bytes
        self.findings: Notes | None = None
        self.checks = Checks()
        """Of batches and outputs; inside a session they are looked at later than they are made."""
        self._examined_on = 0
        self._generic: ExampleGradients | None = None
        self._modules: list[tuple[str, nn.Module]] | None = None
        self._prepared: weakref.ref[Batch] | None = None

    @contextmanager
    def session(self, settle: bool = True) -> Iterator["Recorder"]:
        """Everything between is undone at the end: hooks, buffers, random state.

        All checks are settled at the end, unless the caller does that: it waits for the device.
        """
        outer, modules = self._modules, list(self.model.named_modules())
        refuse_train_mode_batch_norm(modules)
        if outer is None:
            self.checks = Checks()  # none is left of a call that was interrupted
        self._modules = modules
        try:
            with undisturbed(self.model, [module for _, module in modules]):
                yield self
        except Exception:
            self.checks.settle()  # what went wrong may be the fault of a batch that has not been looked at yet
            raise
        finally:
            self._modules = outer
        if settle:
            self.checks.settle()

    def prepare(self, batch: Batch) -> Notes:
        """Check a batch, and examine the model if this is the first of its kind."""
        if self.findings is not None and (batch.part is not None or self._knows(batch)):
            return self.findings
        if not self._knows(batch):
            self._add_checks(batch)
        if self._modules is None:
            self.checks.settle()
        axis = self.given_axis if self.findings is None else self.findings.example_axis
        n = example_count(batch.x, axis or 0)
        if self.findings is None or (self._examined_on < 2 <= n):
            self.findings = examine(self.model, self.table, batch.x, batch.y, self.given_axis, self.checks.settle)
            self._examined_on = example_count(batch.x, self.findings.example_axis)
            self.table = self.table.demote(self.findings.reasons)
            bare = [name for spec in self.table.layers if not spec.sites for name in spec.parameters]
            names = [name for name in bare if name not in self.findings.copies.axes]
            self._generic = ExampleGradients(self.model, names, self.findings.example_axis, self.findings.shared)
        self._prepared = weakref.ref(batch)
        return self.findings

    def _knows(self, batch: Batch) -> bool:
        return self._prepared is not None and self._prepared() is batch

    def check(self, batch: Batch) -> None:
        """Device and finiteness of a batch, now."""
        self._add_checks(batch)
        self.checks.settle()

    def _add_checks(self, batch: Batch) -> None:
        named = self.model.named_modules() if self._modules is None else self._modules
        check_devices((m for _, m in named), (batch.x, batch.y if isinstance(batch.y, Tensor) else None))
        add_batch_checks(self.checks, batch)

    def check_output(self, f: Tensor, batch: Batch) -> None:
        """Finiteness of the model's output; inside a session it is looked at when the checks are settled."""
        add_output_check(self.checks, f, batch.number)
        if self._modules is None:
            self.checks.settle()

    def seed_forward(self, batch: Batch) -> None:
        """Fix what a random forward (dropout) draws, by seed and batch: the same at every pass.

        Only inside `session`, which puts the generators back.
        """
        seed = stream(self.seed, "forward", batch.number).initial_seed()
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # torch.manual_seed would queue a call, and its traceback, until it is
            torch.cuda.manual_seed_all(seed)

    def examples(self, batch: Batch) -> int:
        """N of a batch."""
        return example_count(batch.x, self.prepare(batch).example_axis)

    def likely_examples(self, batch: Batch) -> int:
        """N of a batch for a loss of the whole batch, which needs no examination: as found, given, or likely."""
        axis = self.given_axis if self.findings is None else self.findings.example_axis
        return example_count(batch.x, likely_axes(batch.x, batch.y)[0] if axis is None else axis)

    def arrange(self, n: int) -> Callable[[Tensor], Tensor]:
        """``[*lead, C] -> [N, *positions, C]`` for the model's output."""
        assert self.findings is not None
        layout = self.findings.output

        def front(t: Tensor) -> Tensor:
            lead = tuple(t.shape[:-1])
            fitting = layout if layout.fits(lead, n) or (n == 1 and layout.merged) else None
            if fitting is None and n == 1:
                fitting = Layout(0) if lead[:1] == (1,) else Layout(0, "major")
            if fitting is None:
                raise InputError(
                    describe(
                        f"an output (or target) with leading axes {lead}",
                        f"{n} examples on axis {layout.axis}",
                        "give one target an example, in the model's own layout",
                    )
                )
            return fitting.front(t, t.ndim - 1, n)

        return front

    def terms(self, f: Tensor, batch: Batch, likelihood: Reading, n: int, asked: Asked | None = None) -> Terms:
        """Output and target in standard form; `asked` is what the likelihood has asked before the forward."""
        asked = likelihood.ask(batch.y, batch.mask) if asked is None else asked
        standard = likelihood.standardize_asked(as_statistics(f), batch.y, batch.mask, self.arrange(n), asked)
        return standard if batch.part is None else replace(standard, part=batch.part)

    def record(self, batch: Batch, likelihood: Reading, batched: bool = False) -> "Recorded":
        """Run the model on a batch and bring its output to standard form.

        `batched` prepares for many cotangents at once, which fused attention cannot differentiate.
        """
        found = self.prepare(batch)
        n = example_count(batch.x, found.example_axis)
        asked = likelihood.ask(batch.y, batch.mask)
        self.checks.ask()
        self.seed_forward(batch)
        copies = found.copies.make(self.model, n)
        tape = Tape(self.model, self.table, found.layouts, self.chunk_bytes, found.broadcast, n)
        kernels = [SDPBackend.MATH] if batched else ANY_BACKEND
        with torch.enable_grad(), sdpa_kernel(kernels), substituted(self.model, copies), tape:
            f = call(self.model, batch.x)
        self.checks.read()  # what was asked before the forward, which the device has still to do
        self.check_output(f, batch)
        with torch.enable_grad():
            terms = self.terms(f, batch, likelihood, n, asked)
        return Recorded(self, tape, batch, likelihood, f, terms, n, copies, tuple(kernels))


ANY_BACKEND = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class Recorded:
    """A batch that was run: terms at the output, and the way back to every layer."""

    recorder: Recorder
    tape: Tape
    batch: Batch
    likelihood: Reading
    f: Tensor
    """The output as the model gave it."""
    terms: Terms
    examples: int
    copies: Mapping[str, Tensor]
    kernels: tuple[SDPBackend, ...]
    """What attention may use, also where a checkpoint runs it again in the backward."""

    def output_bytes(self) -> int:
        """What the gradients of all recorded outputs take, for one cotangent."""
        return sum(event.out_shape.numel() * event.out_dtype.itemsize for event in self.tape.events)

    def each_layer(self, v: Tensor, consume: Callable[[LayerSpec, LayerIO], None], last: bool) -> None:
        """Pull cotangents [V, N, S, C] back and hand over every layer; `last` frees the graph."""
        with sdpa_kernel(list(self.kernels)), self.tape.replaying():
            self._each_layer(v, consume, last)

    def _each_layer(self, v: Tensor, consume: Callable[[LayerSpec, LayerIO], None], last: bool) -> None:
        generic = self.recorder._generic
        assert generic is not None
        if generic.names:
            self._each_generic(generic, v, consume)
        f, mask, leaves = self.terms.f, self.terms.mask, list(self.copies.values())
        self.tape.kept = self.terms.kept
        if v.shape[0] == 1:
            grads = self.tape.stream(f, v[0], consume, not last, mask, leaves)
            grads = [None if g is None else g.unsqueeze(0) for g in grads]
        else:
            ios, grads = self.tape.pull_beside(f, v, leaves, not last, mask)
            for name, io in ios.items():
                consume(self.recorder.table.spec(name), io)
        if self.copies:
            self._each_copy(dict(zip(self.copies, grads, strict=True)), v, consume)

    def _each_copy(
        self, grads: Mapping[str, Tensor | None], v: Tensor, consume: Callable[[LayerSpec, LayerIO], None]
    ) -> None:
        for spec in self.recorder.table.layers:
            name = spec.parameters[0]
            grad = None if spec.sites else grads.get(name)
            if grad is not None:
                rows = Copies.rows(grad, self.recorder.table.shapes[name])
                consume(spec, GradientIO(spec, spec.form.join({name: rows}).to(v.dtype)))

    def all_layers(self, v: Tensor, last: bool) -> dict[str, LayerIO]:
        """The same, all layers at once; layers that were not called are absent."""
        found: dict[str, LayerIO] = {}
        self.each_layer(v, lambda spec, io: found.__setitem__(spec.name, io), last)
        return found

    def _each_generic(
        self, generic: ExampleGradients, v: Tensor, consume: Callable[[LayerSpec, LayerIO], None]
    ) -> None:
        def standard(out: Tensor) -> Tensor:
            return self._standard_alone(out)

        rows = generic.rows(self.batch.x, self.terms.f, v, standard)
        for spec in self.recorder.table.layers:
            if not spec.sites and spec.parameters[0] in rows:
                blocks = spec.form.join({name: rows[name] for name in spec.parameters})
                consume(spec, GradientIO(spec, blocks.to(v.dtype)))

    def _standard_alone(self, out: Tensor) -> Tensor:
        """One example's output in standard form, without its target."""
        read = self.likelihood.alone(as_statistics(out), self.recorder.arrange(1))
        if read is not None:
            return read
        s, c = self.terms.f.shape[1:]
        axis = self._class_axis(out)
        moved = as_statistics(out).movedim(axis, -1)
        return self.recorder.arrange(1)(moved).reshape(1, s, c)

    def _class_axis(self, out: Tensor) -> int:
        axis = getattr(self.likelihood, "class_axis", None)
        if axis is not None:
            return axis
        c, positions = self.terms.f.shape[-1], self.terms.positions
        last = out.shape[-1] == c and tuple(out.shape[1:-1]) == positions
        return -1 if last or out.ndim < 3 or out.shape[1] != c else 1
