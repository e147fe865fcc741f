"""Independent binary labels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.device import Readback, drawn
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods.likelihood import Likelihood, Terms, basis
from layerwise.foundations.likelihoods.values import last_axis_terms


@dataclass(frozen=True, kw_only=True)
class Bernoulli(Likelihood):
    """Independent binary labels, ``q = sigmoid(f)``: ``ℓ = BCE(f, y)`` summed over entries; ``H = diag q(1−q)``."""

    name = "bernoulli"

    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        """Outputs and targets of one shape; targets lie in [0, 1]."""
        return self._standard(f, y, mask, arrange, self.ask(y, mask)).without_hints()

    def ask(self, y: Any, mask: Tensor | None) -> Readback | None:
        """Whether all targets lie in [0, 1], and how many entries a mask keeps."""
        if not isinstance(y, Tensor) or y.is_complex() or not y.numel():
            return None
        fine = ((y >= 0) & (y <= 1)).all().long()
        return Readback(torch.stack([fine] if mask is None else [fine, mask.bool().sum()]))

    def standardize_asked(
        self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor], asked: Readback | None
    ) -> Terms:
        """The same, without a synchronization after the forward."""
        if type(self).standardize is not Bernoulli.standardize:  # a subclass reads outputs its own way
            return self.standardize(f, y, mask, arrange)
        return self._standard(f, y, mask, arrange, asked)

    def _standard(
        self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor], asked: Readback | None
    ) -> Terms:
        fine, *kept = [True] if asked is None else asked.read()
        if not fine:
            raise InputError(describe("targets outside [0, 1]", "probabilities or 0/1 labels", "rescale the target"))
        if isinstance(y, Tensor) and y.is_complex():
            raise InputError(describe(f"a target of dtype {y.dtype}", "probabilities or 0/1 labels", "call y.real"))
        y = y.to(f.dtype) if isinstance(y, Tensor) else y
        return last_axis_terms(f, y, mask, arrange, self.name, *kept)

    def loss(self, terms: Terms) -> Float[Tensor, "N S"]:
        """``m BCE``."""
        bce = F.binary_cross_entropy_with_logits(terms.f, terms.target(), reduction="none")
        return terms.weight * bce.sum(-1)

    def gradient(self, terms: Terms) -> Float[Tensor, "N S C"]:
        """``m (q − y)``."""
        return terms.weight.unsqueeze(-1) * (terms.f.detach().sigmoid() - terms.target())

    def columns(self, terms: Terms) -> int:
        """C."""
        return terms.f.shape[-1]

    def root(self, terms: Terms, start: int, stop: int) -> Float[Tensor, "R N S C"]:
        """``√(m q(1−q)) e_k``."""
        scale = self._curvature(terms).sqrt()
        return torch.einsum("nsc,rc->rnsc", scale, basis(terms.f, start, stop))

    def sample(self, terms: Terms, generator: torch.Generator) -> Float[Tensor, "N S C"]:
        """``√m (q − t)``, t drawn from the model."""
        q = terms.f.detach().sigmoid()
        t = (drawn(torch.rand, q, generator, terms.part) < q).to(q.dtype)
        return terms.weight.sqrt().unsqueeze(-1) * (q - t)

    def hessian_product(self, terms: Terms, u: Float[Tensor, "*B N S C"]) -> Float[Tensor, "*B N S C"]:
        """``m q(1−q) u``."""
        return self._curvature(terms) * u

    def _curvature(self, terms: Terms) -> Tensor:
        q = terms.f.detach().sigmoid()
        return terms.weight.unsqueeze(-1) * q * (1 - q)
