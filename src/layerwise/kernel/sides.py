"""What is kept of each set of examples: per-example gradients, or inputs and output gradients, layer by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.cotangents import OutputBasis
from layerwise.kernel.examples import Block
from layerwise.kernel.outputs import Outputs
from layerwise.kernel.plan import LayerPlan, Plan
from layerwise.layers.io import GradientIO, LayerIO, RecordedIO
from layerwise.layers.recorder import Recorded, Recorder
from layerwise.layers.standard import Standard
from layerwise.layers.table import LayerSpec

Kept = RecordedIO | Float[Tensor, "_ _ _"]
"""Inputs and output gradients as the layer saw them, or per-example gradients ``[D, N, V]``.

The latter with parameters first: that is how their Gram matrix is fastest on a CPU."""


@dataclass(frozen=True)
class Side:
    """Some examples, every layer."""

    start: int
    stop: int
    layers: Mapping[str, Kept]
    """Layers that were not called are absent: their kernel is zero."""


def record_side(recorder: Recorder, blocks: Sequence[Block], plan: Plan, outputs: Outputs) -> Side:
    """Run consecutive blocks of examples, pull every output back, and keep what the plan asks for."""
    keeper = _Keeper(blocks[0].start, blocks[-1].stop, plan)
    for block in blocks:
        recorded = recorder.record(block.batch, outputs, batched=plan.request.functions > 1)
        keeper.add(recorded, block)
        del recorded
    return Side(keeper.start, keeper.stop, keeper.finish())


class _Keeper:
    """Collects blocks; one row of `rows` an example and cotangent, filled in place."""

    def __init__(self, start: int, stop: int, plan: Plan) -> None:
        self.start, self.stop, self.plan = start, stop, plan
        self.rows: dict[str, Tensor] = {}
        self.calls: dict[str, list[RecordedIO]] = {}

    def add(self, recorded: Recorded, block: Block) -> None:
        """One block: all cotangents, some at a time."""
        V, step = self.plan.request.functions, self.plan.cotangents
        basis, pending = OutputBasis(), dict[str, list[RecordedIO]]()
        for first in range(0, V, step):
            last = min(first + step, V)
            v = basis.slice(recorded.terms, first, last, block.batch.number).detach()

            def consume(spec: LayerSpec, io: LayerIO, first: int = first, last: int = last) -> None:
                layer = self.plan.by_name[spec.name]
                if layer.keeps_rows:
                    self._fill(layer, io, block, first, last)
                else:
                    assert isinstance(io, RecordedIO)
                    pending.setdefault(spec.name, []).append(io)

            recorded.each_layer(v, consume, last == V)
        for name, parts in pending.items():
            self.calls.setdefault(name, []).append(RecordedIO.stack(parts))

    def _fill(self, layer: LayerPlan, io: LayerIO, block: Block, first: int, last: int) -> None:
        request, name = self.plan.request, layer.spec.name
        if name not in self.rows:
            shape = (layer.spec.form.numel(), self.stop - self.start, request.functions)
            self.rows[name] = torch.zeros(shape, dtype=request.dtype, device=request.device)
        rows, place = self.rows[name], block.start - self.start
        for chunk in io.chunks():
            if layer.sizes.sparse and isinstance(chunk, Standard):
                chunk = chunk.live()
            grads = chunk.per_example_grads().flatten(2)
            rows[:, place : place + grads.shape[1], first:last] = grads.permute(2, 1, 0)
            place += grads.shape[1]
        assert isinstance(io, GradientIO) or place == block.stop - self.start

    def finish(self) -> dict[str, Kept]:
        """All layers, blocks joined."""
        kept: dict[str, Kept] = dict(self.rows)
        for name in list(self.calls):
            kept[name] = RecordedIO.join(self.calls.pop(name))
        return kept
