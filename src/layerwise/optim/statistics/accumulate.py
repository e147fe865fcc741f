"""From recorded layers to the means that rules observe: sums over the forwards of a step, and over processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.distributed.processes import Processes
from layerwise.foundations.linalg import gram
from layerwise.layers.form import Form
from layerwise.layers.io.layer_io import RecordedIO
from layerwise.layers.table import LayerSpec
from layerwise.optim.rule import Observation, Recorded, Requirements, Shape
from layerwise.optim.step.stack import Stack

Moments = tuple[bool, bool]
"""Which second moments of a layer are formed: of output gradients, and of inputs."""


@dataclass(slots=True)
class Sums:
    """One layer's sums over the forwards of a step."""

    A: Tensor | None = None
    rows: int = 0
    """Positions (or examples, reduced) that A sums over."""
    G: Tensor | None = None
    examples: int = 0
    recorded: list[Recorded] = field(default_factory=list)
    inputs: Any = None
    """Rows that A is to be made of, where a GPU leaves that to the step (`cuda.rows`); likewise for G."""
    outgrads: Any = None

    def rescale(self, factor: float) -> None:
        """As if every output gradient had been multiplied by a number."""
        self.G = None if self.G is None else self.G * factor**2
        if self.outgrads is not None:
            self.outgrads = replace(self.outgrads, factor=self.outgrads.factor * factor**2)
        self.recorded = [call._replace(factor=call.factor * factor) for call in self.recorded]

    def rescale_by(self, squared: Tensor) -> None:
        """The same by a number on the device, of which the square is given; of layers whose examples nobody sees."""
        self.G = None if self.G is None else self.G * squared
        if self.outgrads is not None:
            self.outgrads = replace(self.outgrads, by=squared)

    def settle(self) -> None:
        """Make moments of rows that were left for the step."""
        for rows, name in ((self.inputs, "A"), (self.outgrads, "G")):
            if rows is not None:
                moment, old = rows.moment(), getattr(self, name)
                setattr(self, name, moment if old is None else old + moment)
        self.inputs = self.outgrads = None


