"""The loop over batches, and nothing more: run, pull back, hand every layer over."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from layerwise.foundations.cotangents import Cotangent, HessianRoot, OutputBasis
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods import Likelihood
from layerwise.layers.capture.model_call import take
from layerwise.layers.capture.recorder import Batch, Recorded, Recorder
from layerwise.layers.capture.source import Source
from layerwise.layers.io.layer_io import LayerIO
from layerwise.layers.table import LayerSpec

COTANGENT_BYTES = 256 * 2**20
"""Gradients of all layers that are pulled back at once take about this much, or less under `memory`."""
GRAPH_FACTOR = 3
"""A forward keeps about this many times the recorded inputs and outputs."""


@dataclass
class Totals:
    """What the data added up to."""

    examples: int = 0
    terms: Tensor | float = 0.0
    """``Σ m w``, on the device until it is asked for; only where it will be."""
    batches: int = 0

    def scale(self, normalize: str) -> float:
        """What sums are divided by: N, or ``Σ m w`` ("terms")."""
        if normalize == "examples":
            return float(self.examples)
        terms = float(self.terms)
        if terms == 0:
            raise InputError(
                describe(
                    'normalize="terms" and data in which no position counts',
                    "a sum of weights above 0",
                    "check ignore_index, mask and class weights",
                )
            )
        return terms


@dataclass(frozen=True)
class Sweep:
    """Everything needed to go over the data once more."""

    recorder: Recorder
    source: Source
    likelihood: Likelihood
    cotangent: Cotangent
    memory: int
    normalize: str = "examples"
    batched: bool = field(default=False)

    def layers(
        self,
        observe: Callable[[LayerSpec, LayerIO, bool], None],
        description: str,
        ready: Callable[[], object] | None = None,
        settle: bool = True,
    ) -> Totals:
        """Hand every layer over as it comes; the flag says whether it is the batch's first cotangents.

        `ready` is called before the model runs on a batch, and again when it is known which layers fall back. Without
        `settle` the caller settles the recorder's checks, when it has queued all that it wants to.
        """

        def visit(recorded: Recorded) -> None:
            for v, first, last in self.cotangents(recorded):
                recorded.each_layer(v, lambda spec, io, first=first: observe(spec, io, first), last)

        return self.visit(visit, description, ready, settle)

    def all_layers(self, observe: Callable[[dict[str, LayerIO]], None], description: str) -> Totals:
        """Hand all layers over at once."""

        def visit(recorded: Recorded) -> None:
            for v, _, last in self.cotangents(recorded):
                observe(recorded.all_layers(v, last))

        return self.visit(visit, description)

    def visit(
        self,
        visit: Callable[[Recorded], None],
        description: str,
        ready: Callable[[], object] | None = None,
        settle: bool = True,
    ) -> Totals:
        """Record every batch, in parts where memory asks for it."""
        totals = Totals()
        many = isinstance(self.cotangent, HessianRoot | OutputBasis) or getattr(self.cotangent, "samples", 1) > 1
        with self.recorder.session(settle):
            for batch in self.source.batches(description):
                self.recorder.prepare(batch)
                if ready is not None:
                    ready()  # what does not fit is refused before the model is run on all examples
                for part in self.parts(batch):
                    recorded = self.recorder.record(part, self.likelihood, batched=many, explained=True)
                    if ready is not None:
                        ready()
                    totals.examples += recorded.examples
                    if self.normalize == "terms":
                        totals.terms = totals.terms + recorded.terms.weight.sum(dtype=torch.float64)
                    visit(recorded)
                totals.batches += 1
        return totals

    def cotangents(self, recorded: Recorded) -> Iterator[tuple[Tensor, bool, bool]]:
        """Cotangents in groups that fit, each with whether it is the first and the last."""
        count = self.cotangent.count(recorded.terms)
        allowed = min(COTANGENT_BYTES, self.memory // 4)
        size = max(1, min(count, allowed // max(2 * recorded.output_bytes(), 1)))
        for start in range(0, count, size):
            stop = min(start + size, count)
            v = self.cotangent.slice(recorded.terms, start, stop, recorded.batch.number)
            yield v.detach(), start == 0, stop == count

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """A batch, or parts of it that are predicted to fit in memory; random labels stay those of the whole."""
        findings = self.recorder.prepare(batch)
        n = self.recorder.examples(batch)
        per_example = max(findings.bytes_per_example * GRAPH_FACTOR, 1)
        size = max(1, min(n, int(self.memory // 2 // per_example)))
        if size >= n:
            yield batch
            return
        for start in range(0, n, size):
            stop = min(start + size, n)

            def some(t: object, start: int = start, stop: int = stop) -> object:
                return findings.output.narrow(t, start, stop, n) if isinstance(t, Tensor) else t

            yield replace(
                batch,
                x=take(batch.x, start, stop, findings.example_axis, findings.shared),
                y=some(batch.y),
                mask=some(batch.mask),
                part=(start, n),
            )
