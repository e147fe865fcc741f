"""`check="always"`: whether recorded calls add up to autograd's gradient, at every batch of a graph verified before.

A graph that has been verified before (`verify`) is known to put rows with their examples. What is left to compare at
every batch is the gradient. autograd's is taken in the backward of the cotangent that is pulled back anyway; that of
the recorded calls is never formed, since a random vector q tells two matrices apart as well as all of their entries:

    ∇W q  =  Σ_{n,s} g (aᵀ q)

The left side is autograd's, the right one costs N S (O + I) operations in place of N S O I.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.device import Checks, sent
from layerwise.foundations.errors import UnsupportedError, describe
from layerwise.foundations.random import stream
from layerwise.foundations.types import trainable
from layerwise.layers.capture.model_call import own_backward
from layerwise.layers.capture.tape import Tape
from layerwise.layers.capture.vectorised import dense, mixture_of, share_of_largest, tolerance
from layerwise.layers.io.layer_io import LayerIO, RecordedIO
from layerwise.layers.table import LayerSpec

Consume = Callable[[LayerSpec, LayerIO], None]
ROUNDINGS = 8
"""Roundings that a sum may be off by, beside its terms: of a gradient that is zero nothing else is left."""


class _Pulled(NamedTuple):
    """Of one layer: ``Σ g (aᵀ q)``, and the norm of its terms."""

    q: Float[Tensor, "K I"]
    product: Float[Tensor, "K O"]
    terms: Tensor


class Explanation:
    """Compares the recorded calls of every layer with autograd's gradient, for one set of cotangents."""

    def __init__(self, tape: Tape, v: Float[Tensor, "V N S C"], number: int) -> None:
        self._tape, self._v, self._number = tape, v, number
        self._mixture = mixture_of(v) if v.shape[0] > 1 else v.new_ones(1)
        self._specs = [spec for spec in tape.table.layers if spec.sites and tape.calls_of(spec)]
        wanted = {name for spec in self._specs for name in spec.parameters}
        self.params = {name: p for name, p in trainable(tape.model).items() if name in wanted}
        """Whose gradients `settle` wants."""
        self._pulled: dict[str, _Pulled] = {}

    def checking(self, consume: Consume) -> Consume:
        """The same function, which notes ``Σ g (aᵀ q)`` of each layer before it hands the layer on."""

        def note(spec: LayerSpec, io: LayerIO) -> None:
            if isinstance(io, RecordedIO):
                q = torch.randn(spec.form.groups, spec.form.inputs, generator=stream(0, spec.name, self._number))
                q = sent(q, self._v.device).to(io.dtype)
                self._pulled[spec.name] = _Pulled(q, *io.grad_times(q, self._mixture))
            consume(spec, io)

        return note

    def plain_gradients(self, f: Tensor) -> list[Tensor | None]:
        """autograd's, of the mixture of several cotangents: a backward of its own."""
        if not self.params:
            return []
        mixed = torch.tensordot(self._mixture, self._v, 1)
        with own_backward(self._tape):
            params = list(self.params.values())
            return list(torch.autograd.grad(f, params, mixed, retain_graph=True, allow_unused=True))

    def settle(self, grads: Sequence[Tensor | None], checks: Checks, forget: Callable[[], None]) -> None:
        """Compare with autograd's gradients of `params`; the error, which names layers, is raised when checks are read.

        `forget` is called before: what was known of the graph was not enough.
        """
        found = dict(zip(self.params, grads, strict=True))
        of = {spec.name: self._compared(spec, found) for spec in self._specs if spec.name in self._pulled}
        if not of:
            return
        gaps, sizes, roundings = (torch.stack(column) for column in zip(*of.values(), strict=True))
        own = torch.tensor([self._tolerance(spec) for spec in self._specs if spec.name in of])
        # A backward of its own rounds otherwise: what a saturated softmax leaves of a gradient may be rounding alone.
        beside = 0.0 if len(self._mixture) == 1 else share_of_largest(self._coarsest()) * sizes.max()
        wrong = gaps > sent(own, gaps.device) * sizes + roundings + beside  # of what is not finite nothing can be said

        def error() -> Exception:
            forget()
            return _error([name for name, bad in zip(of, wrong.tolist(), strict=True) if bad])

        checks.add(wrong.any(), error)

    def _compared(self, spec: LayerSpec, grads: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
        """The gap, the size of autograd's ``∇W q``, and what rounding may add up to."""
        pulled, filled = self._pulled[spec.name], {}
        for name in spec.parameters:
            g = grads.get(name)
            filled[name] = torch.zeros_like(self.params[name]) if g is None else dense(g)
        truth = torch.einsum("koi,ki->ko", spec.form.join(filled).to(pulled.q.dtype), pulled.q)
        rounding = ROUNDINGS * torch.finfo(self._tape.calls_of(spec)[0].out_dtype).eps * pulled.terms
        found = (pulled.product - truth).norm(), truth.norm(), rounding
        return tuple(t.to(self._v) for t in found)  # type: ignore[return-value]

    def _tolerance(self, spec: LayerSpec) -> float:
        """One backward rounds as the layer does; two of them as the coarsest layer after it."""
        call = self._tape.calls_of(spec)[0]
        dtype = call.out_dtype if len(self._mixture) == 1 else self._coarsest()
        return tolerance(dtype, call.x.device)

    def _coarsest(self) -> torch.dtype:
        return max((event.out_dtype for event in self._tape.events), key=lambda dtype: torch.finfo(dtype).eps)


def _error(names: Sequence[str]) -> Exception:
    listed = ", ".join(repr(name) for name in names)
    return UnsupportedError(
        describe(
            f"layers whose recorded calls explain another gradient than autograd's: {listed}",
            "calls that the layer's weight gets all of its gradient from, as in an earlier batch with the same graph",
            "call again: what was known of the model is forgotten, and such layers fall back",
        )
    )
