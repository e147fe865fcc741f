"""Batches of many seeds at once, for a GPU: one copy of all random numbers, one product for all Gram matrices.

Batch by batch, every small copy waits for all that is queued on the device, and every product is a launch of its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from layerwise.foundations.asked import sent
from layerwise.studies.feature_learning.batch import Batch, Numbers, Samples, label_noise, signs_of
from layerwise.studies.feature_learning.problem import Task


def batches_of(numbers: Sequence[Numbers], task: Task, n: int, dtype: torch.dtype = torch.float64) -> Batch:
    """What `stack` makes of the batches of several seeds, `[seed, 1, …]`; `task` is those of the seeds, stacked so."""
    device = task.root.device
    root, A = task.root.squeeze(1), task.map.squeeze(1)
    u = sent(torch.stack([one.u for one in numbers]), device)
    u = signs_of(u, n, A.shape[-1]) if task.uniform else u
    noise = sent(torch.stack([one.noise for one in numbers]), device)
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

    def samples() -> Samples:
        x = wide @ root
        normal = sent(torch.stack([label_noise(n, A.shape[-2], one.seed) for one in numbers]), device)
        return Samples(ready(x), ready(x @ A.mT + noise), ready(normal))

    return Batch(Sx=ready(Sx), Syx=ready(A_Sx + Snx), Syy=ready(Syy), samples=samples)
