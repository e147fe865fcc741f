"""Rows of half precision that are kept for the step, where one kernel averages the moments of a whole stack.

On a GPU with Triton the moments of a stack's layers go from their inputs (or output gradients) into the running means
in three launches, only the triangle below the diagonal computed; nothing of the size of a factor is made in between.
A backward only keeps the tensors; what can be asked of a stack at once is asked in the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.linalg import gram
from layerwise.foundations.types import HALF
from layerwise.layers.form import Form
from layerwise.layers.io.layer_io import LayerCall, Layout, RecordedIO
from layerwise.layers.rules.linear import LinearRule
from layerwise.layers.table import LayerSpec, Site
from layerwise.optim.cuda.device_step import all_finite
from layerwise.optim.cuda.linalg import packed
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton.columns import average_grams_
from layerwise.optim.cuda.triton.device import MOST_MATRICES
from layerwise.optim.reference import running_weight
from layerwise.optim.rule import Context, Recorded, Requirements
from layerwise.optim.statistics.accumulate import Accumulator, Moments, Sums

UNIT = 16
"""Widths that are a multiple of this load fast."""


@dataclass(slots=True)
class Rows:
    """Rows of one layer in one backward: their sum of squares is ``factor · XᵀX``, bordered where there is a bias."""

    x: Tensor
    """``[*lead, n]``: in which order the rows come is the same to their squares."""
    half: torch.dtype
    """What the layer computed in; an x of single precision was rounded to it by autocast."""
    factor: float = 1.0
    bias: bool = False
    by: Tensor | None = None
    """A further factor, on the device; the same tensor for all layers of a backward."""

    @classmethod
    def of_inputs(cls, io: RecordedIO) -> "Rows":
        """A layer's inputs."""
        call = io.calls[0]
        assert call.dy is not None
        x = call.x
        if not plain_linear(call):
            made = call.inputs(io.examples, x.dtype)
            assert isinstance(made, Tensor)
            x = made
        return cls(x, call.dy.dtype, 1.0, io.spec.form.bias is not None)

    @classmethod
    def of_outgrads(cls, io: RecordedIO, factor: float) -> "Rows":
        """A layer's output gradients."""
        call = io.calls[0]
        dy = call.dy
        assert dy is not None
        g = dy[0] if plain_linear(call) else call.outgrads(io.examples, dy.dtype)
        return cls(g, dy.dtype, factor**2)

    def __len__(self) -> int:
        """How many."""
        return self.x.numel() // self.x.shape[-1]

    @property
    def X(self) -> Float[Tensor, "m n"]:
        """As a matrix."""
        return self.x.reshape(-1, self.x.shape[-1])

    @property
    def rounded(self) -> Float[Tensor, "m n"]:
        """As the layer saw them."""
        return self.X.to(self.half)

    def moment(self) -> Float[Tensor, "1 n n"]:
        """The sum itself."""
        X = self.rounded
        total = self.factor * gram(X).unsqueeze(0)
        total = total if self.by is None else total * self.by
        if not self.bias:
            return total
        n, sums = X.shape[-1], X.sum(0, dtype=total.dtype)
        bordered = total.new_empty(1, n + 1, n + 1)
        bordered[:, :n, :n], bordered[:, :n, n], bordered[:, n, :n] = total, sums, sums
        bordered[:, n, n] = len(X)
        return bordered


@dataclass
class StackRows:
    """Rows of all layers of a stack, each to be divided by the same count."""

    layers: list[Rows]
    count: int


def waits_for_step(io: RecordedIO) -> bool:
    """Whether a layer's rows may be kept: one call of a plain linear map, in half precision, on a GPU with Triton."""
    return has_plain_rows(io) and triton_products.available(io.calls[0].x.device)


def has_plain_rows(io: RecordedIO) -> bool:
    """The same on any device.

    The user's own tensors (inputs that nothing was differentiated for) may be written over before the step.
    """
    if len(io.calls) != 1 or io.mask is not None:
        return False
    call = io.calls[0]
    x, dy, form = call.x, call.dy, io.spec.form
    if dy is None or call.lent or dy.dtype not in HALF or not has_plain_form(form):
        return False
    if x.shape[-1] != form.weight_inputs or dy.shape[-1] != form.outputs or dy.shape[0] != 1:
        return False
    return x.dtype in HALF or (x.dtype == torch.float32 and isinstance(call.site.module, nn.Linear))


def plain_linear(call: LayerCall) -> bool:
    """Whether the input and the output's gradient are a layer's rows, just as they came."""
    return type(call.site.rule) is LinearRule


def has_plain_form(form: Form) -> bool:
    """Whether the rows of a layer of this form can be kept: one matrix, of widths that load fast."""
    plain = form.groups == 1 and not form.one_hot and form.taps == 1
    return plain and form.outputs % UNIT == 0 and form.weight_inputs % UNIT == 0


def together(layers: Sequence[Rows | None], counts: Sequence[int]) -> StackRows | None:
    """The rows of a whole stack, if all layers have some and they are alike."""
    first = layers[0]
    if first is None or not counts[0] or any(count != counts[0] for count in counts):
        return None
    x = first.x
    kind = (x.shape, x.stride(), x.dtype, first.half, first.factor, first.bias, id(first.by))
    found: list[Rows] = []
    for rows in layers:
        if rows is None:
            return None
        x = rows.x
        if (x.shape, x.stride(), x.dtype, rows.half, rows.factor, rows.bias, id(rows.by)) != kind:
            return None
        found.append(rows)
    return StackRows(found, counts[0]) if first.x.stride(-1) == 1 else None


