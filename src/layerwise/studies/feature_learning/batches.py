"""Batches of many seeds at once, for a GPU: one copy of all random numbers, one product for all Gram matrices.

Batch by batch, every small copy waits for all that is queued on the device, and every product is a launch of its own.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from layerwise.foundations.device import sent
from layerwise.studies.feature_learning.batch import Batch, Numbers, Samples, label_noise, signs_of
from layerwise.studies.feature_learning.problem import Task


def batches_of(numbers: Sequence[Numbers], task: Task, n: int, dtype: torch.dtype = torch.float64) -> Batch:
    """What `stack` makes of the batches of several seeds, `[seed, 1, …]`; `task` is those of the seeds, stacked so."""
    u, noise = (sent(torch.stack([getattr(one, name) for one in numbers]), task.root.device) for name in ("u", "noise"))
    seeds = [one.seed for one in numbers]
    return moments(u.unsqueeze(0), noise.unsqueeze(0), task, dtype, lambda: [seeds])[0]


def moments(
    u: Shaped[Tensor, "b s *u"],
    noise: Float[Tensor, "b s n dy"],
    task: Task,
    dtype: torch.dtype,
    seeds: Callable[[], Sequence[Sequence[int]]],
) -> list[Batch]:
    """Several batches of all seeds, from their numbers on the device; `seeds` are those of the numbers, by batch."""
    n = noise.shape[-2]
    root, A = task.root.squeeze(1), task.map.squeeze(1)
    u = signs_of(u, n, A.shape[-1]) if task.uniform else u
    wide = u.double()
    exact = u.dtype == torch.float64 or n < 2**24  # signs add up to integers
    Su = (u.mT @ u if exact else wide.mT @ wide).double() / n
    Sx = root @ Su @ root
    Sx = (Sx + Sx.mT) / 2
    Snx = (noise.mT @ wide) @ root / n
    A_Sx = A @ Sx
    Syy = ((A_Sx + 2 * Snx) * A).sum((-2, -1)) + noise.square().sum((-2, -1)) / n

    def ready(t: Tensor) -> Tensor:
        return t.to(dtype).unsqueeze(1)

    def samples(place: int) -> Samples:
        x = wide[place] @ root
        normal = torch.stack([label_noise(n, A.shape[-2], seed) for seed in seeds()[place]])
        return Samples(ready(x), ready(x @ A.mT + noise[place]), ready(sent(normal, x.device)))

    return [
        Batch(Sx=ready(Sx[i]), Syx=ready(Syx), Syy=ready(Syy[i]), samples=lambda i=i: samples(i))
        for i, Syx in enumerate(A_Sx + Snx)
    ]
