"""One number for each thing that a seed draws, so that a seed that is ignored can be noticed."""

import torch

from layerwise.studies.feature_learning.problem import Setting
from layerwise.studies.feature_learning.runs import Group


def draws_of(setting: Setting, seed: int) -> dict[str, float]:
    """What a seed draws, a number each: the problem, the start, a training batch and the test batch.

    Each depends on one of the seed's streams alone: the sum of the true map F⋆G⋆, of the initial G, and of the inputs
    of a batch after Σ^½ is taken from them. Two seeds with the same number draw the same thing.

    >>> one, other = (draws_of(Setting(dx=10, dy=4, k=2, batch=50, test_batch=50), seed) for seed in (0, 1))
    >>> sorted(one), any(one[name] == other[name] for name in one)
    (['problem', 'start', 'test', 'train'], False)
    """
    group = Group(setting, (seed,), "cpu", torch.float64)

    def inputs(batch, task) -> float:
        u = torch.linalg.solve(task.root, batch.samples().x.mT).mT.round(decimals=4)
        return float((u * torch.arange(1, u.numel() + 1).view_as(u)).sum() / u.numel())

    return {
        "problem": float(group.train.map.sum()),
        "start": float(group.start.sum()),
        "train": inputs(group.batch(1, "first"), group.train),
        "test": inputs(group.test_batch, group.test),
    }
