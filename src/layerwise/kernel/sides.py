"""What is kept of each set of examples: per-example gradients, or inputs and output gradients, layer by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.cotangents import OutputBasis
from layerwise.kernel.examples import Block
from layerwise.kernel.live import Live, at_live, live_positions
from layerwise.kernel.outputs import Outputs
from layerwise.kernel.plan import LayerPlan, Plan
from layerwise.kernel.probe import record_as_probed
from layerwise.layers.capture.recorder import ModelRecorder, RecordedBatch
from layerwise.layers.io.layer_io import GradientIO, LayerIO, RecordedIO
from layerwise.layers.io.standard import Standard
from layerwise.layers.table import LayerSpec, TableChanged


@dataclass(frozen=True)
class Calls:
    """Inputs and output gradients as the layer saw them."""

    io: RecordedIO
    live: Live | None = None
    """Where positions are few at which there is a gradient: which, for each example."""

    def live_count(self) -> int:
        """Positions at which some example has a gradient, where that is known, else 0."""
        return 0 if self.live is None else int(self.live.any(0).sum())

    def standard(self, start: int, stop: int) -> Standard:
        """The standard form of some examples; an unfolded convolution is much larger than what was recorded."""
        standard = self.io.narrow(start, stop).standard()
        return standard if self.live is None else at_live(standard, self.live[start:stop])


LayerSide = Calls | Float[Tensor, "_ _ _"]
"""What is kept of a layer: its calls, or per-example gradients ``[D, N, V]``.

The latter with parameters first: that is how their Gram matrix is fastest on a CPU."""


@dataclass(frozen=True)
class Side:
    """Some examples, every layer."""

    start: int
    stop: int
    layers: Mapping[str, LayerSide]
    """Layers that were not called are absent: their kernel is zero."""


def record_side(recorder: ModelRecorder, blocks: Sequence[Block], plan: Plan, outputs: Outputs) -> Side:
    """Run consecutive blocks of examples, pull every output back, and keep what the plan asks for."""
    keeper = _Keeper(blocks[0].start, blocks[-1].stop, plan)
    for block in blocks:
        recorded = record_as_probed(recorder, block.batch, outputs, plan.request.functions)
        planned = {name: layer.spec.form for name, layer in plan.by_name.items()}
        if any(planned.get(name) != form for name, form in recorder.table.forms().items()):
            raise TableChanged
        keeper.add(recorded, block)
        del recorded
    return keeper.finish()


class _Keeper:
    """Collects blocks; one row of `rows` an example and cotangent, filled in place."""

    def __init__(self, start: int, stop: int, plan: Plan) -> None:
        self.start, self.stop, self.plan = start, stop, plan
        self.rows: dict[str, Tensor] = {}
        self.calls: dict[str, list[RecordedIO]] = {}
        self.starts: dict[str, list[int]] = {}
        """Where the examples of these calls begin."""
        self.live: dict[str, list[Live]] = {}

    def add(self, recorded: RecordedBatch, block: Block) -> None:
        """One block: all cotangents, some at a time."""
        V, step = self.plan.request.functions, self.plan.cotangents
        basis, pending = OutputBasis(), dict[str, list[RecordedIO]]()
        live = dict[str, Live]()
        for first in range(0, V, step):
            last = min(first + step, V)
            v = basis.slice(recorded.terms, first, last, block.batch.number).detach()
            sparse: dict[str, RecordedIO] = {}

            def consume(
                spec: LayerSpec,
                io: LayerIO,
                first: int = first,
                last: int = last,
                sparse: dict[str, RecordedIO] = sparse,
            ) -> None:
                layer = self.plan.by_name[spec.name]
                if layer.sizes.sparse and isinstance(io, RecordedIO):
                    sparse[spec.name] = io
                elif layer.keeps_rows:
                    self._fill(layer, io, block, first, last)
                if not layer.keeps_rows:
                    assert isinstance(io, RecordedIO)
                    pending.setdefault(spec.name, []).append(io)

            recorded.each_layer(v, consume, last == V)
            for name, mask in live_positions(sparse).items():
                layer = self.plan.by_name[name]
                if layer.keeps_rows:
                    self._fill(layer, sparse[name], block, first, last, mask)
                else:
                    live[name] = mask | live[name] if name in live else mask
        for name, parts in pending.items():
            self.calls.setdefault(name, []).append(RecordedIO.stack(parts))
            self.starts.setdefault(name, []).append(block.start - self.start)
        for name, mask in live.items():
            self.live.setdefault(name, []).append(mask)

    def _fill(
        self, layer: LayerPlan, io: LayerIO, block: Block, first: int, last: int, live: Live | None = None
    ) -> None:
        request, name = self.plan.request, layer.spec.name
        if name not in self.rows:
            shape = (layer.spec.form.numel(), self.stop - self.start, request.functions)
            self.rows[name] = torch.zeros(shape, dtype=request.dtype, device=request.device)
        rows, offset = self.rows[name], block.start - self.start
        place = 0
        for chunk in io.chunks():
            if live is not None and isinstance(chunk, Standard):
                chunk = at_live(chunk, live[place : place + chunk.g.shape[1]])
            grads = chunk.per_example_grads().flatten(2)
            start, stop = offset + place, offset + place + grads.shape[1]
            rows[:, start:stop, first:last] = grads.permute(2, 1, 0)
            place += grads.shape[1]
        assert isinstance(io, GradientIO) or place == block.stop - block.start

    def finish(self) -> Side:
        """All layers, blocks joined."""
        kept: dict[str, LayerSide] = dict(self.rows)
        for name in list(self.calls):
            of = self.calls[name]
            if sum(io.examples for io in of) != self.stop - self.start or len({len(io.calls) for io in of}) > 1:
                kept[name] = self._rows_with_gaps(name)
                continue
            live = np.concatenate(self.live[name]) if name in self.live else None
            kept[name] = Calls(RecordedIO.join(self.calls.pop(name)), live)
        return Side(self.start, self.stop, kept)

    def _rows_with_gaps(self, name: str) -> Float[Tensor, "D N V"]:
        """Gradients of each example, zero in blocks that leave the layer out: calls that are joined have no gaps."""
        spec, request, parts = self.plan.by_name[name].spec, self.plan.request, self.calls.pop(name)
        shape = (spec.form.numel(), self.stop - self.start, request.functions)
        rows = torch.zeros(shape, dtype=request.dtype, device=request.device)
        for io, place in zip(parts, self.starts[name], strict=True):
            for chunk in io.chunks():
                grads = chunk.per_example_grads().flatten(2)
                rows[:, place : place + grads.shape[1]] = grads.permute(2, 1, 0)
                place += grads.shape[1]
        return rows
