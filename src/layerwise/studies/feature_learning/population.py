"""Batches without sampling error, and steps of an algorithm from a start of one's choice, for theorems on rates."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.studies.feature_learning.algorithms import Algorithm, Weights
from layerwise.studies.feature_learning.batch import Batch, Samples
from layerwise.studies.feature_learning.covariance import haar
from layerwise.studies.feature_learning.measures import subspace_distance
from layerwise.studies.feature_learning.problem import Task
from layerwise.studies.feature_learning.two_layer import least_squares_head, orthonormal_rows


def population_batch(task: Task) -> Batch:
    """The moments of a task itself, as of infinitely many samples: Sx = Σ, Syx = F⋆G⋆Σ, Syy = tr F⋆G⋆ΣG⋆ᵀF⋆ᵀ + dy σ².

    >>> I = torch.eye(2).double()
    >>> float(population_batch(Task(Sigma=I, root=I, map=2 * I, deviation=1.0, uniform=False)).Syy)
    10.0
    """

    def samples() -> Samples:
        raise InputError(describe("the population", "a batch that was drawn", "use draw_batch"))

    Syx = task.map @ task.Sigma
    noise = task.map.shape[-2] * task.deviation**2
    return Batch(Sx=task.Sigma, Syx=Syx, Syy=(Syx * task.map).sum((-2, -1)) + noise, samples=samples)


def tilted(
    G: Float[Tensor, "k dx"], by: Float[Tensor, "k"], generator: torch.Generator, *, aligned: bool = False
) -> Float[Tensor, "k dx"]:
    """Row i turned out of rowsp(G) by an angle with sine `by[i]`, so that the distance to G is the largest of them.

    Directions are orthonormal and random, or with `aligned` those of the last coordinates (for G in the first ones).

    >>> G = torch.eye(2, 6).double()
    >>> there = tilted(G, torch.tensor([0.0, 0.3]).double(), torch.Generator().manual_seed(0))
    >>> f"{float(subspace_distance(there, G)):.6f}"
    '0.300000'
    """
    k, dx = G.shape
    if dx < 2 * k:
        raise InputError(describe(f"k={k}, dx={dx}", "dx ≥ 2k, to turn every row out of the others", "raise dx"))
    V = torch.eye(dx, dtype=G.dtype)[-k:] if aligned else haar(k, dx, generator).to(G)
    V = orthonormal_rows(V - (V @ G.mT) @ G)
    return (1 - by.square()).sqrt()[:, None] * G + by[:, None] * V


def distances(
    algorithm: Algorithm,
    start: Float[Tensor, "*r k dx"],
    target: Float[Tensor, "k dx"],
    draw: Callable[[], Batch],
    steps: int,
    head: Float[Tensor, "dy k"] | None = None,
) -> Float[Tensor, "rates points"]:
    """Distance to the target before and after each step, at all rates of the algorithm.

    Args:
        algorithm: with one rate or several.
        start: one representation for all rates, or one for each.
        target: G⋆.
        draw: gives a batch whenever one is needed: twice a step, and once more for F_ls if there is no `head`.
        steps: how many.
        head: F at the start, for all rates; without, F_ls of each start.

    >>> I = torch.eye(4).double()
    >>> G = I[:1]
    >>> task = Task(Sigma=I, root=I, map=3 * G, deviation=0.0, uniform=False)
    >>> from layerwise.studies.feature_learning.algorithms import KFAC
    >>> start = tilted(G, torch.tensor([1e-6]).double(), torch.Generator().manual_seed(0))
    >>> d = distances(KFAC(lr=[0.5, 0.9]), start, G, lambda: population_batch(task), steps=1)
    >>> [round(float(r), 6) for r in d[:, 1] / d[:, 0]]
    [0.5, 0.1]
    """
    lr = torch.tensor(algorithm.rates, dtype=start.dtype)[:, None, None]
    G = start.expand(len(lr), *start.shape[-2:]).contiguous()
    F = least_squares_head(G, draw()) if head is None else head.expand(len(lr), *head.shape)
    w = Weights(F, G)
    found = [subspace_distance(w.G, target)]
    for _ in range(steps):
        new = algorithm.step(w, lr, draw(), draw())
        alive = (new.G.sum((-2, -1)) + new.F.sum((-2, -1))).isfinite()
        stuck = torch.where(alive[:, None, None], new.G, torch.nan)
        found.append(subspace_distance(stuck, target))
        if bool(alive.all()):
            w = new
        else:
            keep = alive[:, None, None]
            memory = tuple(torch.where(keep, m, 0.0) for m in new.memory)
            w = Weights(torch.where(keep, new.F, w.F), torch.where(keep, new.G, w.G), memory, new.steps)
    return torch.stack(found, -1)
