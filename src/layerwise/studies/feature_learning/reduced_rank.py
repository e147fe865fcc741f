"""What the data allow: samples that reduced-rank least squares needs to find the representation of `samples`."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.studies.feature_learning.measures import subspace_distance
from layerwise.studies.feature_learning.samples import Recovery, batch, draw_teacher


def least_squares_needed(setting: Recovery, seed: int, every: int = 4) -> float:
    """Samples that reduced-rank least squares on all samples so far needs: what the data allow, whoever computes.

    With Â the least squares of y on x, U the top k eigenvectors of ÂSxÂᵀ, the representation is the rows of UᵀÂ: the
    maximum likelihood of rank k. It is computed after every few samples, from n = 40·every on
    after at most 5 % more.

    >>> least_squares_needed(Recovery(condition=1.0), 0) < least_squares_needed(Recovery(condition=1e4), 0)
    True
    """
    target, task = draw_teacher(setting, seed)
    n = -(-setting.dx // every) * every
    first, within, R = n, 0, torch.empty(0, setting.dx + setting.dy).double()
    rows = R
    for step in range(1, setting.steps + 1):
        rows = torch.cat([rows, torch.cat(batch(setting, task, seed, step), 1)])
        while (used := step * setting.batch) >= n:
            split = len(rows) - (used - n)
            R, rows = torch.linalg.qr(torch.cat([R, rows[:split]]), mode="r")[1], rows[split:]
            near = float(subspace_distance(_reduced_rank(R, setting), target)) <= setting.distance
            first, within = (first if within else n, within + 1) if near else (n, 0)
            if within == setting.stay:
                return float(first)
            n += every * max(1, n // (20 * every))
    return math.inf


def _reduced_rank(R: Float[Tensor, "m dxdy"], setting: Recovery) -> Float[Tensor, "k dx"]:
    """UᵀÂ from the triangular factor of [x y], whose blocks R₁₁ and R₁₂ give Âᵀ = R₁₁⁻¹R₁₂ and n ÂSxÂᵀ = R₁₂ᵀR₁₂."""
    root, fitted = R[: setting.dx, : setting.dx], R[: setting.dx, setting.dx :]
    U = torch.linalg.eigh(fitted.mT @ fitted)[1][:, -setting.k :]
    return U.mT @ torch.linalg.solve_triangular(root, fitted, upper=True).mT
