"""The Hessian of one layer by differentiating the gradient, whatever the activations."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.curvature.hessian import HessianProducts
from layerwise.foundations.device import require
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.linalg import hutchinson_trace
from layerwise.foundations.random import stream
from layerwise.layers.capture.recorder import Batch
from layerwise.layers.capture.source import Source
from layerwise.structure.eigenpairs import DENSE, spectral_norm
from layerwise.structure.one_layer import OneLayer
from layerwise.structure.operator import LayerOperator


@dataclass(eq=False, repr=False)
class AutogradHessian(LayerOperator):
    """``∇²`` of the mean loss in one layer's weight, by differentiating the gradient."""

    layer: OneLayer  # type: ignore[assignment]
    products: HessianProducts
    name: str = field(default="Hessian", init=False)  # type: ignore[assignment]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """What products are made in."""
        return self.layer.dtype

    def _times(self, X: Float[Tensor, "d b"]) -> Float[Tensor, "d b"]:
        return torch.cat([self._some(part) for part in X.split(32, dim=1)], dim=1)

    def _some(self, X: Float[Tensor, "d b"]) -> Float[Tensor, "d b"]:
        form, b = self.layer.spec.form, X.shape[1]
        blocks = X.mT.to(self.dtype).reshape(b, *self.layer.shape)
        if self.layer.spec.sites and form.bias is not None and not self.layer.bias:
            blocks = torch.nn.functional.pad(blocks, (0, 1))
        elif not self.layer.spec.sites:
            blocks = blocks.reshape(b, *form.shape)
        shapes = self.layer.sweep.recorder.table.shapes
        params = {
            name: X.new_zeros(b, *shapes[name], dtype=self.dtype) for name in dict.fromkeys(self.layer.spec.parameters)
        }
        for part, tensor in form.split(blocks):
            part.of(params).copy_(tensor)
        names = list(params) if self.layer.with_bias else [self.layer.weight]
        found = self.products.product({name: params[name] for name in names}, names)
        joined = form.join({**{k: torch.zeros_like(t) for k, t in params.items()}, **found})
        kept = joined if self.layer.with_bias or not self.layer.spec.sites else joined[..., : form.weight_inputs]
        return kept.reshape(b, -1).mT.to(X.dtype)

    def dense(self) -> Float[Tensor, "d d"]:
        """Column by column; symmetrised."""
        d = self.numel()
        require(16 * d * d, self.layer.sweep.memory, f"the dense Hessian of {d} entries", "use products and eigenpairs")
        matrix = self._times(torch.eye(d, dtype=self.dtype, device=self.device)).double()
        return (matrix + matrix.mT) / 2

    def norm(self) -> Float[Tensor, ""]:
        """The spectral norm: the largest absolute eigenvalue, of either sign."""
        if self.numel() <= DENSE:
            return torch.linalg.eigvalsh(self.dense()).abs().max()
        like = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.tensor(spectral_norm(self._times, self.numel(), like, 1e-5, 300, 0)[0], dtype=torch.float64)

    def trace(self, samples: int = 64, seed: int = 0) -> Tensor:
        """Exact for up to 3000 entries; otherwise an estimate with its standard error."""
        if self.numel() <= DENSE:
            return self.dense().diagonal().sum()
        return hutchinson_trace(
            self._times, self.numel(), samples, stream(seed, "trace"), self.dtype, self.device, chunk=16
        )


def autograd_hessian(layer: OneLayer) -> AutogradHessian:
    """Of the loss that the likelihood means, divided by N."""
    sweep = layer.sweep
    if sweep.normalize != "examples":
        raise InputError(
            describe('normalize="terms" and gauss_newton=False', 'normalize="examples"', "divide by the terms yourself")
        )
    sweep.source.require_passes(2, "products with the Hessian by autograd")
    recorder = sweep.recorder
    with recorder.session():
        batch = next(iter(Source(sweep.source.data, model=recorder.model).batches("the layer")))
        recorder.record(batch, sweep.likelihood)  # how the layer is used is seen when it is run
    return AutogradHessian(layer, HessianProducts(recorder.model, recorder, sweep.source, loss_of(layer)))


def loss_of(layer: OneLayer, added: Callable[[Tensor], Tensor] | None = None) -> Callable[[Tensor, Batch, int], Tensor]:
    """The sum of the likelihood's terms, and of something else in the output."""
    law, recorder = layer.sweep.likelihood, layer.sweep.recorder

    def loss(f: Tensor, batch: Batch, n: int) -> Tensor:
        terms = recorder.terms(f, batch, law, recorder.examples(batch))
        if added is None:
            return law.loss(terms).sum()
        return added(terms.f) if terms.y is None else law.loss(terms).sum() + added(terms.f)

    return loss
