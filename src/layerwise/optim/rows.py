"""Statistics that wait for the step: rows of half precision, whose moments one kernel averages for a whole stack.

On a GPU with Triton the moments of a stack's layers go from their inputs (or output gradients) into the running means
in one launch, only the triangle below the diagonal computed; nothing of the size of a factor is made in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.linalg import gram, triton_products
from layerwise.layers.io import RecordedIO
from layerwise.optim.averaging import running_weight
from layerwise.optim.rule import Health

HALF = (torch.bfloat16, torch.float16)
UNIT = 16
"""Widths that are a multiple of this load fast."""


@dataclass
class Rows:
    """Rows of one layer in one backward: their sum of squares is ``factor · XᵀX``, bordered where there is a bias."""

    X: Float[Tensor, "m n"]
    factor: float = 1.0
    bias: bool = False

    @classmethod
    def of_inputs(cls, io: RecordedIO) -> "Rows":
        """A layer's inputs."""
        call = io.calls[0]
        a = call.inputs(io.examples, call.x.dtype)
        assert isinstance(a, Tensor)
        return cls(a.reshape(-1, a.shape[-1]), 1.0, io.spec.form.bias is not None)

    @classmethod
    def of_outgrads(cls, io: RecordedIO, factor: float) -> "Rows":
        """A layer's output gradients."""
        dy = io.calls[0].dy
        assert dy is not None
        g = io.calls[0].outgrads(io.examples, dy.dtype)
        return cls(g.reshape(-1, g.shape[-1]), factor**2)

    def moment(self) -> Float[Tensor, "1 n n"]:
        """The sum itself."""
        total = self.factor * gram(self.X).unsqueeze(0)
        if not self.bias:
            return total
        n, sums = self.X.shape[-1], self.X.sum(0, dtype=total.dtype)
        bordered = total.new_empty(1, n + 1, n + 1)
        bordered[:, :n, :n], bordered[:, :n, n], bordered[:, n, :n] = total, sums, sums
        bordered[:, n, n] = len(self.X)
        return bordered


@dataclass
class RowsOfStack:
    """Rows of all layers of a stack, each to be divided by the same count."""

    layers: list[Rows]
    count: int


def waits_for_step(io: RecordedIO) -> bool:
    """Whether a layer's rows may be kept: one call of a plain linear map, in half precision, on a GPU with Triton."""
    form, call = io.spec.form, io.calls[0]
    if len(io.calls) != 1 or io.mask is not None or call.dy is None or len(call.dy) != 1:
        return False
    if form.groups != 1 or form.one_hot or form.taps != 1 or form.outputs % UNIT or form.weight_inputs % UNIT:
        return False
    plain = call.x.shape[-1] == form.weight_inputs and call.dy.shape[-1] == form.outputs
    half = call.x.dtype in HALF and call.dy.dtype in HALF
    return plain and half and triton_products.available(call.x.device)


def together(layers: Sequence[Rows | None], counts: Sequence[int]) -> RowsOfStack | None:
    """The rows of a whole stack, if all layers have some and they are alike."""
    found = [rows for rows in layers if rows is not None]
    if len(found) != len(layers) or len(set(counts)) != 1:
        return None
    kinds = {(rows.X.shape, rows.X.stride(), rows.X.dtype, rows.factor, rows.bias) for rows in found}
    return RowsOfStack(found, counts[0]) if len(kinds) == 1 and found[0].X.stride(-1) == 1 else None


def average_rows_(mean: Float[Tensor, "K n n"], count: Tensor, rows: RowsOfStack, decay: float, health: Health) -> None:
    """The same as `update_mean` with the moments of these rows; a layer whose rows are not finite keeps its mean."""
    sums = torch.stack([layer.X.sum(0, dtype=torch.float32) for layer in rows.layers])
    take = torch.isfinite(sums.sum(1))
    asked = torch.ones_like(take) if health.gate is None else health.gate.expand(len(take))
    take = take & asked
    health.count("skipped_statistics", asked.sum() - take.sum())
    count += take.to(count.dtype)
    weight = torch.where(take, running_weight(count, decay), 0.0).to(mean.dtype)
    n, alpha = rows.layers[0].X.shape[-1], rows.layers[0].factor / rows.count
    triton_products.gram_update_(mean[:, :n, :n], [layer.X for layer in rows.layers], weight, alpha)
    if rows.layers[0].bias:
        edge = torch.where(take.unsqueeze(-1), sums * alpha, mean[:, :n, n])
        edge = torch.lerp(mean[:, :n, n], edge, weight.unsqueeze(-1))
        mean[:, :n, n], mean[:, n, :n] = edge, edge
        mean[:, n, n] = torch.lerp(mean[:, n, n], torch.ones_like(weight), weight)
