"""`LayerRows`: all rows of a layer's Jacobian, kept where they fit in memory, else made anew at every product."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.arithmetic import OwnArithmetic
from layerwise.foundations.device import readable
from layerwise.foundations.errors import MemoryBudgetError, describe
from layerwise.foundations.types import map_leaves
from layerwise.layers.capture.model_call import in_own_arithmetic, take
from layerwise.layers.capture.recorder import Batch, RecordedBatch
from layerwise.layers.io.layer_io import LayerIO, RecordedIO
from layerwise.structure.one_layer import Observe, OneLayer
from layerwise.structure.pieces import Piece, Product, joined, piece, stacked

FEW = 8
"""Examples that are kept, to compare matrices on."""


class _DoesNotFit(Exception):
    """Rows take more memory than is allowed."""


def layer_pieces(layer: OneLayer, io: LayerIO, recorded: RecordedBatch, dtype: torch.dtype) -> list[Piece]:
    """The rows of a batch."""
    vectors = layer.sweep.cotangent.count(recorded.terms)
    return [piece(chunk, layer.shape, dtype, vectors) for chunk in layer.chunks(io)]


@dataclass(eq=False)
class LayerRows(OwnArithmetic, guard=in_own_arithmetic):
    """All rows: kept where they fit in half the memory allowed, else made anew at every product."""

    layer: OneLayer
    dtype: torch.dtype
    pieces: list[Piece] | None = field(default_factory=list)
    """None: they do not fit."""
    count: float = 0.0
    """What sums are divided by."""
    examples: int = 0
    total: int = 0
    """How many rows there are."""
    square: float = 0.0
    """Sum of squares of all rows."""
    few: list[Batch] = field(default_factory=list)
    """Some examples of the first batch."""
    multiply: Product = torch.matmul
    """How the large matrices are multiplied; products of split fp16 have 22 bits, on tensor cores."""

    @staticmethod
    def gather(layer: OneLayer, dtype: torch.dtype) -> "LayerRows":
        """Go over the data once."""
        rows = LayerRows(layer, dtype)
        allowed = layer.sweep.memory // 2
        squares: list[Tensor] = []
        fits = True

        def begin() -> Observe:
            rows.pieces, rows.total = [] if fits else None, 0
            squares.clear()
            batch: list[Piece] = []

            def observe(io: LayerIO, first: bool, recorded: RecordedBatch) -> None:
                # what is kept must not change where the user writes over a batch
                found = layer_pieces(layer, io.owned() if isinstance(io, RecordedIO) else io, recorded, dtype)
                if not rows.few:
                    rows.few = some_examples(layer, recorded.batch)
                rows.total += sum(p.examples * p.vectors for p in found)
                squares.extend(p.square() for p in found)
                if rows.pieces is None:
                    return
                if first:
                    batch[:] = found
                    rows.pieces.extend(found)
                else:  # further cotangents of the same examples: their inputs are there already
                    del rows.pieces[len(rows.pieces) - len(batch) :]
                    batch[:] = stacked(batch, found)
                    rows.pieces.extend(batch)
                if sum(p.bytes() for p in rows.pieces) > allowed:
                    raise _DoesNotFit

            return observe

        try:
            totals = layer.each(begin, "rows of the layer's Hessian")
        except _DoesNotFit:
            _require_repeats(layer, allowed)
            layer.sweep.source.restart("whose rows do not fit in memory")
            fits = False
            totals = layer.each(begin, "rows of the layer's Hessian")
        rows.count, rows.examples = totals.scale(layer.sweep.normalize), totals.examples
        rows.square = float(torch.stack(squares).sum()) if squares else 0.0
        if rows.pieces is not None:
            rows.pieces = joined(rows.pieces)
        return rows

    @in_own_arithmetic
    def each(self, consume: Callable[[Piece], None], description: str = "product") -> None:
        """Hand over all rows, a few examples at a time."""
        if self.pieces is not None:
            for part in self.pieces:
                consume(part)
            return

        def observe(io: LayerIO, first: bool, recorded: RecordedBatch) -> None:
            for part in layer_pieces(self.layer, io, recorded, self.dtype):
                consume(part)

        self.layer.each(lambda: observe, description)

    def times(self, X: Float[Tensor, "d b"]) -> Float[Tensor, "d b"]:
        """``H X``."""
        blocks = X.to(self.dtype).reshape(*self.layer.shape, -1)
        total = torch.zeros_like(blocks)

        def add(part: Piece) -> None:
            total.add_(part.times(blocks, self.multiply))

        self.each(add)
        return (total / self.count).reshape(X.shape).to(X.dtype)


def some_examples(layer: OneLayer, batch: Batch) -> list[Batch]:
    """A few from the beginning, the middle and the end of a batch: the first ones may be blank."""
    recorder = layer.sweep.recorder
    findings, n = recorder.prepare(batch), recorder.examples(batch)
    size = min(FEW, n)

    def from_place(start: int) -> Batch:
        def some(t: object) -> object:
            return findings.output.narrow(t, start, start + size, n).clone() if isinstance(t, Tensor) else t

        x = map_leaves(torch.clone, take(batch.x, start, start + size, findings.example_axis, findings.shared))
        mask = None if batch.mask is None else findings.output.narrow(batch.mask, start, start + size, n).clone()
        return Batch(x, some(batch.y), mask, 0)

    return [from_place(start) for start in sorted({0, (n - size) // 2, n - size})]


def _require_repeats(layer: OneLayer, allowed: int) -> None:
    if not layer.sweep.source.can_repeat:
        raise MemoryBudgetError(
            describe(
                f"a generator of batches, whose rows do not fit in {readable(allowed)}",
                "data that can be iterated again, or more memory",
                "pass a DataLoader or a list of batches, or memory=",
            )
        )
    layer.sweep.source.require_passes(2, "products with the layer's Hessian")
