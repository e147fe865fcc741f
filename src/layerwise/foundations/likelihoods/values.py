"""Standard form for likelihoods of real or 0/1 vectors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods.likelihood import Terms


def last_axis_terms(
    f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor], name: str, kept: int | None = None
) -> Terms:
    """Standard form for likelihoods of real or 0/1 vectors: target and output have one shape.

    `kept` is how many entries of the mask are not 0, where the host knows.
    """
    if y is not None and (not isinstance(y, Tensor) or y.shape != f.shape):
        given = (
            f"a target of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a target of type {type(y).__name__}"
        )
        raise InputError(
            describe(
                f"{given} for an output of shape {tuple(f.shape)}",
                f"a target of the output's own shape, for likelihood {name!r}",
                "reshape the target (a silent broadcast would mix examples)",
            )
        )
    elementwise = mask is not None and mask.shape == f.shape and f.ndim > 1
    axes = f.ndim if elementwise or f.ndim == 1 else f.ndim - 1
    lead = f.shape[:axes]
    if mask is not None and mask.shape != lead:
        raise InputError(
            describe(
                f"a mask of shape {tuple(mask.shape)} for an output of shape {tuple(f.shape)}",
                f"shape {tuple(lead)}",
                "give one entry for each example and position",
            )
        )

    def standard(t: Tensor) -> Tensor:
        arranged = arrange(t.reshape(*lead, -1))
        return arranged.reshape(arranged.shape[0], -1, arranged.shape[-1])

    f_std = standard(f)
    keep = None if mask is None else standard(mask)[..., 0].bool()
    y_std = None if y is None else standard(y)
    if y_std is not None and keep is not None:
        y_std = torch.where(keep.unsqueeze(-1), y_std, 0)  # a value that is missing may be anything, NaN too
    weight = f_std.new_ones(f_std.shape[:2]) if keep is None else keep.to(f_std.dtype)
    positions = tuple(arrange(f.reshape(*lead, -1)).shape[1:-1])
    return Terms(f_std, y_std, weight.detach(), keep, positions, kept=kept, unweighted=keep is None)
