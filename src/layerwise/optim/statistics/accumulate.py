"""From recorded layers to the means that rules observe."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.distributed.processes import Processes
from layerwise.foundations.linalg import gram
from layerwise.layers.form import Form
from layerwise.layers.io.layer_io import LayerCall, RecordedIO
from layerwise.layers.io.layout import Layout
from layerwise.layers.table import LayerSpec, Site
from layerwise.optim.cuda.rows import Rows, plain_linear, together, waits_for_step
from layerwise.optim.rule import Observation, Recorded, UpdateRule
from layerwise.optim.step.stack import Stack


@dataclass(slots=True)
class Sums:
    """One layer's sums over the forwards of a step."""

    A: Tensor | None = None
    rows: int = 0
    """Positions (or examples, reduced) that A sums over."""
    G: Tensor | None = None
    examples: int = 0
    recorded: list[Recorded] = field(default_factory=list)
    inputs: Rows | None = None
    """What A is to be made of, where that waits for the step; likewise for G."""
    outgrads: Rows | None = None

    def rescale(self, factor: float) -> None:
        """As if every output gradient had been multiplied by a number."""
        self.G = None if self.G is None else self.G * factor**2
        self.outgrads = (
            None if self.outgrads is None else replace(self.outgrads, factor=self.outgrads.factor * factor**2)
        )
        self.recorded = [call._replace(factor=call.factor * factor) for call in self.recorded]

    def settle(self) -> None:
        """Make moments of what waits."""
        for rows, name in ((self.inputs, "A"), (self.outgrads, "G")):
            if rows is not None:
                moment, old = rows.moment(), getattr(self, name)
                setattr(self, name, moment if old is None else old + moment)
        self.inputs = self.outgrads = None


class Kept(NamedTuple):
    """How a layer looked whose rows were kept as they came, and what of its call is always the same."""

    look: tuple[Any, ...]
    site: Site
    layout: Layout
    chunk_bytes: int


