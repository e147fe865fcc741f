"""`OneLayer`: one layer of a model and the data, ready to be gone over as often as needed.

The standard form, the cotangents and the sums are those of `layerwise.layers` and `layerwise.curvature`. Here one layer
is chosen, and whether its bias takes part.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from layerwise.foundations import likelihoods
from layerwise.foundations.cotangents import Cotangent, HessianRoot
from layerwise.foundations.device import budget
from layerwise.foundations.errors import InputError, NameLookupError, UnsupportedError, describe, not_one_of, unknown
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.progress import Progress
from layerwise.foundations.random import seed_of
from layerwise.foundations.types import statistics_dtype, trainable, unwrap
from layerwise.layers.capture.recorder import Check, ModelRecorder, RecordedBatch
from layerwise.layers.capture.source import Source, Sweep, Totals
from layerwise.layers.form import Part
from layerwise.layers.io.layer_io import LayerIO
from layerwise.layers.io.standard import Chunk, Standard
from layerwise.layers.matrices import Matrices
from layerwise.layers.table import LayerSpec, LayerTable, TableChanged, matches

Observe = Callable[[LayerIO, bool, RecordedBatch], None]
"""Sees the layer in a batch, whether these are the batch's first cotangents, and the batch as it was run."""


@dataclass(frozen=True)
class OneLayer:
    """The sweep over the data with one layer in its table (and those that have rows of the same parameters)."""

    sweep: Sweep
    part: Part
    """The parameter that is asked for, or the rows of it (the queries of attention)."""
    bias: bool

    @property
    def weight(self) -> str:
        """Name of the parameter."""
        return self.part.name

    @property
    def spec(self) -> LayerSpec:
        """As the first batch has shown it; before that, as the model's modules suggest."""
        for spec in self.sweep.recorder.table.layers:
            if self.is_of(spec):
                return spec
        raise UnsupportedError(
            describe(
                f"rows {self.part.rows} of parameter {self.weight!r}, which falls back as a whole",
                "a layer with a rule",
                f"see lw.layers(model), or ask for {self.weight!r}",
            )
        )

    def is_of(self, spec: LayerSpec) -> bool:
        """Whether a block is this layer's."""
        weight = spec.form.weight
        return weight is not None and (weight.name, weight.rows) == (self.part.name, self.part.rows)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(K, O, I) of what takes part."""
        form = self.spec.form
        if not self.spec.sites:  # no rule: the parameter itself, as a matrix
            rows, *rest = form.parts[0].shape or (1,)
            return 1, rows, int(torch.Size(rest).numel())
        return form.groups, form.outputs, form.weight_inputs + self.with_bias

    @property
    def with_bias(self) -> bool:
        """Whether there is a bias column, and it takes part."""
        return self.bias and self.spec.form.bias is not None

    @property
    def dtype(self) -> torch.dtype:
        """What statistics of this model are computed in."""
        return statistics_dtype(self._parameter().dtype)

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self._parameter().device

    def _parameter(self) -> Tensor:
        return trainable(self.sweep.recorder.model)[self.weight]

    def each(self, begin: Callable[[], Observe], description: str) -> Totals:
        """Go over the data; `begin` gives what observes each batch, anew where the pass has to start again."""
        while True:
            try:
                return self._once(begin(), description)
            except TableChanged:
                self.sweep.source.restart("in which a later batch uses the layer in a way that the first ones do not")

    def _once(self, observe: Observe, description: str) -> Totals:
        begun, forms = False, self.sweep.recorder.table.forms()

        def ready() -> None:
            nonlocal forms
            found = self.sweep.recorder.table.forms()
            if begun and forms != found:
                raise TableChanged
            forms = found

        def visit(recorded: RecordedBatch) -> None:
            for v, first, last in self.sweep.cotangents(recorded):

                def of_layer(spec: LayerSpec, io: LayerIO, first: bool = first) -> None:
                    nonlocal begun
                    begun = True
                    if self.is_of(spec):
                        observe(io, first, recorded)

                recorded.each_layer(v, of_layer, last)

        totals = self.sweep.visit(visit, description, ready)
        _ = self.spec  # still there
        return totals

    def chunks(self, io: LayerIO, gradients: bool = True) -> Iterator[Chunk]:
        """The standard form, a few examples at a time, without the bias column where it takes no part."""
        cut = self.spec.form.bias is not None and not self.bias
        for chunk in io.chunks(gradients):
            if cut and isinstance(chunk, Standard) and isinstance(chunk.a, Tensor):
                yield Standard(chunk.a[..., :-1], chunk.g)
            else:
                yield chunk

    def require_rule(self, what: str) -> None:
        """Refuse a layer whose inputs and output gradients are not recorded."""
        if not self.spec.sites:
            raise UnsupportedError(
                describe(
                    f"{what} of {self.weight!r}, which falls back ({self.spec.reason})",
                    "a layer with a rule, whose inputs and output gradients are known",
                    "see lw.layers(model); layer_hessian works for it",
                )
            )


def one_layer(
    model: nn.Module,
    data: Any,
    layer: str,
    likelihood: str | Likelihood = "categorical",
    *,
    bias: bool = False,
    cotangent: Callable[[Likelihood], Cotangent] = HessianRoot,
    normalize: Literal["examples", "terms"] = "examples",
    example_axis: int | None = None,
    seed: int | torch.Generator = 0,
    memory: int | float | None = None,
    progress: bool | Progress | None = None,
    check: Check = "first",
    matrices: Matrices | None = None,
    **likelihood_options: Any,
) -> OneLayer:
    """Choose a layer; all options but `bias` are those of `lw.fisher`."""
    law = likelihoods.resolve(likelihood, **likelihood_options)
    if normalize not in ("examples", "terms"):
        raise InputError(not_one_of("normalize", normalize, ("examples", "terms")))
    model = unwrap(model)
    require_finite_parameters(model)
    spec, table = choose(model, LayerTable.from_model(model, matrices=matrices), layer)
    weight = spec.form.weight
    assert weight is not None
    recorder = ModelRecorder(model, table, example_axis, seed=seed_of(seed), check=check)
    allowed = budget(memory, trainable(model)[weight.name].device)
    sweep = Sweep(recorder, Source(data, progress, model), law, cotangent(law), allowed, normalize)
    return OneLayer(sweep, weight, bias)


def choose(model: nn.Module, table: LayerTable, layer: str) -> tuple[LayerSpec, LayerTable]:
    """The one layer that a name or a pattern means, and a table of it and of those that share its parameters."""
    if not isinstance(layer, str):
        raise InputError(
            describe(f"layer={layer!r}", "the name of a layer", f"pass one of: {', '.join(table.names()[:30])}")
        )
    found = [spec for spec in table.layers if matches(spec, layer)]
    if not found:  # a module without a rule: its parameters are layers of their own
        found = [spec for spec in table.layers if spec.name == f"{layer}.weight"]
    if not found:
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        if any(name == layer or name.startswith(f"{layer}.") for name in frozen):
            raise InputError(
                describe(
                    f"layer {layer!r}, which is frozen",
                    "a layer whose weight has requires_grad=True",
                    f"call requires_grad_(True) on {layer!r} while measuring",
                )
            )
        raise NameLookupError(unknown("layer", layer, table.names()))
    if len(found) > 1:
        names = ", ".join(spec.name for spec in found[:30])
        raise InputError(
            describe(f"{layer!r}, which matches {len(found)} layers", "one layer", f"name one of: {names}")
        )
    spec = found[0]
    if spec.form.weight is None:
        raise InputError(
            describe(
                f"layer {layer!r}, of which only the bias is trained",
                "a layer with a trainable weight",
                "call requires_grad_(True) on its weight while measuring",
            )
        )
    layers = tuple(other for other in table.layers if set(spec.parameters) & set(other.parameters))
    shapes = {name: table.shapes[name] for name in table.shapes if any(name in other.parameters for other in layers)}
    return spec, replace(table, layers=layers, shapes=shapes)


def require_finite_parameters(model: nn.Module) -> None:
    """Name the parameter that is not finite."""
    named = [(name, p) for name, p in model.named_parameters() if p.numel() and p.device.type != "meta"]
    if not named:
        return
    device = named[0][1].device
    largest = torch.stack([p.detach().abs().amax().float().to(device) for _, p in named])  # one look for all
    for (name, _), size in zip(named, largest.tolist(), strict=True):
        if not size < float("inf"):
            raise InputError(
                describe(
                    f"parameter {name!r} with values that are NaN or infinite",
                    "finite parameters",
                    "load a checkpoint from before the training diverged",
                )
            )
