"""Inverse roots of damped factors, with guards: a decomposition that fails keeps the last good one."""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import NumericalError
from layerwise.foundations.linalg import finite_matrices, gram, guarded_eigh, guarded_inverse
from layerwise.optim.cuda import factor as symmetric
from layerwise.optim.rule import Health


def mean_eigenvalue(M: Tensor, size: int | None = None) -> Float[Tensor, "K"]:
    """``tr M / n`` of each group, of a matrix or of a diagonal; n is the size without padding, where given."""
    diagonal = symmetric.diagonal(M)
    return diagonal.mean(-1) if size is None or size == diagonal.shape[-1] else diagonal.sum(-1) / size


def inverse_root(
    M: Float[Tensor, "K n n"], shift: Float[Tensor, "K"], power: float, by_eigh: bool = False
) -> Float[Tensor, "K n n"]:
    """``(M + shift I)^(−power)``: by Cholesky for a power of 1 (unless `by_eigh`), else through the eigenbasis."""
    if power == 1 and not by_eigh:
        return guarded_inverse(M, shift, name="damped factor")
    values, vectors = guarded_eigh(M, name="factor")
    floor = values.amax(-1, keepdim=True) * torch.finfo(values.dtype).eps * M.shape[-1]
    damped = torch.maximum(values + shift.unsqueeze(-1), floor.clamp_min(torch.finfo(values.dtype).tiny))
    return gram((vectors * damped.pow(-power / 2).unsqueeze(-2)).mT)  # one triangle


def guarded_root(M: Tensor, shift: Tensor, power: float, last: Tensor, health: Health, by_eigh: bool = False) -> Tensor:
    """The same for a factor or its diagonal; what cannot be decomposed keeps `last`."""
    if M.ndim == 2:
        found = (M + shift.unsqueeze(-1)).pow(-power)
        finite = torch.isfinite(found).all(1)
    else:
        try:
            found = inverse_root(M, shift, power, by_eigh)
        except NumericalError:
            return _one_by_one(M, shift, power, last, health)
        finite = finite_matrices(found)
    known = mean_eigenvalue(M) > 0  # of a factor without statistics, damping alone would be inverted
    good = finite & known
    health.count("fallbacks", (known & ~good).sum())
    if M.device.type == "cpu" and bool(good.all()):
        return found
    return torch.where(good.view(-1, *[1] * (found.ndim - 1)), found, last)


def _one_by_one(M: Tensor, shift: Tensor, power: float, last: Tensor, health: Health) -> Tensor:
    """Each group alone, so that one bad factor does not cost the others theirs."""
    found = []
    for k in range(M.shape[0]):
        try:
            found.append(inverse_root(M[k : k + 1], shift[k : k + 1], power)[0])
        except NumericalError:
            health.fallbacks += 1
            found.append(last[k])
    return torch.stack(found)


def condition_numbers(M: Tensor, shift: Tensor) -> Float[Tensor, "K"]:
    """A bound that needs no decomposition: ``(tr M + shift) / shift`` (1 for a factor that is zero)."""
    total = symmetric.diagonal(M).sum(-1)
    return (total + shift) / shift.clamp_min(torch.finfo(M.dtype).tiny)