class Collector:
    """Adds up what a step's forwards and backwards give."""

    def __init__(self, rule: UpdateRule, sharing: str) -> None:
        self.rule, self.sharing = rule, sharing
        self.moments: Callable[[LayerSpec], tuple[bool, bool] | None] = lambda spec: self._recorded_moments
        """Which second moments of a layer are formed, of output gradients and of inputs (`UpdateRule.moments`); None
        for a layer that the rule does not treat, such as a head with the fallback's update."""
        self.ask_again: Callable[[], None] = lambda: None
        """To be called when that may have changed."""
        self._sums: dict[str, Sums] = {}
        self._kept: dict[str, Kept] = {}

    @property
    def _recorded_moments(self) -> tuple[bool, bool]:
        return self.rule.needs_outgrads, self.rule.needs_inputs

    def forget(self) -> None:
        """The model or its groups may have changed."""
        self.ask_again()
        self._kept.clear()

    def add_rows(
        self, spec: LayerSpec, x: Tensor, g: Tensor, examples: int, factor: float, batch: tuple[int, int]
    ) -> bool:
        """The same as `add` for one call of a linear layer that looks as it did when its rows were last kept.

        Returns whether it does. Most of what hooks cost is what they build and ask for, layer by layer: here little.
        """
        name = spec.name
        kept = self._kept.get(name)
        if kept is None or kept.look != (x.shape, x.dtype, g.shape, g.dtype, x.device, examples):
            return False
        moments = None if name in self._sums else self.moments(spec)
        if moments is None:
            return False
        rule, half, recorded = self.rule, g.dtype, list[Recorded]()
        if rule.keeps_recorded:
            call = LayerCall(kept.site, x, g.unsqueeze(0), kept.layout)
            recorded.append(Recorded(RecordedIO(spec, (call,), examples, chunk_bytes=kept.chunk_bytes), factor, batch))
        inputs = Rows(x, half, 1.0, spec.form.bias is not None) if moments[1] else None
        outgrads = Rows(g, half, factor**2) if moments[0] else None
        rows = 0 if inputs is None else len(inputs)
        self._sums[name] = Sums(None, rows, None, examples, recorded, inputs, outgrads)
        return True

    def add(self, spec: LayerSpec, call: Recorded) -> bool:
        """One layer of one forward and cotangent; inputs and examples are counted with the first cotangent.

        Returns whether the rule treats the layer at all. It is called in the backward, once a layer: where rows wait
        for the step, nothing is computed here.
        """
        rule, form = self.rule, spec.form
        if rule.kronecker_only and (not form.kronecker or form.weight is None):
            return False
        moments = self.moments(spec)
        if moments is None:
            return False
        sums = self._sums.get(spec.name)
        if sums is None:
            sums = self._sums[spec.name] = Sums()
        io, factor, (_, cotangent) = call
        first = cotangent == 0
        if first:
            sums.examples += io.examples
        if rule.keeps_recorded:
            sums.recorded.append(call._replace(io=io.owned()))
        of_outgrads, of_inputs = moments[0], moments[1] and first
        if rule.averages and not (first and self._defer(sums, io, factor, moments)):
            self._add_moments(sums, io, factor, of_outgrads, of_inputs)
        return True

    @torch.no_grad()
    def _add_moments(self, sums: Sums, io: RecordedIO, factor: float, of_outgrads: bool, of_inputs: bool) -> None:
        if self.sharing == "reduce" and not io.spec.form.one_hot:
            self._add_reduced(sums, io, factor, of_outgrads, of_inputs)
            return
        sums.settle()
        if of_inputs:
            A, rows = io.channel_moment() if self._by_channel(io.spec) else io.input_moment()
            sums.A, sums.rows = A if sums.A is None else sums.A + A, sums.rows + rows
        if of_outgrads:
            G = io.output_moment() * factor**2
            sums.G = G if sums.G is None else sums.G + G

    def _defer(self, sums: Sums, io: RecordedIO, factor: float, moments: tuple[bool, bool]) -> bool:
        """Keep the layer's rows for the step, where one kernel then averages the moments of a whole stack."""
        rule = self.rule
        if not rule.takes_rows or sums.rows or sums.G is not None or sums.outgrads is not None:
            return False
        if self.sharing == "reduce" or not waits_for_step(io):
            return False
        if moments[1]:
            sums.inputs = Rows.of_inputs(io)
            sums.rows += len(sums.inputs)
        if moments[0]:
            sums.outgrads = Rows.of_outgrads(io, factor)
        call = io.calls[0]
        if plain_linear(call) and call.dy is not None:
            x, g = call.x, call.dy[0]
            look = (x.shape, x.dtype, g.shape, g.dtype, x.device, io.examples)
            self._kept[io.spec.name] = Kept(look, call.site, call.layout, io.chunk_bytes)
        return True

    def _add_reduced(self, sums: Sums, io: RecordedIO, factor: float, of_outgrads: bool, of_inputs: bool) -> None:
        """Mean of inputs and sum of gradients over positions, then as for single positions."""
        if not (of_outgrads or of_inputs):
            return
        for a, g in io.reduced_chunks():  # [N, K, I], [V, N, K, O]
            if of_inputs:
                A = offset_mean(a, io.spec.form) if self._by_channel(io.spec) else gram(a.movedim(1, 0))
                sums.A, sums.rows = A if sums.A is None else sums.A + A, sums.rows + a.shape[0]
            if of_outgrads:
                G = gram(g.flatten(0, 1).movedim(1, 0)) * factor**2
                sums.G = G if sums.G is None else sums.G + G

    def _by_channel(self, spec: LayerSpec) -> bool:
        return self.rule.sua and spec.form.taps > 1

    def take(self) -> dict[str, Sums]:
        """What came since the last call."""
        sums, self._sums = self._sums, {}
        return sums

    def take_all(self, specs: Sequence[LayerSpec], processes: Processes, device: torch.device) -> dict[str, Sums]:
        """The same over all processes: one reduction, in the order of the layers."""
        own = self.take()
        if processes.count == 1:
            return own
        for sums in own.values():
            sums.settle()
        present = torch.tensor([float(spec.name in own) for spec in specs], dtype=torch.float64)
        present = processes.add_up([present.to(device)])[0]
        known = [spec for spec, p in zip(specs, present, strict=True) if p > 0]
        filled = {spec.name: own.get(spec.name, Sums()) for spec in known}
        moments = processes.add_up([t for spec in known for t in self._tensors(spec, filled[spec.name], device)])
        places = iter(moments)
        for spec in known:
            sums = filled[spec.name]
            counts = next(places)
            sums.rows, sums.examples = int(counts[0]), int(counts[1])
            if self._wants(spec, "A"):
                sums.A = next(places)
            if self._wants(spec, "G"):
                sums.G = next(places)
        return filled

    def _wants(self, spec: LayerSpec, factor: str) -> bool:
        moments = self.moments(spec)
        return self.rule.averages and moments is not None and moments[1 if factor == "A" else 0]

    def _tensors(self, spec: LayerSpec, sums: Sums, device: torch.device) -> list[Tensor]:
        """Counts and moments, zero where this process has none."""
        form = spec.form
        found = [torch.tensor([sums.rows, sums.examples], dtype=torch.float64, device=device)]
        size = form.weight_inputs // form.taps if self._by_channel(spec) else form.inputs
        square = (form.groups, size) if form.one_hot else (form.groups, size, size)
        for factor, shape in (("A", square), ("G", (form.groups, form.outputs, form.outputs))):
            if self._wants(spec, factor):
                value = getattr(sums, factor)
                like = next(t for t in (sums.A, sums.G, torch.zeros((), device=device)) if t is not None)
                found.append(like.new_zeros(shape) if value is None else value)
        return found

    @staticmethod
    def observation(stack: Stack, sums: dict[str, Sums], processes: Processes) -> Observation | None:
        """The means of a stack's layers; None where none was seen."""
        known = [sums.get(spec.name) for spec in stack.specs]
        if not any(s is not None for s in known):
            return None
        seen = [s is not None for s, spec in zip(known, stack.specs, strict=True) for _ in range(spec.form.groups)]
        inputs = together([None if s is None else s.inputs for s in known], [s.rows if s else 0 for s in known])
        outgrads = together([None if s is None else s.outgrads for s in known], [s.examples if s else 0 for s in known])
        for s in known:
            if s is not None:
                s.inputs = None if inputs is not None else s.inputs
                s.outgrads = None if outgrads is not None else s.outgrads
                s.settle()
        return Observation(
            _means(stack, known, "A", "rows"),
            _means(stack, known, "G", "examples"),
            None if all(seen) else torch.tensor(seen, device=stack.shape.device),
            [[] if s is None else s.recorded for s in known],
            [spec.form.groups for spec in stack.specs],
            seen,
            max(s.examples for s in known if s is not None),
            processes.add_up,
            inputs,
            outgrads,
        )


def offset_mean(a: Float[Tensor, "N K I"], form: Form) -> Float[Tensor, "K c c"]:
    """``Σ_n`` of the mean over kernel offsets of ``a_o a_oᵀ``: the ``A_ch ⊗ I`` nearest to ``Σ a aᵀ``."""
    by_offset = a[..., : form.weight_inputs].unflatten(-1, (-1, form.taps))
    return torch.einsum("nkco,nkdo->kcd", by_offset, by_offset) / form.taps


def _means(stack: Stack, known: Sequence[Sums | None], factor: str, count: str) -> Tensor | None:
    """One factor of all layers, each sum divided by its count; zero for a layer that was not seen, and in padding."""
    shape = stack.shape
    example = next((t for s in known if s is not None and (t := getattr(s, factor)) is not None), None)
    if example is None:
        return None
    own, padding = example.shape[1:], shape.padding[0 if factor == "G" else 1]
    means = shape.zeros(*(size + padding for size in own))
    for (_, groups), s in zip(stack.slices(), known, strict=True):
        value = None if s is None else getattr(s, factor)
        if value is not None:
            place = means[(groups, *(slice(size) for size in own))]
            torch.div(value.to(shape.dtype), max(getattr(s, count), 1), out=place)
    return means
