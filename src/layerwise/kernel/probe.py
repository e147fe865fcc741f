"""`ModelProbe`: what the first examples tell of a model's layers, for the plan of a kernel."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from layerwise.foundations.device import sent
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream
from layerwise.foundations.types import leaves
from layerwise.kernel.cost import LayerSizes
from layerwise.kernel.examples import Examples
from layerwise.kernel.live import live_positions
from layerwise.kernel.outputs import Outputs
from layerwise.layers.capture.model_call import autocast_of_the_caller
from layerwise.layers.capture.recorder import Batch, ModelRecorder, RecordedBatch
from layerwise.layers.io.layer_io import GradientIO, LayerIO, RecordedIO
from layerwise.layers.table import LayerSpec, LayerTable


@dataclass(frozen=True)
class ModelProbe:
    """What one pull-back on one or two examples tells; holds no module."""

    out_shape: tuple[int, ...]
    """Shape of the functions of one example."""
    sizes: Mapping[str, LayerSizes]
    """The standard form of each layer that was called."""
    gradient_bytes: int
    """Gradients of all recorded outputs, for one example and cotangent."""

    def layers(self, table: LayerTable) -> tuple[tuple[LayerSpec, LayerSizes], ...]:
        """Called layers first."""
        called = [(spec, self.sizes[spec.name]) for spec in table.layers if spec.name in self.sizes]
        P = torch.Size(self.out_shape).numel()
        return *called, *((spec, _uncalled(spec, P)) for spec in table.layers if spec.name not in self.sizes)


def probe_model(recorder: ModelRecorder, examples: Examples, outputs: Outputs) -> ModelProbe:
    """Run the first examples, and pull a mixture of all functions back.

    What is found is kept with the notes on the model, and decides how a kernel is computed; how many functions there
    are is read again whenever the model is run (`record_as_probed`). Functions of the outputs may be new ones
    under an old name. A model that has been probed is not run here: outputs that are not finite are refused when
    something is computed.
    """
    batch = examples.first(2)
    known = recorder.prepare(batch).more
    if callable(outputs.select):
        return _probe(recorder, batch, outputs)
    select = outputs.select if isinstance(outputs.select, str | int) else tuple(outputs.select)
    kind = "kernel", select, tuple(t.shape for t in leaves(batch.x)), autocast_of_the_caller()
    if kind not in known:
        known[kind] = _probe(recorder, batch, outputs)
    return known[kind]


def record_as_probed(recorder: ModelRecorder, batch: Batch, outputs: Outputs, functions: int) -> RecordedBatch:
    """A batch run and recorded, with as many functions as the probe has found."""
    recorded = recorder.record(batch, outputs, batched=functions > 1)
    found = recorded.terms.f.shape[1:].numel()
    if found != functions:
        recorder.prepare(batch).more.clear()
        raise InputError(
            describe(
                f"a model that gives {found} outputs for an example, where it gave {functions} when it was probed",
                "as many outputs as then",
                "call lw.ntk (or lw.jacobian) again: the model will be probed anew",
            )
        )
    return recorded


def _probe(recorder: ModelRecorder, batch: Batch, outputs: Outputs) -> ModelProbe:
    with recorder.session():
        recorded = recorder.record(batch, outputs)
        n, f = recorded.examples, recorded.terms.f
        with torch.no_grad():
            outputs.check(recorded.f, recorder.arrange, n)
            out_shape = tuple(outputs.functions(recorded.f, recorder.arrange(n)).shape[1:])
        mix = torch.randn(1, *f.shape, generator=stream(0, "functions"))
        ios = recorded.all_layers(sent(mix, f.device).to(f.dtype), last=True)
        gradient_bytes = recorded.output_bytes() // n
    return ModelProbe(out_shape, _all_sizes(ios, torch.Size(out_shape).numel()), gradient_bytes)


def _all_sizes(ios: Mapping[str, LayerIO], P: int) -> dict[str, LayerSizes]:
    found = {name: _sizes(io.spec, io, P) for name, io in ios.items()}
    several = {name: io for name, io in ios.items() if isinstance(io, RecordedIO) and found[name].positions > 1}
    for name, live in live_positions(several).items():
        found[name] = _seen(found[name], int(live.any(0).sum()))
    return found


def _sizes(spec: LayerSpec, io: LayerIO, P: int) -> LayerSizes:
    K, O, I = spec.form.shape
    if isinstance(io, GradientIO):
        return LayerSizes(1, K, O, I, P, raw=P * K * O * I, bare=True)
    assert isinstance(io, RecordedIO)
    positions = sum(call.sharing(io.examples) for call in io.calls)
    x = sum(call.x.numel() for call in io.calls) // io.examples
    dy = sum(call.dy.numel() for call in io.calls if call.dy is not None) // io.examples
    tokens = I if spec.form.one_hot else 0
    return LayerSizes(positions, K, O, 1 if tokens else I, P, raw=x + P * dy, tokens=tokens)


def _seen(sizes: LayerSizes, live: int) -> LayerSizes:
    """The same, where so many positions have a gradient."""
    return replace(sizes, positions=live, sparse=True) if 0 < 2 * live <= sizes.positions else sizes


def _uncalled(spec: LayerSpec, P: int) -> LayerSizes:
    K, O, I = spec.form.shape
    return LayerSizes(0, K, O, I, P, raw=0, tokens=I if spec.form.one_hot else 0)
