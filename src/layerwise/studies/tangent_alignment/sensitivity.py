"""How far outputs move when parameters do: along the leading directions of the Jacobian, and along random ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream
from layerwise.kernel.jacobian import jacobian
from layerwise.kernel.ntk import ntk

Directions = dict[str, Float[Tensor, "k ..."]]
"""By parameter, k directions of it; a direction has norm one over all parameters."""


class Sensitivity(NamedTuple):
    """Root mean square of the change of outputs at new examples, one entry a direction, the leading one first."""

    leading: Float[Tensor, "k"]
    random: Float[Tensor, "k"]
    theory: Float[Tensor, "k"]
    """``√λ_j / √(Tr K / P)``: what the linearization says of a leading direction over a random one, at the examples."""


def leading_directions(
    model: nn.Module, x: Float[Tensor, "N *pixels"], k: int
) -> tuple[Float[Tensor, "k"], Directions, Float[Tensor, ""]]:
    """Eigenvalues of the tangent kernel, largest first, right singular vectors of the Jacobian, and the trace."""
    K = ntk(model, x, progress=False)
    if not 1 <= k <= min(K.shape[0], sum(p.numel() for p in model.parameters())):
        given = f"{k} directions of {K.shape[0]} outputs"
        raise InputError(describe(given, "as many as there are, at most", "ask for fewer"))
    values, vectors = K.eigh(k)
    values, vectors = values.flip(0), vectors.flip(1)
    pulled = jacobian(model, x, progress=False).pull(vectors.mT.contiguous())
    return values, {name: v / values.sqrt().view(-1, *[1] * (v.ndim - 1)) for name, v in pulled.items()}, K.trace()


def random_directions(model: nn.Module, k: int, generator: torch.Generator) -> Directions:
    """Uniform on the sphere."""
    drawn = {
        name: torch.randn(k, *p.shape, generator=generator, dtype=torch.float64).to(p)
        for name, p in model.named_parameters()
    }
    norms = torch.stack([v.flatten(1).double().square().sum(1) for v in drawn.values()]).sum(0).sqrt()
    return {name: v / norms.to(v).view(-1, *[1] * (v.ndim - 1)) for name, v in drawn.items()}


@torch.no_grad()
def changes(model: nn.Module, x: Float[Tensor, "M *pixels"], directions: Directions, size: float) -> Float[Tensor, "k"]:
    """Root mean square over examples of ``‖f(θ + size·v) − f(θ)‖``, for each direction v."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    before = model(x)
    found = []
    for j in range(len(next(iter(directions.values())))):
        moved = {name: p + size * directions[name][j] for name, p in parameters.items()}
        f = torch.func.functional_call(model, moved, (x,))
        found.append((f - before).flatten(1).square().sum(1).mean().sqrt())
    return torch.stack(found)


def sensitivity(
    model: nn.Module,
    x: Float[Tensor, "N *pixels"],
    new: Float[Tensor, "M *pixels"],
    *,
    directions: int,
    size: float | int,
    seed: int,
) -> Sensitivity:
    """Of a model in eval mode.

    Args:
        model: what is moved (a copy of it); left as it was.
        x: examples of the Jacobian.
        new: examples at which the change is measured.
        directions: how many of either kind.
        size: norm of a step, relative to that of the parameters.
        seed: of the random ones.
    """
    values, leading, trace = leading_directions(model, x, directions)
    count = sum(p.numel() for p in model.parameters())
    norm = float(torch.stack([p.detach().double().square().sum() for p in model.parameters()]).sum().sqrt())
    random = random_directions(model, directions, stream(seed, "directions"))
    return Sensitivity(
        leading=changes(model, new, leading, size * norm).double().cpu(),
        random=changes(model, new, random, size * norm).double().cpu(),
        theory=(values.double() / (trace.double() / count)).sqrt().cpu(),
    )
