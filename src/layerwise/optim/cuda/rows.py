"""Statistics that wait for the step: rows of half precision, whose moments one kernel averages for a whole stack.

On a GPU with Triton the moments of a stack's layers go from their inputs (or output gradients) into the running means
in three launches, only the triangle below the diagonal computed; nothing of the size of a factor is made in between.
A backward only keeps the tensors; what can be asked of a stack at once is asked in the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.linalg import gram
from layerwise.layers.form import Form
from layerwise.layers.io.layer_io import LayerCall, RecordedIO
from layerwise.layers.rules.linear import LinearRule
from layerwise.optim.averaging import running_weight
from layerwise.optim.cuda import factor as symmetric
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton.columns import average_grams_
from layerwise.optim.cuda.triton.device import MOST_MATRICES
from layerwise.optim.rule import Health

HALF = (torch.bfloat16, torch.float16)
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
        if not self.bias:
            return total
        n, sums = X.shape[-1], X.sum(0, dtype=total.dtype)
        bordered = total.new_empty(1, n + 1, n + 1)
        bordered[:, :n, :n], bordered[:, :n, n], bordered[:, n, :n] = total, sums, sums
        bordered[:, n, n] = len(X)
        return bordered


@dataclass
class RowsOfStack:
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
    if dy is None or call.lent or dy.dtype not in HALF or not _fitting(form):
        return False
    if x.shape[-1] != form.weight_inputs or dy.shape[-1] != form.outputs or dy.shape[0] != 1:
        return False
    return x.dtype in HALF or (x.dtype == torch.float32 and isinstance(call.site.module, nn.Linear))


def plain_linear(call: LayerCall) -> bool:
    """Whether the input and the output's gradient are a layer's rows, just as they came."""
    return type(call.site.rule) is LinearRule


def _fitting(form: Form) -> bool:
    plain = form.groups == 1 and not form.one_hot and form.taps == 1
    return plain and form.outputs % UNIT == 0 and form.weight_inputs % UNIT == 0


def together(layers: Sequence[Rows | None], counts: Sequence[int]) -> RowsOfStack | None:
    """The rows of a whole stack, if all layers have some and they are alike."""
    first = layers[0]
    if first is None or not counts[0] or any(count != counts[0] for count in counts):
        return None
    x = first.x
    kind = (x.shape, x.stride(), x.dtype, first.half, first.factor, first.bias)
    found: list[Rows] = []
    for rows in layers:
        if rows is None:
            return None
        x = rows.x
        if (x.shape, x.stride(), x.dtype, rows.half, rows.factor, rows.bias) != kind:
            return None
        found.append(rows)
    return RowsOfStack(found, counts[0]) if first.x.stride(-1) == 1 else None


def average_rows_(mean: Float[Tensor, "K *n"], count: Tensor, rows: RowsOfStack, decay: float, health: Health) -> None:
    """The same as `update_mean` with the moments of these rows; a layer whose rows are not finite keeps its mean."""
    first = rows.layers[0]
    alpha = first.factor / rows.count
    few = len(mean) <= MOST_MATRICES
    if not few or not triton_products.available(mean.device) or mean.dtype != torch.float32:
        square = symmetric.whole(mean)
        _average_by_torch_(square, count, rows, decay, health)
        if square is not mean:
            symmetric.put_(mean, square)
        return
    X = [layer.X for layer in rows.layers]
    skipped = average_grams_(mean, count, X, alpha, decay, gate=health.gate, border=first.bias, half=first.half)
    health.count("skipped_statistics", skipped)


def _average_by_torch_(mean: Tensor, count: Tensor, rows: RowsOfStack, decay: float, health: Health) -> None:
    """The same in many calls, which the kernels are checked against."""
    first, X = rows.layers[0], torch.stack([layer.rounded.to(mean.dtype) for layer in rows.layers])
    n, alpha = X.shape[-1], first.factor / rows.count
    squares = X.square().sum((-2, -1))
    take = torch.isfinite(squares) & torch.isfinite(squares * alpha)
    asked = torch.ones_like(take) if health.gate is None else health.gate.expand(len(take))
    take = take & asked
    health.count("skipped_statistics", asked.sum() - take.sum())
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
