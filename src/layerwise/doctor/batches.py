"""The data of an examination: cut into small batches, streamed while there is time, some of it kept."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from layerwise.foundations.random import stream
from layerwise.foundations.types import leaves, map_leaves
from layerwise.layers.capture.model_call import example_count, holding, take
from layerwise.layers.capture.recorder import Batch, ModelRecorder
from layerwise.layers.capture.source import Source

PIECE = 128
"""Examples of a batch that are looked at together, at most."""
KEPT = 1024
"""Examples that are kept for measurements that come back to them."""


@dataclass(eq=False)
class Streamed(Source):
    """Batches of few examples, in a random order of examples where the data is one tensor."""

    data: Any
    recorder: ModelRecorder
    more: Callable[[], bool]
    """Whether another batch may begin."""
    seed: int = 0
    memory: int = 2**30
    piece: int = PIECE
    """Examples of a piece, at most."""
    kept: list[Batch] = field(default_factory=list)
    seen: int = 0
    """Examples."""
    stopped: bool = False
    """Whether time was up before the data was."""

    def __post_init__(self) -> None:
        super().__init__(self.data, False, self.recorder.model)
        self._whole = super().batches("doctor")

    def batches(self, description: str) -> Iterator[Batch]:
        """Pieces, numbered."""
        number = 0
        for batch in self._whole:
            for piece in self._pieces(batch):
                if number and not self.more():
                    self.stopped = True
                    return
                numbered = replace(piece, number=number)
                self._keep(numbered)
                self.seen += self.recorder.examples(numbered)
                yield numbered
                number += 1

    def _pieces(self, batch: Batch) -> Iterator[Batch]:
        findings = self.recorder.prepare(batch)
        axis, shared, output = findings.example_axis, findings.shared, findings.output
        n = example_count(batch.x, axis, shared)
        if n <= self.piece:
            yield batch
            return
        if output.merged is None:
            batch = _shuffled(batch, n, axis, shared, output.axis, self.seed)
        count = -(-n // self.piece)
        bounds = [n * place // count for place in range(count + 1)]
        for start, stop in itertools.pairwise(bounds):

            def some(t: object, start: int = start, stop: int = stop) -> object:
                return output.narrow(t, start, stop, n) if isinstance(t, Tensor) else t

            yield Batch(take(batch.x, start, stop, axis, shared), some(batch.y), some(batch.mask), 0)  # type: ignore[arg-type]

    def _keep(self, batch: Batch) -> None:
        size = sum(t.numel() * t.element_size() for t in leaves((batch.x, batch.y)))
        examples = sum(self.recorder.examples(one) for one in self.kept)
        if not self.kept or (examples < KEPT and size * (len(self.kept) + 1) < self.memory // 8):
            self.kept.append(batch)


def _shuffled(batch: Batch, n: int, axis: int, shared: Any, output_axis: int, seed: int) -> Batch:
    """The same examples in a random order: data sorted by class would make batches of one class."""
    order = torch.randperm(n, generator=stream(seed, "order"))
    held = iter(holding(batch.x, axis, shared))
    x = map_leaves(lambda t: t.index_select(axis, order.to(t.device)) if next(held) else t, batch.x)

    def picked(t: object) -> Any:
        return t.index_select(output_axis, order.to(t.device)) if isinstance(t, Tensor) else t

    return Batch(x, picked(batch.y), picked(batch.mask), batch.number)


def joined(batches: list[Batch], recorder: ModelRecorder, examples: int) -> Batch:
    """The first batches as one, of about so many examples; of inputs that are one tensor, the first batch of others."""
    first, found = batches[0], recorder.prepare(batches[0])
    plain = found.output.merged is None and all(
        isinstance(one.x, Tensor) and isinstance(one.y, Tensor) and one.mask is None for one in batches
    )
    if not plain:
        return first
    taken, count = list[Batch](), 0
    for batch in batches:
        if taken and (count >= examples or batch.x.shape[1:] != first.x.shape[1:]):
            break
        taken.append(batch)
        count += recorder.examples(batch)
    x = torch.cat([one.x for one in taken], found.example_axis)
    y = torch.cat([one.y for one in taken], found.output.axis)  # type: ignore[misc]
    return Batch(x, y, None, first.number)


def halves(batches: list[Batch], recorder: ModelRecorder) -> tuple[list[Batch], list[Batch]]:
    """Batches to learn from, and batches to judge by; a single one is cut in two."""
    if len(batches) > 1:
        return batches[0::2], batches[1::2]
    batch = batches[0]
    findings = recorder.prepare(batch)
    n = recorder.examples(batch)
    if n < 2:
        return batches, batches

    def cut(start: int, stop: int, number: int) -> Batch:
        def some(t: object) -> Any:
            return findings.output.narrow(t, start, stop, n) if isinstance(t, Tensor) else t

        x = take(batch.x, start, stop, findings.example_axis, findings.shared)
        return Batch(x, some(batch.y), some(batch.mask), number)

    # The half that is learned from in two batches, so that running means have something to run over.
    middle = n // 2
    parts = [(0, middle // 2), (middle // 2, middle)] if middle >= 8 else [(0, middle)]
    return [cut(*part, number) for number, part in enumerate(parts)], [cut(middle, n, len(parts))]