class Accumulator:
    """Adds up what a step's forwards and backwards give."""

    def __init__(self, requires: Requirements, sharing: str, processes: Processes) -> None:
        self.requires, self.sharing, self.processes = requires, sharing, processes
        self.moments: Callable[[LayerSpec], Moments | None] = lambda spec: (requires.outgrads, requires.inputs)
        """Which moments of a layer the rule wants; None for a layer that it does not treat, such as a head with the
        fallback's update."""
        self.ask_again: Callable[[], None] = lambda: None
        """To be called when that may have changed."""
        self.rows: Any = None
        """On a GPU, what keeps the rows of linear layers for the step in place of their moments (`cuda.rows`)."""
        self.counted = (0, 0)
        """Examples and tokens of all processes, as `take_all` found them."""
        self._sums: dict[str, Sums] = {}

    def forget(self) -> None:
        """The model or its groups may have changed."""
        self.ask_again()
        if self.rows is not None:
            self.rows.forget()

    # --- in the backward -----------------------------------------------------------------------------------

    def add_rows(
        self, spec: LayerSpec, x: Tensor, g: Tensor, examples: int, factor: float, batch: tuple[int, int]
    ) -> bool:
        """The input and output gradient of one call of a layer, before anything is made of them; False: not taken."""
        if self.rows is None or spec.name in self._sums:
            return False
        sums = self.rows.again(self, spec, x, g, examples, factor, batch)
        if sums is not None:
            self._sums[spec.name] = sums
        return sums is not None

    def add(self, spec: LayerSpec, call: Recorded) -> bool:
        """One layer of one forward and cotangent; inputs and examples are counted with the first cotangent.

        Returns whether the rule treats the layer at all.
        """
        requires, form = self.requires, spec.form
        if requires.kronecker_only and (not form.kronecker or form.weight is None):
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
        if requires.examples:
            sums.recorded.append(call._replace(io=io.owned()))
        if requires.moments:
            rows = self.rows if first and self.sharing != "reduce" else None
            if rows is None or not rows.keep(sums, io, factor, moments):
                self._add_moments(sums, io, factor, moments[0], moments[1] and first)
        return True

    @torch.no_grad()
    def _add_moments(self, sums: Sums, io: RecordedIO, factor: float, of_outgrads: bool, of_inputs: bool) -> None:
        by_channel = self.requires.by_channel and io.spec.form.taps > 1
        if self.sharing == "reduce" and not io.spec.form.one_hot:
            self._add_reduced(sums, io, factor, of_outgrads, of_inputs, by_channel)
            return
        sums.settle()
        if of_inputs:
            A, rows = io.channel_moment() if by_channel else io.input_moment()
            sums.A, sums.rows = A if sums.A is None else sums.A + A, sums.rows + rows
        if of_outgrads:
            G = io.output_moment() * factor**2
            sums.G = G if sums.G is None else sums.G + G

    @staticmethod
    def _add_reduced(
        sums: Sums, io: RecordedIO, factor: float, of_outgrads: bool, of_inputs: bool, by_channel: bool
    ) -> None:
        """Mean of inputs and sum of gradients over positions, then as for single positions."""
        if not (of_outgrads or of_inputs):
            return
        for a, g in io.reduced_chunks():  # [N, K, I], [V, N, K, O]
            if of_inputs:
                A = offset_mean(a, io.spec.form) if by_channel else gram(a.movedim(1, 0))
                sums.A, sums.rows = A if sums.A is None else sums.A + A, sums.rows + a.shape[0]
            if of_outgrads:
                G = gram(g.flatten(0, 1).movedim(1, 0)) * factor**2
                sums.G = G if sums.G is None else sums.G + G

    # --- in the step ---------------------------------------------------------------------------------------

    def take(self) -> dict[str, Sums]:
        """What came since the last call."""
        sums, self._sums = self._sums, {}
        return sums

    def take_all(
        self, specs: Sequence[LayerSpec], device: torch.device, counted: tuple[int, int] = (0, 0)
    ) -> dict[str, Sums]:
        """The same over all processes: one reduction, in the order of the layers. `counted` are this one's examples and
        tokens."""
        own, processes = self.take(), self.processes
        for sums in own.values():
            sums.settle()
        present = torch.tensor([*counted, *(float(spec.name in own) for spec in specs)], dtype=torch.float64)
        examples, tokens, *present = processes.add_up([present.to(device)])[0].tolist()
        self.counted = int(examples), int(tokens)
        known = [spec for spec, p in zip(specs, present, strict=True) if p > 0]
        filled = {spec.name: own.get(spec.name, Sums()) for spec in known}
        moments = processes.add_up([t for spec in known for t in self._tensors(spec, filled[spec.name], device)])
        places = iter(moments)
        for spec in known:
            sums, (of_outgrads, of_inputs) = filled[spec.name], self._wanted(spec)
            counts = next(places)
            sums.rows, sums.examples = int(counts[0]), int(counts[1])
            if of_inputs:
                sums.A = next(places)
            if of_outgrads:
                sums.G = next(places)
        return filled

    def _wanted(self, spec: LayerSpec) -> Moments:
        return (self.moments(spec) or (False, False)) if self.requires.moments else (False, False)

    def moment_shapes(self, spec: LayerSpec) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Of A and of G of a layer; None for one that is not formed."""
        form, (of_outgrads, of_inputs) = spec.form, self._wanted(spec)
        size = form.weight_inputs // form.taps if self.requires.by_channel and form.taps > 1 else form.inputs
        square = (form.groups, size) if form.one_hot else (form.groups, size, size)
        return square if of_inputs else None, (form.groups, form.outputs, form.outputs) if of_outgrads else None

    def _tensors(self, spec: LayerSpec, sums: Sums, device: torch.device) -> list[Tensor]:
        """Counts and moments, zero where this process has none."""
        A, G = self.moment_shapes(spec)
        found = [torch.tensor([sums.rows, sums.examples], dtype=torch.float64, device=device)]
        like = next(t for t in (sums.A, sums.G, torch.zeros((), device=device)) if t is not None)
        if A is not None:
            found.append(like.new_zeros(A) if sums.A is None else sums.A)
        if G is not None:
            found.append(like.new_zeros(G) if sums.G is None else sums.G)
        return found

    def observation(self, stack: Stack, sums: dict[str, Sums]) -> Observation | None:
        """The means of a stack's layers; None where none was seen."""
        known, seen, examples = list[Sums | None](), list[bool](), 0
        for spec in stack.specs:
            s = sums.get(spec.name)
            known.append(s)
            seen += [s is not None] * spec.form.groups
            examples = examples if s is None else max(examples, s.examples)
        if True not in seen:
            return None
        inputs = outgrads = None
        if self.rows is not None:
            inputs, outgrads = self.rows.together(known)
            for s in known:
                if s is not None:
                    s.settle()
        A, G = _means(stack, known) if self.requires.moments else (None, None)
        found = Observation(A if inputs is None else inputs, G if outgrads is None else outgrads)
        found.seen = None if False not in seen else torch.tensor(seen, device=stack.shape.device)
        found.known, found.examples, found.add_up = seen, examples, self.processes.add_up
        if self.requires.examples:
            found.recorded = [[] if s is None else s.recorded for s in known]
        found.groups = [spec.form.groups for spec in stack.specs]
        return found


def offset_mean(a: Float[Tensor, "N K I"], form: Form) -> Float[Tensor, "K c c"]:
    """``Σ_n`` of the mean over kernel offsets of ``a_o a_oᵀ``: the ``A_ch ⊗ I`` nearest to ``Σ a aᵀ``."""
    by_offset = a[..., : form.weight_inputs].unflatten(-1, (-1, form.taps))
    return torch.einsum("nkco,nkdo->kcd", by_offset, by_offset) / form.taps


def _means(stack: Stack, known: Sequence[Sums | None]) -> tuple[Tensor | None, Tensor | None]:
    """A and G of all layers, each sum divided by its count; zero for a layer that was not seen, and in padding."""
    shape: Shape = stack.shape
    A = G = None
    for (_, groups), s in zip(stack.layers, known, strict=True):
        if s is None:
            continue
        if s.A is not None:
            own = tuple(s.A.shape[1:])
            if A is None:
                size = own[-1] + shape.padding[1]
                A = torch.zeros(shape.groups, *[size] * len(own), dtype=shape.dtype, device=shape.device)
            place = A[(groups, *map(slice, own))]
            torch.div(s.A.to(shape.dtype), max(s.rows, 1), out=place)
        if s.G is not None:
            own = tuple(s.G.shape[1:])
            if G is None:
                size = own[-1] + shape.padding[0]
                G = torch.zeros(shape.groups, size, size, dtype=shape.dtype, device=shape.device)
            place = G[(groups, *map(slice, own))]
            torch.div(s.G.to(shape.dtype), max(s.examples, 1), out=place)
    return A, G
