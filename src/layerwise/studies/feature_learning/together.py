"""Iterations of many seeds on a GPU: recorded once as CUDA graphs and replayed, as they are launches rather than work.

An iteration of an algorithm is some fifty short kernels, and the host needs longer to launch them than the device to
run them. Recorded are the batches, as functions of random numbers that are copied to the same place each time, and the
iterations of all algorithms that ask the device nothing and draw nothing themselves. What they change, weights and
counts, is kept in the same place. Other algorithms read the same batches and go on as they are.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import torch
from torch import Tensor

from layerwise.optim.cuda.graphs import Graphs
from layerwise.studies.feature_learning.algorithms import AMGD, DFW, KFAC, SGD, Adam, Algorithm, MinMin, Weights
from layerwise.studies.feature_learning.batch import Batch
from layerwise.studies.feature_learning.batches import moments
from layerwise.studies.feature_learning.feed import Feed
from layerwise.studies.feature_learning.further import FOOF, LocoProp, Sign
from layerwise.studies.feature_learning.ngd import NGD
from layerwise.studies.feature_learning.runs import Group, Runs

RECORDABLE = (SGD, Adam, AMGD, DFW, KFAC, MinMin, FOOF, LocoProp, Sign)
"""Made of products, Cholesky factors and triangular solves; their heirs may be of something else."""


def recordable(algorithm: Algorithm) -> bool:
    """Whether an iteration is the same launches each time: no SVD or eigenvectors, no samples.

    >>> recordable(KFAC()), recordable(AMGD(norm="whiten_batch")), recordable(NGD(solver="pinv"))
    (True, False, False)
    """
    if algorithm.norm is not None and not algorithm.norm.endswith("pop"):
        return False
    return type(algorithm) in RECORDABLE or (type(algorithm) is NGD and algorithm.solver == "closed_form")


def together(
    runs: Sequence[Runs], group: Group, names: Sequence[str], steps: int, pool: Executor
) -> Callable[[int], Batch]:
    """What takes an iteration of all runs, from the first on, and returns the batch of the head."""
    return Iterations(runs, group, Feed(group, names, steps, pool)).step


class Iterations:
    """All runs on the batches of a feed."""

    def __init__(self, runs: Sequence[Runs], group: Group, feed: Feed) -> None:
        self._group, self._feed = group, feed
        self._recorded = [StaticRuns(one) for one in runs if recordable(one.algorithm)]
        self._others = [one for one in runs if not recordable(one.algorithm)]
        self._number = torch.zeros((), dtype=torch.int64, device=group.device)
        self._batches: list[Batch] = []
        # apart from each other: batches are still read when the second is replayed
        self.batches, self.moves = Graphs(), Graphs()

    def step(self, t: int) -> Batch:
        """One iteration."""
        self._feed.bring(t)
        fixed = self._made(self.batches, self._draw)
        if self._recorded:
            self._made(self.moves, self._move, fixed)
        batches = self._fresh()
        for one in self._others:
            one.step(batches[0], batches[-1], t)
        return batches[-1]

    def _made(self, graphs: Graphs, call: Callable[[], None], record: bool = True) -> bool:
        """Make a call, by a recording if there is one; returns whether its results lie where they lay before."""
        if self._group.device.type == "cuda":
            return graphs.run("iteration", call, self._group.device, capture=record)
        call()
        return False

    def _draw(self) -> None:
        task = self._group.many
        assert task is not None
        noise, u = self._feed.numbers
        self._batches = moments(u, noise, task, self._group.dtype, lambda: self._feed.seeds)

    def _move(self) -> None:
        batches = self._fresh()
        self._number.add_(1)
        for kept in self._recorded:
            kept.step(batches[0], batches[-1], self._number)

    def _fresh(self) -> list[Batch]:
        """The batches without what was derived from them in iterations before, such as `ols`."""
        return [replace(batch) for batch in self._batches]


class StaticRuns:
    """Runs whose weights and counts lie in the same place after every iteration."""

    def __init__(self, runs: Runs) -> None:
        self._runs, self._settled = runs, False
        counted = torch.zeros((), dtype=torch.float64, device=runs.weights.G.device)
        self._weights = replace(runs.weights, steps=counted)
        self._diverged_at = runs.diverged_at.clone()

    def step(self, first: Batch, second: Batch, number: Tensor) -> None:
        """One iteration."""
        runs = self._runs
        # from here, as a recording that failed has left tensors that were never filled
        runs.weights, runs.diverged_at = self._weights, self._diverged_at
        runs.step(first, second, number)
        if self._settled:
            torch._foreach_copy_(_tensors(self._weights), _tensors(runs.weights))  # pyright: ignore[reportPrivateImportUsage]
        else:  # the first iteration decides what is remembered, and what there was before may be others' too
            self._weights, self._settled = runs.weights, True
        self._diverged_at.copy_(runs.diverged_at)
        runs.weights, runs.diverged_at = self._weights, self._diverged_at


def _tensors(w: Weights) -> list[Tensor]:
    return [w.F, w.G, *w.memory, *([w.steps] if isinstance(w.steps, Tensor) else [])]
