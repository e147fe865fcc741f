"""Running means with bias correction, one count a group."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.optim.cuda import factor as symmetric
from layerwise.optim.rule import Health


def update_mean(
    mean: Tensor, count: Tensor, new: Tensor, decay: float, seen: Tensor | None, health: Health | None = None
) -> None:
    """``mean ← mean + (1−ρ)/(1−ρᵗ) (new − mean)``: an exponential average without the bias of its start.

    Groups that were not seen, or whose new value is not finite, keep what they have; `count` is t, ``[K]``.
    """
    finite = finite_moments(new)
    gate = None if health is None else health.gate
    asked = seen if gate is None else gate.expand(len(finite)) if seen is None else seen & gate
    take = finite if asked is None else finite & asked
    everything = gate is None and bool(take.all())
    if health is not None and not everything:
        health.count("skipped_statistics", ((finite.numel() if asked is None else asked.sum()) - take.sum()))
    count += take.to(count.dtype)
    weight = running_weight(count, decay)
    if gate is not None and mean.dtype == torch.float32:
        symmetric.ema_(mean, new, torch.where(take, weight, 0.0).to(mean.dtype))
        return
    new = symmetric.alike(new.to(mean.dtype), mean)
    if not everything:  # 0 · nan would still be nan
        weight, new = torch.where(take, weight, 0.0), torch.where(_like(take, new), new, mean)
    mean.lerp_(new, _like(weight.to(mean.dtype), mean))


def running_weight(count: Tensor, decay: float) -> Float[Tensor, "K"]:
    """``(1−ρ)/(1−ρᵗ)``, in float64."""
    t = count.clamp_min(1).double()
    return (1 - decay) / (1 - decay**t) if decay > 0 else torch.ones_like(t)


def finite_moments(M: Tensor) -> Bool[Tensor, "K"]:
    """Whether each second moment (a matrix, or a diagonal) is finite.

    The diagonal tells: ``|M_ij|² ≤ M_ii M_jj``, and what is not finite in a row of X is not finite in ``(XᵀX)_ii``.
    """
    return torch.isfinite(M if M.ndim == 2 else M.diagonal(dim1=-2, dim2=-1)).all(-1)


def _like(per_group: Tensor, tensor: Tensor) -> Tensor:
    return per_group.view(-1, *[1] * (tensor.ndim - 1))
