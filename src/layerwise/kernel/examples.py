"""The inputs of a Jacobian or kernel, cut once into blocks that are recorded together.

The cut is made once so that a random forward (dropout), seeded by block, is the same in every pass.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.types import map_leaves
from layerwise.layers.capture.model_call import refuse_empty, take
from layerwise.layers.capture.recorder import Batch, ModelRecorder
from layerwise.layers.capture.source import GRAPH_FACTOR, as_batch, usable

RECORDING = {"cpu": 256 * 2**20, "cuda": 16 * 2**30}
"""Bytes of a block's graph and of the gradients pulled back through it at once, if the memory allowed is large."""


def recording_sizes(
    room: int | float, device: torch.device, graph_bytes: int | float, gradient_bytes: int, functions: int
) -> tuple[int, int]:
    """Examples to record together, and how many of their functions to pull back at once, in `room` bytes."""
    half = min(RECORDING.get(device.type, RECORDING["cpu"]), room) / 2
    graph, pulled = max(1.0, graph_bytes * GRAPH_FACTOR), max(1, 2 * gradient_bytes)
    block = int(half // max(graph, pulled * functions))
    if block >= 1:
        return block, functions
    return 1, int(max(1, min(functions, half // pulled)))


@dataclass(frozen=True)
class Block:
    """Some consecutive examples."""

    start: int
    stop: int
    batch: Batch


def read_inputs(x: Any, model: nn.Module | None = None) -> list[Batch]:
    """One batch as the model takes it (a tensor, a tuple, a mapping), or a list or loader of batches."""
    if isinstance(x, Tensor | Mapping | tuple):
        return [Batch(map_leaves(usable, x), None, None, 0)]
    if not isinstance(x, Iterable):
        raise InputError(
            describe(
                f"inputs of type {type(x).__name__}",
                "a tensor, a tuple (model(*x)), a mapping (model(**x)), or a list or loader of batches",
                "pass the model's input",
            )
        )
    found = [as_batch(map_leaves(usable, item), number, model) for number, item in enumerate(x)]
    if not found:
        raise InputError(describe("inputs without a single batch", "at least one batch", "check the loader"))
    return [Batch(batch.x, None, None, batch.number) for batch in found]


class Examples:
    """All inputs; blocks of at most `size` examples once that is known."""

    def __init__(self, x: Any, recorder: ModelRecorder) -> None:
        self.recorder = recorder
        self.batches = [self._checked(batch) for batch in read_inputs(x, recorder.model)]
        self.counts = [recorder.examples(batch) for batch in self.batches]
        for count in self.counts:
            refuse_empty(count)
        self.size = max(self.counts)
        self._blocks: list[Block] = []

    def _checked(self, batch: Batch) -> Batch:
        """The same, which need not be looked at again, nor any part of it."""
        self.recorder.check_batch(batch)
        return replace(batch, found_finite=batch.versions())

    @property
    def count(self) -> int:
        """N."""
        return sum(self.counts)

    def cut(self, size: int) -> None:
        """Blocks of at most `size` examples from now on; larger than now has no effect."""
        if size < self.size:
            self.size, self._blocks = max(1, size), []

    @property
    def blocks(self) -> list[Block]:
        """Every batch, in parts of at most `size` examples."""
        if not self._blocks:
            self._blocks = self._cut()
        return self._blocks

    def _cut(self) -> list[Block]:
        found, offset = [], 0
        for batch, n in zip(self.batches, self.counts, strict=True):
            for start in range(0, n, self.size):
                stop = min(start + self.size, n)
                part = batch if stop - start == n else self._take(batch, start, stop)
                found.append(Block(offset + start, offset + stop, replace(part, number=offset + start)))
            offset += n
        return found

    def first(self, n: int) -> Batch:
        """The first examples, to look at."""
        batch = self.batches[0]
        return batch if self.counts[0] <= n else self._take(batch, 0, n)

    def part(self, block: Block, start: int, stop: int) -> Block:
        """Some examples of a block."""
        first = block.start + start
        return Block(first, block.start + stop, replace(self._take(block.batch, start, stop), number=first))

    def _take(self, batch: Batch, start: int, stop: int) -> Batch:
        findings = self.recorder.prepare(batch)
        return replace(batch, x=take(batch.x, start, stop, findings.example_axis, findings.shared))
