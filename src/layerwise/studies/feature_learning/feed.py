"""Random numbers of iterations to come: threads draw them into pinned memory, and one copy an iteration brings them.

They are those that `Group.batch` draws: a function of seed, iteration and name alone.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.batch import draw_into
from layerwise.studies.feature_learning.problem import Task
from layerwise.studies.feature_learning.runs import Group

SLOTS = 3
"""Iterations whose numbers the host holds: one on its way to the device, one that is drawn, one to be drawn next."""


class Views(NamedTuple):
    """One iteration's numbers, batch by batch and seed by seed."""

    noise: Float[Tensor, "b s n dy"]
    u: Shaped[Tensor, "b s *u"]


class Feed:
    """The numbers of one iteration after another, at the same place of the device each time."""

    def __init__(self, group: Group, names: Sequence[str], steps: int, pool: Executor) -> None:
        self._group, self._names, self._steps, self._pool = group, tuple(names), steps, pool
        on_gpu = group.device.type == "cuda"
        size = sum(view.nbytes for view in self._views(None))
        self._hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(SLOTS)]
        self._places = [self._by_seed(self._views(host)) for host in self._hosts]
        self._copied = [torch.cuda.Event() for _ in range(SLOTS)] if on_gpu else []
        self._device = torch.empty(size, dtype=torch.uint8, device=group.device)
        self.numbers = self._views(self._device)
        """Where the device finds the numbers of the iteration that came last."""
        self.seeds: list[list[int]] = []
        """Of these numbers, batch by batch."""
        self._drawn: dict[int, list[Future[list[int]]]] = {}
        for t in range(1, SLOTS):
            self._ask(t)

    def bring(self, t: int) -> None:
        """Send the numbers of an iteration, the one after that before, and have later ones drawn."""
        by_seed = [future.result() for future in self._drawn.pop(t)]
        self.seeds = [list(of_batch) for of_batch in zip(*by_seed, strict=True)]
        self._device.copy_(self._hosts[t % SLOTS], non_blocking=True)
        if self._copied:
            self._copied[t % SLOTS].record(torch.cuda.current_stream(self._group.device))
        self._ask(t + SLOTS - 1)

    def _ask(self, t: int) -> None:
        """Have numbers drawn where those of a past iteration lay, which are on the device by then."""
        if t > self._steps:
            return
        if self._copied:
            self._copied[t % SLOTS].synchronize()  # all but the last two iterations are done then, and these are queued
        pieces = zip(self._group.seeds, self._group.tasks, self._places[t % SLOTS], strict=True)
        self._drawn[t] = [self._pool.submit(self._draw, t, *piece) for piece in pieces]

    def _draw(self, t: int, seed: int, task: Task, places: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        named = zip(self._names, places, strict=True)
        return [draw_into(u, noise, task, stream(seed, "train", t, name)) for name, (u, noise) in named]

    def _by_seed(self, views: Views) -> list[list[tuple[Tensor, Tensor]]]:
        """Where the numbers of a seed go, batch by batch."""
        batches, seeds = range(len(self._names)), range(len(self._group.seeds))
        return [[(views.u[i, place], views.noise[i, place]) for i in batches] for place in seeds]

    def _views(self, memory: Tensor | None) -> Views:
        """An iteration's numbers in a piece of memory; without one, what would lie there."""
        task, n = self._group.tasks[0], self._group.setting.batch
        dy, dx = task.map.shape[-2:]
        lead = (len(self._names), len(self._group.seeds))
        u_shape, u_dtype = ((-(-n * dx // 8),), torch.uint8) if task.uniform else ((n, dx), torch.float64)
        noise = torch.empty(*lead, n, dy, dtype=torch.float64, device="meta")
        u = torch.empty(*lead, *u_shape, dtype=u_dtype, device="meta")
        if memory is None:
            return Views(noise, u)
        split = noise.nbytes  # noise comes first: its numbers must lie at multiples of eight octets
        return Views(memory[:split].view(noise.dtype).view(noise.shape), memory[split:].view(u.dtype).view(u.shape))
