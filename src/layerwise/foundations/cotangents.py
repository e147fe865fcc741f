"""Cotangents: which vectors are pulled back from the output. Choosing one chooses the matrix.

Each is a function of outputs and targets alone, with a stated ``Σ_v v vᵀ``:

| cotangent | ``Σ vvᵀ`` at the output | gives |
|---|---|---|
| `HessianRoot` | Hessian of the loss | GGN = Fisher |
| `SampledLabels` | the same, in expectation | Monte-Carlo Fisher |
| `LossGradient` | outer product of the loss gradient | empirical Fisher, and the gradient |
| `GivenGradient` | outer product of a given gradient | second moment of any loss's gradients |
| `OutputBasis` | identity | Jacobian, tangent kernel |

No cotangent divides by the number of examples: the statistics are divided once, when they are finished.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.likelihoods import Likelihood, Terms
from layerwise.foundations.random import stream


class Cotangent(ABC):
    """V vectors at the output, made a few at a time so that many outputs need not fit at once."""

    @abstractmethod
    def count(self, terms: Terms) -> int:
        """V."""

    @abstractmethod
    def slice(self, terms: Terms, start: int, stop: int, batch: int) -> Float[Tensor, "V N S C"]:
        """Vectors start … stop; `batch` numbers the batch, so that random draws can be repeated."""


@dataclass(frozen=True)
class HessianRoot(Cotangent):
    """Columns of a root of the output Hessian: ``Σ_v v vᵀ = m w H``, position by position."""

    likelihood: Likelihood

    def count(self, terms: Terms) -> int:
        """Positions × columns a position."""
        return terms.f.shape[1] * self.likelihood.columns(terms)

    def slice(self, terms: Terms, start: int, stop: int, batch: int) -> Float[Tensor, "V N S C"]:
        """One position at a time: vectors of different positions must not be added up."""
        s, columns = terms.f.shape[1], self.likelihood.columns(terms)
        if s == 1:
            return self.likelihood.root(terms, start, stop)
        chosen = terms.f.new_zeros(stop - start, *terms.f.shape)
        for position in range(start // columns, (stop - 1) // columns + 1):
            lo, hi = max(start, position * columns), min(stop, (position + 1) * columns)
            root = self.likelihood.root(terms, lo - position * columns, hi - position * columns)
            chosen[lo - start : hi - start, :, position] = root[:, :, position]
        return chosen


@dataclass(frozen=True)
class SampledLabels(Cotangent):
    """Gradients at labels drawn from the model: ``E Σ_v v vᵀ = m w H``, positions drawn independently."""

    likelihood: Likelihood
    samples: int
    seed: int

    def count(self, terms: Terms) -> int:
        """The number of samples."""
        return self.samples

    def slice(self, terms: Terms, start: int, stop: int, batch: int) -> Float[Tensor, "V N S C"]:
        """Each sample has a stream of its own, named by batch and number: the same at every pass."""
        drawn = [self.likelihood.sample(terms, stream(self.seed, "labels", batch, v)) for v in range(start, stop)]
        if self.samples == 1:
            return drawn[0].unsqueeze(0)
        return torch.stack(drawn).div_(self.samples**0.5)  # a copy of ours, and may be gigabytes


@dataclass(frozen=True)
class LossGradient(Cotangent):
    """The gradient of the loss at the data's own labels."""

    likelihood: Likelihood

    def count(self, terms: Terms) -> int:
        """One."""
        return 1

    def slice(self, terms: Terms, start: int, stop: int, batch: int) -> Float[Tensor, "V N S C"]:
        """``∂ℓ/∂f``."""
        return self.likelihood.gradient(terms).unsqueeze(0)


@dataclass(frozen=True)
class GivenGradient(Cotangent):
    """The gradient of any loss, given as a function of the terms."""

    gradient: Callable[[Terms], Tensor]

    def count(self, terms: Terms) -> int:
        """One."""
        return 1

    def slice(self, terms: Terms, start: int, stop: int, batch: int) -> Float[Tensor, "V N S C"]:
        """What the function returns."""
        return self.gradient(terms).unsqueeze(0)


@dataclass(frozen=True)
class OutputBasis(Cotangent):
    """Every output coordinate: ``Σ_v v vᵀ = I``."""

    def count(self, terms: Terms) -> int:
        """S·C."""
        return terms.f.shape[1] * terms.f.shape[2]

    def slice(self, terms: Terms, start: int, stop: int, batch: int) -> Float[Tensor, "V N S C"]:
        """Rows of the identity, the same for every example."""
        n, s, c = terms.f.shape
        rows = torch.eye(s * c, dtype=terms.f.dtype, device=terms.f.device)[start:stop]
        return rows.view(-1, 1, s, c).expand(-1, n, -1, -1)