def average_rows_(mean: Float[Tensor, "K *n"], count: Tensor, rows: StackRows, decay: float, context: Context) -> None:
    """The running mean with the moments of these rows; a layer whose rows are not finite keeps its mean."""
    first, taken = rows.layers[0], all_finite(context)
    alpha = first.factor / rows.count
    few = len(mean) <= MOST_MATRICES
    if not few or not triton_products.available(mean.device) or mean.dtype != torch.float32:
        square = packed.unpack(mean) if packed.is_packed(mean) else mean
        _average_by_torch_(square, count, rows, decay, context)
        if square is not mean:
            mean.copy_(packed.pack(square))
        return
    X = [layer.X for layer in rows.layers]
    how = {"all_finite": taken, "border": first.bias, "half": first.half, "by": first.by}
    skipped = average_grams_(mean, count, X, alpha, decay, **how)
    context.health.count("skipped_statistics", skipped)


def _average_by_torch_(mean: Tensor, count: Tensor, rows: StackRows, decay: float, context: Context) -> None:
    """The same in many calls, which the kernels are checked against."""
    first, X = rows.layers[0], torch.stack([layer.rounded.to(mean.dtype) for layer in rows.layers])
    n, alpha, taken = X.shape[-1], first.factor / rows.count, all_finite(context)
    alpha = alpha if first.by is None else alpha * first.by
    squares = X.square().sum((-2, -1))
    take = torch.isfinite(squares) & torch.isfinite(squares * alpha)
    asked = torch.ones_like(take) if taken is None else taken.expand(len(take))
    take = take & asked
    context.health.count("skipped_statistics", asked.sum() - take.sum())
    count += take.to(count.dtype)
    weight = torch.where(take, running_weight(count, decay), 0.0).to(mean.dtype)
    here = n + first.bias
    new = mean[:, :here, :here].clone()
    new[:, :n, :n] = alpha * (X.mT @ X)
    if first.bias:
        new[:, :n, n] = new[:, n, :n] = alpha * X.sum(1)
        new[:, n, n] = 1.0
    old = mean[:, :here, :here]
    old.lerp_(torch.where(take.view(-1, 1, 1), new, old), weight.view(-1, 1, 1))


class LayerSignature(NamedTuple):
    """How a layer looked whose rows were kept as they came, and what of its call is always the same."""

    shapes: tuple[Any, ...]
    site: Site
    layout: Layout
    chunk_bytes: int


class KeptRows:
    """Keeps the rows of linear layers in the backward, for the step; part of an `Accumulator`."""

    def __init__(self, requires: Requirements) -> None:
        self._allowed, self._examples = requires.powers is not None, requires.examples
        self._signatures: dict[str, LayerSignature] = {}

    def forget(self) -> None:
        """The model may have changed."""
        self._signatures.clear()

    def keep(self, sums: Sums, io: RecordedIO, factor: float, moments: Moments) -> bool:
        """A layer's rows in place of their moments, if they can be kept; nothing is computed here."""
        if not self._allowed or sums.rows or sums.G is not None or sums.outgrads is not None or not waits_for_step(io):
            return False
        if moments[1]:
            sums.inputs = Rows.of_inputs(io)
            sums.rows += len(sums.inputs)
        if moments[0]:
            sums.outgrads = Rows.of_outgrads(io, factor)
        call = io.calls[0]
        if plain_linear(call) and call.dy is not None:
            x, g = call.x, call.dy[0]
            shapes = (x.shape, x.dtype, g.shape, g.dtype, x.device, io.examples)
            self._signatures[io.spec.name] = LayerSignature(shapes, call.site, call.layout, io.chunk_bytes)
        return True

    def again(
        self, of: Accumulator, spec: LayerSpec, x: Tensor, g: Tensor, examples: int, factor: float,
        batch: tuple[int, int],
    ) -> Sums | None:  # fmt: skip
        """The same for one call of a linear layer that looks as it did when its rows were last kept; None: it does not.

        Most of what hooks cost is what they build and ask for, layer by layer: here little.
        """
        known = self._signatures.get(spec.name)
        if known is None or known.shapes != (x.shape, x.dtype, g.shape, g.dtype, x.device, examples):
            return None
        moments = of.moments(spec)
        if moments is None:
            return None
        half, recorded = g.dtype, list[Recorded]()
        if self._examples:
            call = LayerCall(known.site, x, g.unsqueeze(0), known.layout)
            recorded.append(Recorded(RecordedIO(spec, (call,), examples, chunk_bytes=known.chunk_bytes), factor, batch))
        inputs = Rows(x, half, 1.0, spec.form.bias is not None) if moments[1] else None
        outgrads = Rows(g, half, factor**2) if moments[0] else None
        return Sums(None, 0 if inputs is None else len(inputs), None, examples, recorded, inputs, outgrads)

    @staticmethod
    def together(known: Sequence[Sums | None]) -> tuple[StackRows | None, StackRows | None]:
        """The rows of all layers of a stack, of inputs and of output gradients, if they are alike."""
        inputs = together([None if s is None else s.inputs for s in known], [s.rows if s else 0 for s in known])
        outgrads = together([None if s is None else s.outgrads for s in known], [s.examples if s else 0 for s in known])
        for s in known:
            if s is not None:
                s.inputs = None if inputs is not None else s.inputs
                s.outgrads = None if outgrads is not None else s.outgrads
        return inputs, outgrads
