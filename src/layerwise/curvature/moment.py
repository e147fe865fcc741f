"""Any loss function as what the sweep and the Hessian need of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, vmap

from layerwise.curvature.hessian import BatchLoss
from layerwise.foundations.errors import InputError, UnsupportedError, describe
from layerwise.foundations.likelihoods import Likelihood, Terms
from layerwise.layers.capture.recorder import Batch, ModelRecorder

Loss = Callable[[Tensor, Any], Tensor]


def scalar(value: Tensor) -> Tensor:
    """A loss must be one number."""
    if value.numel() != 1:
        raise InputError(
            describe(
                f"a loss of shape {tuple(value.shape)}",
                "a scalar (reduction='mean' or 'sum')",
                "reduce it, or pass a likelihood",
            )
        )
    return value.reshape(())


def batch_loss(given: Likelihood | Loss, recorder: ModelRecorder) -> BatchLoss:
    """The sum over a batch's examples, from a likelihood or from a mean- or sum-reduced loss."""
    if isinstance(given, Likelihood):
        law = given

        def of_likelihood(f: Tensor, batch: Batch, n: int) -> Tensor:
            return law.loss(recorder.terms(f, batch, law, recorder.examples(batch))).sum()

        return of_likelihood

    def of_function(f: Tensor, batch: Batch, n: int) -> Tensor:
        value = scalar(given(f, batch.y))
        return value if getattr(given, "reduction", "mean") == "sum" else value * n

    return of_function


@dataclass(frozen=True, kw_only=True)
class MomentLikelihood(Likelihood):
    """Stands in for a likelihood where only the gradient of a loss function is asked for."""

    loss_fn: Loss
    name = "loss"

    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        """Outputs by example, flattened; the target keeps its shape (one row an example)."""
        if mask is not None:
            raise UnsupportedError(
                describe("a mask with a loss function", "a likelihood beside a mask", "mask inside the loss function")
            )
        if y is None:
            raise InputError(describe("a batch without a target", "a batch (x, y)", "give y"))
        by_example = arrange(f.unsqueeze(-1)).squeeze(-1)
        n = by_example.shape[0]
        target = arrange(y.unsqueeze(-1)).squeeze(-1)
        object.__setattr__(self, "_shapes", (by_example.shape[1:], target.shape[1:], f.ndim, y.ndim))
        return Terms(
            by_example.reshape(n, 1, -1),
            target.reshape(n, 1, -1),
            by_example.new_ones(n, 1).detach(),
            None,
            (),
        )

    def gradient(self, terms: Terms) -> Float[Tensor, "N S C"]:
        """``∂ loss(f_n, y_n) / ∂ f_n``, each example as a batch of one."""
        out_shape, target_shape, f_ndim, y_ndim = self._shapes  # type: ignore[attr-defined]
        f = terms.f.detach().reshape(-1, *out_shape)
        y = terms.target().reshape(-1, *target_shape)

        def alone(f_n: Tensor, y_n: Tensor) -> Tensor:
            # Merged layouts: one example is several rows already.
            f_1 = f_n if f_n.ndim == f_ndim else f_n.unsqueeze(0)
            y_1 = y_n if y_n.ndim == y_ndim else y_n.unsqueeze(0)
            return scalar(self.loss_fn(f_1, y_1))

        try:
            rows = vmap(grad(alone))(f, y)
        except RuntimeError:  # a loss that vmap cannot trace
            rows = torch.stack([grad(alone)(f_n, y_n) for f_n, y_n in zip(f, y, strict=True)])
        return rows.reshape(terms.f.shape).detach()

    def loss(self, terms: Terms) -> Float[Tensor, "N S"]:
        """Not needed."""
        raise UnsupportedError("A loss function has no terms. Use a likelihood.")

    def columns(self, terms: Terms) -> int:
        """Not needed."""
        raise UnsupportedError("A loss function has no Hessian root. Use a likelihood.")

    def root(self, terms: Terms, start: int, stop: int) -> Float[Tensor, "R N S C"]:
        """Not needed."""
        raise UnsupportedError("A loss function has no Hessian root. Use a likelihood.")

    def sample(self, terms: Terms, generator: torch.Generator) -> Float[Tensor, "N S C"]:
        """Not needed."""
        raise UnsupportedError("A loss function cannot draw labels. Use a likelihood.")

    def hessian_product(self, terms: Terms, u: Float[Tensor, "*B N S C"]) -> Float[Tensor, "*B N S C"]:
        """Not needed."""
        raise UnsupportedError("A loss function has no Hessian root. Use a likelihood.")
