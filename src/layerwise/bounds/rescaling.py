"""Which norm measures capacity: the bound of the minimum-norm interpolator, and its optimum over rescaled features."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe

NULL = 1e-12
"""Eigenvalues below this share of the largest, or below rounding, have no mode of their own: an interpolator does not
use them."""


class Rescaling(NamedTuple):
    """Modes of a kernel in ascending order of their eigenvalues, and two bounds of the complexity."""

    eigenvalues: Float[Tensor, "*B n"]
    scales: Float[Tensor, "*B n"]
    """ν_j = λ_j/|u_jᵀy|, up to a constant: the metric AAᵀ along v_j. ∞ where the labels have no part."""
    bound: Float[Tensor, "*B"]
    """(1/n) √(yᵀK⁻¹y Tr K), with the norm of the weights themselves (A = I)."""
    optimal_bound: Float[Tensor, "*B"]
    """(1/n) Σ_j |u_jᵀy|, with the norm that `scales` makes: never above `bound`."""


def optimal_rescaling(kernel: Float[Tensor, "*B n m"], y: Float[Tensor, "*B k"]) -> Rescaling:
    """The rescaling of features along singular vectors that makes the bound (6.4.3) smallest (Proposition B.2.5).

    The function is the interpolator of least norm, w* = ΦᵀK⁻¹y, and M = ‖w*‖_A. Modes of eigenvalue zero are left out
    of both bounds. Where eigenvalues coincide, their vectors are arbitrary, and so is the optimum over their scales.

    Args:
        kernel: K = ΦΦᵀ ``[n, n]``, or a batch of them.
        y: labels ``[n]``.

    >>> K = torch.diag(torch.tensor([100.0, 1.0]))
    >>> found = optimal_rescaling(K, torch.tensor([1.0, 1.0]))
    >>> round(float(found.bound), 6), float(found.optimal_bound)
    (5.05, 1.0)
    """
    if kernel.shape[-1] != kernel.shape[-2] or kernel.shape[-1] != y.shape[-1]:
        given = f"a kernel of shape {tuple(kernel.shape)} and labels of shape {tuple(y.shape)}"
        raise InputError(describe(given, "K [n, n] and y [n]", "pass both for the same examples"))
    if not bool(torch.isfinite(kernel).all()) or not bool(torch.isfinite(y).all()):
        raise InputError(describe("numbers that are not finite", "a finite kernel and labels", "check the features"))
    values, vectors = torch.linalg.eigh(kernel)
    used = values > max(NULL, kernel.shape[-1] * torch.finfo(values.dtype).eps) * values[..., -1:]
    part = (vectors.mT @ y.unsqueeze(-1)).squeeze(-1).abs() * used
    n, kept = kernel.shape[-1], torch.where(used, values, torch.ones_like(values))
    norm = (part.square() / kept).sum(-1)
    trace = (values * used).sum(-1)
    return Rescaling(values, kept / part, (norm * trace).sqrt() / n, part.sum(-1) / n)
