"""How far the leading eigenspaces of one layer's Hessian overlap between networks that were trained independently."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise import structure
from layerwise.studies.hessian_structure.measures import is_led_by_one, measured
from layerwise.studies.hessian_structure.networks import Task


class Between(NamedTuple):
    """Means over all pairs of networks."""

    overlap: Float[Tensor, "k"]
    """Of the spaces of the k first eigenvectors, from k = 1 on."""
    theory: Float[Tensor, "k"]
    """(k/m)(t₁ · t₂)² up to k = m, then as at m: theorem C.7.1, whether or not its condition holds."""
    inputs: float
    """(t₁ · t₂)² of the leading inputs."""
    led: int
    """The largest k at which the theorem's condition holds for all networks."""
    outputs: int
    """m."""
    entries: int
    """mn."""


def between(task: Task, seeds: Sequence[int], layer: str, leading: int = 60, *, at_start: bool = False) -> Between:
    """Compare a layer of several networks, pair by pair, up to so many leading eigenvectors."""
    weight = task.model(seeds[0]).get_parameter(f"{layer}.weight")
    m, entries = weight.shape[0], weight.numel()
    found = [measured(task, seed, layer, at_start, leading) for seed in seeds]
    k = found[0].vectors.shape[1]
    curves, inputs = [], []
    for one, other in combinations(found, 2):
        curves.append(structure.overlap_curve(one.vectors, other.vectors))
        inputs.append(float(one.direction @ other.direction) ** 2)
    shared = sum(inputs) / len(inputs)
    theory = shared * (torch.arange(1, k + 1, dtype=torch.float64) / m).clamp(max=1)
    led = max((j for j in range(1, m + 1) if all(is_led_by_one(one, j) for one in found)), default=0)
    return Between(torch.stack(curves).mean(0), theory, shared, led, m, entries)
