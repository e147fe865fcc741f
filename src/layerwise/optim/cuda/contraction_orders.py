"""In which order per-example gradients are made and turned into a basis, and of how many layers at once: by counting.

A gradient is ``U_Pᵀ (Σ_s g aᵀ) U_Q``. Either side may be turned as rows, of g or a, before the product that makes
gradients of them, or as gradients after it, but not both after: that has fewer multiply-adds where there are many
positions, and took longer wherever it was measured.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from layerwise.optim.rule import Recorded

MOST_BYTES = 2**31
"""Of what is made at a time."""
ALONE = 2**38
"""Multiply-adds of a layer that goes by itself, without copies of its rows: they take an H200 a millisecond, some times
as long as a slow host takes for their launches. Smaller ones are stacked, which costs a twentieth of their time."""


class Order(NamedTuple):
    """Which sides are turned as rows."""

    left: bool
    right: bool


ORDERS = (Order(left=True, right=True), Order(left=True, right=False), Order(left=False, right=True))


class Sizes(NamedTuple):
    """Of one example: S positions; p outputs and q inputs; bases that make O of p and I of q and a bias."""

    s: int
    p: int
    O: int
    q: int
    I: int
    bias: bool

    @classmethod
    def of(cls, layer: Recorded, U_P: Tensor, U_Q: Tensor) -> "Sizes":
        """A layer's own, and its bases'."""
        form, dy = layer.io.spec.form, layer.io.calls[0].dy
        assert dy is not None
        s = dy.numel() // (form.outputs * layer.io.examples)
        return cls(s, form.outputs, U_P.shape[-1], form.weight_inputs, U_Q.shape[-1], form.bias is not None)

    @property
    def columns(self) -> int:
        """Of a gradient whose right side is still to be turned.

        With a bias as many as the basis has rows: one more than a multiple of 16 would be slow.
        """
        return self.I if self.bias else self.q

    def work(self, order: Order) -> int:
        """Multiply-adds of an example.

        As rows the left side costs ``S p O`` and the right ``S q I``, as gradients ``p O I`` and ``O I I``.
        """
        s, p, O, q, I, _ = self
        left = s * p * O if order.left else p * O * I
        right = s * q * I if order.right else O * self.columns * I
        return left + right + s * (O if order.left else p) * (I if order.right else q)

    @property
    def order(self) -> Order:
        """The cheapest; of equal ones that which turns more rows, the smaller results."""
        return min(ORDERS, key=self.work)

    def shares(self, layers: int, examples: int) -> Iterator[slice]:
        """Neighbours that are stacked, as many as fit into the memory; or single layers."""
        count = 1 if self.alone(examples) else max(1, MOST_BYTES // (examples * self.bytes))
        return (slice(start, min(start + count, layers)) for start in range(0, layers, count))

    def parts(self, examples: int) -> Iterator[slice]:
        """All examples; or some at a time, where those of one layer do not fit into the memory."""
        count = max(1, MOST_BYTES // self.bytes)
        return (slice(start, min(start + count, examples)) for start in range(0, examples, count))

    @property
    def bytes(self) -> int:
        """Of an example: rows and gradients, each twice; of a single position rows and, in float32, their squares."""
        return 4 * (self.s * (self.O + self.I) + (self.O * self.I if self.s > 1 else self.O + self.I))

    def alone(self, examples: int) -> bool:
        """Whether a layer's products are large enough by themselves."""
        return examples * self.work(self.order) >= ALONE
