"""Likelihoods: functions of the model's output and the target alone, which know no layer.

A likelihood sees outputs in standard form, ``f [N, S, C]``: N examples, S positions, C numbers at each. With
``m`` the mask (0 or 1) and ``w`` a term's weight, the loss of the data is

    L = 1/N Σ_n Σ_s m_ns w_ns ℓ(f_ns, y_ns)

and its curvature at the output ``1/N Σ_n Σ_s m_ns w_ns H(f_ns)``. N counts examples of all the data; the
division is made once, where the statistics are finished, never here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from layerwise.foundations.device import Readback
from layerwise.foundations.errors import InputError, describe


@dataclass(frozen=True)
class Terms:
    """A batch at the output, in standard form."""

    f: Float[Tensor, "N S C"]
    y: Shaped[Tensor, "N S *rest"] | None
    """Class indices [N, S], or values [N, S, C]; None where the data has no target."""
    weight: Float[Tensor, "N S"]
    """m · w: what each term counts."""
    mask: Bool[Tensor, "N S"] | None
    """Which positions count; None if all do."""
    positions: tuple[int, ...] = ()
    """The shape that S was flattened from."""
    part: tuple[int, int] | None = None
    """First example and number of examples of the whole batch, where these terms are a part of it."""
    kept: int | None = None
    """How many positions the mask keeps, where the host knows."""
    unweighted: bool = False
    """Whether the host knows that every weight is 1."""

    def without_hints(self) -> "Terms":
        """The same, for who may go on to change mask and weights: nothing is said of them but what they are."""
        return replace(self, kept=None, unweighted=False)

    def target(self) -> Tensor:
        """The target, or an error that says one is needed."""
        if self.y is None:
            raise InputError(
                describe(
                    "a batch without a target",
                    "a batch (x, y)",
                    'give y, or use estimator="sampled" or "exact"',
                )
            )
        return self.y


class Reading(ABC):
    """How a model's output (and target) is read."""

    @abstractmethod
    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        """Bring output and target to standard form; `arrange` moves the examples to the front."""

    def ask(self, y: Any, mask: Tensor | None) -> Readback | None:
        """What `standardize` needs of the target's values, sent to the host before the model runs; None: nothing."""
        return None

    def standardize_asked(
        self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor], asked: Readback | None
    ) -> Terms:
        """`standardize` with the readback that `ask` began: it does not wait for the forward that was queued since."""
        return self.standardize(f, y, mask, arrange)

    def alone(self, f: Tensor, arrange: Callable[[Tensor], Tensor]) -> Float[Tensor, "N S C"] | None:
        """The output in standard form without a target; None where positions and classes tell how."""
        return None


class Likelihood(Reading):
    """Loss, gradient, Hessian root and sampling at the output; subclass it for a likelihood of your own.

    `loss` and `gradient` carry the term's weight ``m·w``; `root` carries its square root.
    """

    name: str

    @abstractmethod
    def loss(self, terms: Terms) -> Float[Tensor, "N S"]:
        """``m w ℓ``, one number a term."""

    @abstractmethod
    def gradient(self, terms: Terms) -> Float[Tensor, "N S C"]:
        """``∂(m w ℓ)/∂f`` at the data's own target."""

    @abstractmethod
    def columns(self, terms: Terms) -> int:
        """How many root columns one position has."""

    @abstractmethod
    def root(self, terms: Terms, start: int, stop: int) -> Float[Tensor, "R N S C"]:
        """Columns ``start … stop`` of L with ``L Lᵀ = m w H(f)``, for every term."""

    @property
    def samples_half(self) -> bool:
        """Whether `sample` takes an output in half precision as it is, and gives vectors in it: copies are saved."""
        return False

    @abstractmethod
    def sample(self, terms: Terms, generator: torch.Generator) -> Float[Tensor, "N S C"]:
        """One random vector a term whose second moment is ``m w H(f)``: a label drawn from the model."""

    @abstractmethod
    def hessian_product(self, terms: Terms, u: Float[Tensor, "*B N S C"]) -> Float[Tensor, "*B N S C"]:
        """``m w H(f) u``."""


def basis(like: Tensor, start: int, stop: int) -> Tensor:
    """Rows start … stop of the identity of size C."""
    c = like.shape[-1]
    rows = torch.zeros(stop - start, c, dtype=like.dtype, device=like.device)
    rows[torch.arange(stop - start), torch.arange(start, stop)] = 1
    return rows
