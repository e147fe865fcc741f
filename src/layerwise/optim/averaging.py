"""Running means with bias correction, one count a group."""

import torch
from torch import Tensor

from layerwise.optim.rule import Health


def update_mean(
    mean: Tensor, count: Tensor, new: Tensor, decay: float, seen: Tensor | None, health: Health | None = None
) -> None:
    """``mean ← mean + (1−ρ)/(1−ρᵗ) (new − mean)``: an exponential average without the bias of its start.

    Groups that were not seen, or whose new value is not finite, keep what they have; `count` is t, ``[K]``.
    """
    finite = torch.isfinite(new.flatten(1)).all(1)
    take = finite if seen is None else finite & seen
    if health is not None:
        asked = finite.numel() if seen is None else int(seen.sum())
        health.skipped_statistics += asked - int(take.sum())
    count += take.to(count.dtype)
    t = count.clamp_min(1).double()
    weight = ((1 - decay) / (1 - decay**t)) if decay > 0 else torch.ones_like(t)
    weight = torch.where(take, weight, 0.0).to(mean.dtype)
    clean = torch.where(_like(take, new), new, mean).to(mean.dtype)
    mean += _like(weight, mean) * (clean - mean)


def _like(per_group: Tensor, tensor: Tensor) -> Tensor:
    return per_group.view(-1, *[1] * (tensor.ndim - 1))
