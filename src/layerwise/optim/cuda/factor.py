"""`DeviceFactor`: P and Q as a GPU keeps them: diagonals ``[K, n]``, squares ``[K, n, n]``, packed ``[K, T, 16, 16]``.

Of a large factor the lower triangle is kept, in tiles (`linalg.packed`); kernels average into it, and make of it the
operand of a refresh. What is saved are squares. Whoever reads a factor in any other way than by groups asks here.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.backend import ALL, Factor, Side
from layerwise.optim.channels import times_inputs
from layerwise.optim.cuda import elementwise
from layerwise.optim.cuda.device_step import all_finite
from layerwise.optim.cuda.linalg import packed
from layerwise.optim.cuda.linalg.fp16 import Half, HalfPair
from layerwise.optim.cuda.linalg.packed import is_packed
from layerwise.optim.cuda.linalg.split_fp16 import prepared
from layerwise.optim.cuda.rows import StackRows, average_rows_
from layerwise.optim.cuda.triton.device import available
from layerwise.optim.reference import finite_moments, per_group, running_weight
from layerwise.optim.rule import Context, Shape

LEAST = 256
"""Smaller factors are no great part of a state."""


def packs(shape: Shape, size: int) -> bool:
    """Whether factors of this size, treated by products, are packed: where the kernels for it run."""
    return size >= LEAST and size % packed.TILE == 0 and shape.dtype == torch.float32 and available(shape.device)


def packs_inverse(shape: Shape, size: int) -> bool:
    """Whether inverses that are kept in halves are packed: as their factors are."""
    return packs(shape, size)


def zeros(shape: Shape, size: int, by_products: bool) -> Tensor:
    """A factor without statistics."""
    if by_products and packs(shape, size):
        return packed.zeros(shape.groups, size, shape.device)
    return shape.zeros(size, size)


def size(M: Tensor) -> int:
    """n."""
    return packed.size(M) if is_packed(M) else M.shape[-1]


def diagonal(M: Tensor) -> Float[Tensor, "K n"]:
    """Of matrices; diagonals as they are."""
    if is_packed(M):
        return packed.diagonal(M)
    return M if M.ndim == 2 else M.diagonal(dim1=-2, dim2=-1)


def whole(M: Tensor) -> Tensor:
    """Squares; diagonals as they are. A copy only of what is packed."""
    return packed.unpack(M) if is_packed(M) else M


def operand(M: Tensor, rough: bool = False) -> Tensor | HalfPair | Half:
    """A factor as sweeps take it: as it is, or the pair of what is packed; in one half where `rough`."""
    if is_packed(M):
        return packed.split(M, 1 if rough else 2)
    return prepared(M, definite=True).half if rough else M


def damped(M: Tensor, shift: Float[Tensor, "K"], own: int, fill: Float[Tensor, "K"]) -> Tensor:
    """``M + shift I`` as squares of their own, the diagonal of padding (behind `own` entries) replaced by `fill`."""
    if is_packed(M):
        return packed.unpack(M, shift, own, fill)
    found = M.clone()
    entries = found.diagonal(dim1=-2, dim2=-1)
    entries.add_(shift.unsqueeze(-1))
    entries[:, own:] = fill.unsqueeze(-1)
    return found


def alike(new: Tensor, M: Tensor) -> Tensor:
    """A second moment in the form that the factor M has."""
    return packed.pack(new, packed.size(M)) if is_packed(M) and not is_packed(new) else new


def ema_(M: Tensor, new: Tensor, weight: Float[Tensor, "K"]) -> None:
    """``M ← M + weight·(new − M)`` in one pass; a weight of 0 leaves M as it is whatever `new` holds."""
    if is_packed(M):
        packed.ema_(M, new, weight)
    else:
        elementwise.ema_(M, new, weight)


def put_(M: Tensor, square: Tensor) -> None:
    """Replace factors by squares (or diagonals)."""
    M.copy_(packed.pack(square) if is_packed(M) else square)


@dataclass
class DeviceFactor(Factor):
    """A running second moment whose updates ask the device for nothing."""

    side: Side
    mean: Tensor
    count: Tensor
    own: int
    """Rows without padding."""
    by_products: bool = False
    """Whether its inverse or basis is made by products."""
    taps: Tensor | None = None
    bias: Float[Tensor, "K 1"] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """P and its count, or Q and its own."""
        named = {"": self.mean, "_count": self.count, "_taps": self.taps, "_bias": self.bias}
        return {f"{self.side}{suffix}": X for suffix, X in named.items() if X is not None}

    def saved(self, groups: slice = ALL) -> dict[str, Tensor]:
        """Squares without padding."""
        found = {name: X[groups] for name, X in self.tensors().items()}
        M = whole(found[self.side])
        return found | {self.side: M[:, : self.own] if M.ndim == 2 else M[:, : self.own, : self.own]}

    def load(self, name: str, groups: slice, value: Tensor) -> None:
        """Into padding and tiles."""
        if name != self.side:
            self.tensors()[name][groups] = value
            return
        M = whole(self.mean[groups]).clone()
        M[(ALL, *(slice(size) for size in value.shape[1:]))] = value.to(M)
        put_(self.mean[groups], M)

    def update_(
        self,
        new: Tensor | StackRows,
        decay: float,
        context: Context,
        seen: Tensor | None = None,
        how: Literal["mean", "ema", "sum"] = "mean",
    ) -> None:
        """A moment, or rows whose moment one kernel averages in; nothing in a step that is left out."""
        if isinstance(new, StackRows):
            average_rows_(self.mean, self.count, new, decay, context)
        elif how == "mean":
            self._average(new, decay, context, seen)
        else:
            self._add(new, decay, context, how == "sum")

    def _average(self, new: Tensor, decay: float, context: Context, seen: Tensor | None) -> None:
        """Without the bias of its start; groups that were not seen, or are not finite, keep what they have."""
        finite, taken, health = finite_moments(new), all_finite(context), context.health
        asked = seen if taken is None else taken.expand(len(finite)) if seen is None else seen & taken
        take = finite if asked is None else finite & asked
        everything = taken is None and bool(take.all())
        if not everything:
            health.count("skipped_statistics", (finite.numel() if asked is None else asked.sum()) - take.sum())
        self.count += take.to(self.count.dtype)
        weight, mean = running_weight(self.count, decay), self.mean
        if taken is not None and mean.dtype == torch.float32:
            ema_(mean, new, torch.where(take, weight, 0.0).to(mean.dtype))
            return
        new = alike(new.to(mean.dtype), mean)
        if not everything:  # 0 · nan would still be nan
            weight, new = torch.where(take, weight, 0.0), torch.where(per_group(take, new), new, mean)
        mean.lerp_(new, per_group(weight.to(mean.dtype), mean))

    def _add(self, new: Tensor, decay: float, context: Context, add_up: bool) -> None:
        """Averages from zero, or sums."""
        good, taken, mean = finite_moments(new), all_finite(context), self.mean
        good = good if taken is None else good & taken
        self.count += good.to(self.count.dtype)
        if taken is not None and new.dtype == torch.float32 and not add_up:
            ema_(mean, new, good * (1 - decay))
            return
        new = alike(new, mean)
        if add_up:
            mean += torch.where(per_group(good, new), new, 0.0)
            return
        if taken is not None or not bool(good.all()):
            new = torch.where(per_group(good, new), new, mean)
        mean.lerp_(new, 1 - decay)

    def mean_eigenvalue(self, groups: slice = ALL) -> Float[Tensor, "K"]:
        """Padding does not count; under SUA blocks count as often as they occur."""
        entries = diagonal(self.mean[groups])
        mean = entries.mean(-1) if self.own == entries.shape[-1] else entries.sum(-1) / self.own
        if self.taps is None:
            return mean
        weights = self.taps[groups] * entries.shape[-1]
        total = weights * mean
        return total / weights if self.bias is None else (total + self.bias[groups, 0]) / (weights + 1)

    def trace(self, groups: slice = ALL) -> Float[Tensor, "K"]:
        """Of what is stored."""
        return diagonal(self.mean[groups]).sum(-1)

    def dense(self, groups: slice = ALL) -> Tensor:
        """Squares; a copy only of what is packed."""
        return whole(self.mean[groups])

    def product(self, X: Float[Tensor, "K O I"]) -> Float[Tensor, "K O I"]:
        """``P X``, or ``X Q``."""
        M = whole(self.mean)
        return M @ X if self.side == "P" else times_inputs(X, M, self.bias)
