"""`Recorder`: a model ready to be recorded batch after batch, examined at its first use."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods import Reading, Terms
from layerwise.foundations.random import stream
from layerwise.foundations.types import Tree, leaves
from layerwise.foundations.vectors import unwrap
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


@dataclass(frozen=True)
class Batch:
    """One batch of data, and its number."""

    x: Tree
    y: object
    mask: Tensor | None
    number: int
    part: tuple[int, int] | None = None
    """First example and number of examples of the whole, where this is a part of a batch."""


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
        self._examined_on = 0
        self._generic: ExampleGradients | None = None

    @contextmanager
    def session(self) -> Iterator["Recorder"]:
        """Everything between is undone at the end: hooks, buffers, random state."""
        refuse_train_mode_batch_norm(self.model)
        with undisturbed(self.model):
            yield self

    def prepare(self, batch: Batch) -> Notes:
        """Check a batch, and examine the model if this is the first of its kind."""
        self.check(batch)
        axis = self.given_axis if self.findings is None else self.findings.example_axis
        n = example_count(batch.x, axis or 0)
        if self.findings is None or (self._examined_on < 2 <= n):
            self.findings = examine(self.model, self.table, batch.x, batch.y, self.given_axis)
            self._examined_on = example_count(batch.x, self.findings.example_axis)
            self.table = self.table.demote(self.findings.reasons)
            bare = [name for spec in self.table.layers if not spec.sites for name in spec.parameters]
            names = [name for name in bare if name not in self.findings.copies.axes]
            self._generic = ExampleGradients(self.model, names, self.findings.example_axis, self.findings.shared)
        return self.findings

    def check(self, batch: Batch) -> None:
        """Device and finiteness of a batch."""
        check_devices(self.model, (batch.x, batch.y if isinstance(batch.y, Tensor) else None))
        self._check_mask(batch)
        target = batch.y if batch.mask is None else None  # where a target is masked it may be anything
        for tensor in leaves((batch.x, target)):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                bad = int((~torch.isfinite(tensor)).sum())
                raise InputError(
                    describe(
                        f"batch {batch.number} with {bad} values that are NaN or infinite",
                        "finite inputs and targets",
                        "clean the data or leave the batch out; nothing of this call was kept",
                    )
                )

    @staticmethod
    def _check_mask(batch: Batch) -> None:
        mask = batch.mask
        if mask is not None and mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
            raise InputError(
                describe(
                    f"batch {batch.number} with a third entry whose values are not all 0 or 1",
                    "a mask (x, y, mask): which positions count",
                    "pass (x, y) alone, or a bool mask",
                )
            )

    @staticmethod
    def check_output(f: Tensor, batch: Batch) -> None:
        """Finiteness of the model's output."""
        if not bool(torch.isfinite(f.detach()).all()):
            raise InputError(
                describe(
                    f"batch {batch.number}, on which the model's output is NaN or infinite",
                    "finite outputs",
                    "check the parameters and the inputs; nothing of this call was kept",
                )
            )

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

    def terms(self, f: Tensor, batch: Batch, likelihood: Reading, n: int) -> Terms:
        """Output and target in standard form."""
        standard = likelihood.standardize(as_statistics(f), batch.y, batch.mask, self.arrange(n))
        return replace(standard, part=batch.part)

    def record(self, batch: Batch, likelihood: Reading, batched: bool = False) -> "Recorded":
        """Run the model on a batch and bring its output to standard form.

        `batched` prepares for many cotangents at once, which fused attention cannot differentiate.
        """
        found = self.prepare(batch)
        n = self.examples(batch)
        self.seed_forward(batch)
        copies = found.copies.make(self.model, n)
        tape = Tape(self.model, self.table, found.layouts, self.chunk_bytes, found.broadcast, n)
        kernels = [SDPBackend.MATH] if batched else _any_backend()
        with torch.enable_grad(), sdpa_kernel(kernels), substituted(self.model, copies), tape:
            f = call(self.model, batch.x)
        self.check_output(f, batch)
        with torch.enable_grad():
            terms = self.terms(f, batch, likelihood, n)
        return Recorded(self, tape, batch, likelihood, terms, n, copies, tuple(kernels))


def _any_backend() -> list[SDPBackend]:
    return [
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
        if v.shape[0] == 1:
            grads = self.tape.stream(f, v[0], consume, not last, mask, leaves)
            grads = [None if g is None else g.unsqueeze(0) for g in grads]
        else:
            ios, grads = self.tape.pull_beside(f, v, leaves, not last, mask)
            for name, io in ios.items():
                consume(self.recorder.table.spec(name), io)
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
