"""Squared error."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.device import Readback, drawn
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods.likelihood import Likelihood, Terms, basis
from layerwise.foundations.likelihoods.values import last_axis_terms


@dataclass(frozen=True, kw_only=True)
class Gaussian(Likelihood):
    """``ℓ = ‖y − f‖² / 2σ²``, summed over the entries of f; ``H = I/σ²``.

    >>> Gaussian().name
    'gaussian'
    """

    variance: float = 1.0
    name = "gaussian"

    def __post_init__(self) -> None:
        if not self.variance > 0:
            raise InputError(describe(f"variance={self.variance}", "a number > 0", "pass e.g. variance=1.0"))

    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        """Outputs and targets of one shape; the last axis is C."""
        return self._standard(f, y, mask, arrange, self.ask(y, mask)).without_hints()

    def ask(self, y: Any, mask: Tensor | None) -> Readback | None:
        """How many entries a mask keeps."""
        return None if mask is None else Readback(mask.bool().sum().reshape(1))

    def standardize_asked(
        self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor], asked: Readback | None
    ) -> Terms:
        """The same, without a synchronization after the forward."""
        if type(self).standardize is not Gaussian.standardize:  # a subclass reads outputs its own way
            return self.standardize(f, y, mask, arrange)
        return self._standard(f, y, mask, arrange, asked)

    def _standard(
        self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor], asked: Readback | None
    ) -> Terms:
        if isinstance(y, Tensor) and not y.is_floating_point():
            raise InputError(describe(f"a target of dtype {y.dtype}", "a floating-point target", "call y.float()"))
        return last_axis_terms(f, y, mask, arrange, self.name, None if asked is None else asked.read()[0])

    def loss(self, terms: Terms) -> Float[Tensor, "N S"]:
        """``m ‖y − f‖² / 2σ²``."""
        return terms.weight * (terms.target() - terms.f).square().sum(-1) / (2 * self.variance)

    def gradient(self, terms: Terms) -> Float[Tensor, "N S C"]:
        """``m (f − y) / σ²``."""
        return terms.weight.unsqueeze(-1) * (terms.f.detach() - terms.target()) / self.variance

    def columns(self, terms: Terms) -> int:
        """C."""
        return terms.f.shape[-1]

    def root(self, terms: Terms, start: int, stop: int) -> Float[Tensor, "R N S C"]:
        """``√m e_k / σ``."""
        scale = (terms.weight / self.variance).sqrt()
        return torch.einsum("ns,rc->rnsc", scale, basis(terms.f, start, stop))

    def sample(self, terms: Terms, generator: torch.Generator) -> Float[Tensor, "N S C"]:
        """``√m ε / σ``, ε standard normal."""
        return (terms.weight / self.variance).sqrt().unsqueeze(-1) * drawn(torch.randn, terms.f, generator, terms.part)

    def hessian_product(self, terms: Terms, u: Float[Tensor, "*B N S C"]) -> Float[Tensor, "*B N S C"]:
        """``m u / σ²``."""
        return (terms.weight / self.variance).unsqueeze(-1) * u
