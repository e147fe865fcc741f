"""Two centerings of a tangent kernel, against features that are centred one by one: which of them is meant?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.kernel.kernel import MatrixKernel


class Readings(NamedTuple):
    """Relative distance of both centred kernels from that of centred features, in Frobenius norm."""

    printed: float
    """``C K C`` with ``C = I − 11ᵀ/(n c)``, as in eq. (6.3.3)."""
    corrected: float
    """``(C_n ⊗ I_c) K (C_n ⊗ I_c)``."""


def features(model: nn.Module, x: Float[Tensor, "N *pixels"]) -> Float[Tensor, "N P d"]:
    """``∂f_p(x_n)/∂θ`` by reverse mode, one after the other."""
    parameters = list(model.parameters())
    outputs = model(x)
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(f, parameters, retain_graph=True)])
        for f in outputs.flatten()
    ]
    return torch.stack(rows).view(*outputs.shape, -1)


def readings(model: nn.Module, x: Float[Tensor, "N *pixels"]) -> Readings:
    """Features minus their mean over examples, output by output (section 6.3.1), decide between the two."""
    phi = features(model, x)
    centred = (phi - phi.mean(0)).flatten(0, 1)
    K, truth = MatrixKernel(phi.flatten(0, 1) @ phi.flatten(0, 1).mT, (phi.shape[1],)), centred @ centred.mT
    errors = [float((K.centered(way).matrix() - truth).norm() / truth.norm()) for way in ("global", "per-output")]
    return Readings(*errors)
