"""A likelihood from functions of the user's own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.device import drawn
from layerwise.foundations.errors import InputError, UnsupportedError, describe
from layerwise.foundations.likelihoods.likelihood import Likelihood, Terms


@dataclass(frozen=True, kw_only=True)
class Custom(Likelihood):
    """A likelihood from functions of your own.

    Args:
        loss_fn: ``loss_fn(f, y)`` of one example (``f`` and ``y`` without the example axis), a scalar. Its
            gradient and Hessian come from autodiff; the Hessian must be positive semi-definite.
        hessian_root: optional ``f [N, C] -> [R, N, C]``, columns with ``Σ_r l_r l_rᵀ`` the Hessian.
        sample_gradient: optional ``(f [N, C], generator) -> [N, C]`` with the Hessian as second moment.

    >>> poisson = Custom(loss_fn=lambda f, y: (f.exp() - y * f).sum())
    """

    loss_fn: Callable[[Tensor, Any], Tensor]
    hessian_root: Callable[[Tensor], Tensor] | None = None
    sample_gradient: Callable[[Tensor, torch.Generator], Tensor] | None = None
    name = "custom"

    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        """One position a example; the output is flattened to C numbers."""
        if mask is not None:
            raise UnsupportedError(describe("a mask", "no mask with a custom likelihood", "mask inside loss_fn"))
        f_std = arrange(f.reshape(*f.shape[:1], -1)) if f.ndim > 1 else arrange(f.unsqueeze(-1))
        f_std = f_std.reshape(f_std.shape[0], 1, -1)
        n = f_std.shape[0]
        if isinstance(y, Tensor):
            if y.shape[:1] != (n,):
                raise InputError(
                    describe(f"a target of shape {tuple(y.shape)}", f"{n} rows", "give one target for each example")
                )
            y = y.unsqueeze(1)
        return Terms(f_std, y, f_std.new_ones(n, 1).detach(), None, ())

    def loss(self, terms: Terms) -> Float[Tensor, "N S"]:
        """``ℓ(f_n, y_n)``."""
        y = terms.target()
        rows = [self.loss_fn(f_n[0], y_n[0]) for f_n, y_n in zip(terms.f, y, strict=True)]
        return torch.stack([row.reshape(()) for row in rows]).unsqueeze(1)

    def gradient(self, terms: Terms) -> Float[Tensor, "N S C"]:
        """``∂ℓ/∂f`` by autodiff."""
        f = terms.f.detach().requires_grad_()
        with torch.enable_grad():
            total = self.loss(replace(terms, f=f)).sum()
        return torch.autograd.grad(total, f)[0]

    def columns(self, terms: Terms) -> int:
        """Columns of the given root, or C."""
        if self.hessian_root is not None:
            return int(self.hessian_root(terms.f.detach()[:, 0]).shape[0])
        return terms.f.shape[-1]

    def root(self, terms: Terms, start: int, stop: int) -> Float[Tensor, "R N S C"]:
        """The given root, or ``U √Λ`` of the autodiff Hessian."""
        if self.hessian_root is not None:
            return self.hessian_root(terms.f.detach()[:, 0])[start:stop].unsqueeze(2)
        values, vectors = torch.linalg.eigh(self._hessian(terms))
        if bool((values < -1e-6 * values.abs().amax(-1, keepdim=True)).any()):
            raise InputError(
                describe("a custom loss that is not convex in the output", "a PSD output Hessian", "use lw.hessian")
            )
        columns = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        return columns.permute(2, 0, 1)[start:stop].unsqueeze(2)

    def sample(self, terms: Terms, generator: torch.Generator) -> Float[Tensor, "N S C"]:
        """The given sampler, or ``L ε`` with random signs."""
        if self.sample_gradient is not None:
            return self.sample_gradient(terms.f.detach()[:, 0], generator).unsqueeze(1)
        columns = self.root(terms, 0, self.columns(terms))
        uniform = drawn(torch.rand, columns[..., 0].movedim(0, -1), generator, terms.part)  # N S R
        signs = uniform.sub(0.5).sign().movedim(-1, 0)
        return (columns * signs.unsqueeze(-1)).sum(0)

    def hessian_product(self, terms: Terms, u: Float[Tensor, "*B N S C"]) -> Float[Tensor, "*B N S C"]:
        """``H u``."""
        columns = self.root(terms, 0, self.columns(terms))
        return torch.einsum("rnsc,rnsd,...nsd->...nsc", columns, columns, u)

    def _hessian(self, terms: Terms) -> Float[Tensor, "N C C"]:
        y = terms.target()
        rows = [
            torch.func.hessian(lambda f, y_n=y_n: self.loss_fn(f, y_n[0]).reshape(()))(f_n[0])
            for f_n, y_n in zip(terms.f.detach(), y, strict=True)
        ]
        return torch.stack(rows)
