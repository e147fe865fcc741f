"""Calls that are captured once as CUDA graphs and replayed: hundreds of small launches become one.

What is captured reads and writes a stack's state in place and asks the device for nothing, so that it can be replayed
whenever the same groups are due with the same numbers. The first time a call is made as it is (kernels are compiled
then), the second time it is captured.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from layerwise.foundations.replay import uncollected

MOST = 256
"""Graphs of one optimizer: if more are asked for, some number changes all the time, and calls are made as they are."""


class Graphs:
    """The captured calls of an optimizer's stacks.

    They share their memory, since calls never run at the same time. What one leaves may be read until the next call, or
    replay, of the same `Graphs`.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._pool: Any = None
        self._met: set[Hashable] = set()
        self._captured: dict[Hashable, Callable[[], None]] = {}
        self.failed: dict[str, str] = {}
        """Why calls of some kind are captured no more, if that is so."""

    def run(
        self, key: Hashable, call: Callable[[], None], device: torch.device, kind: str = "", capture: bool = True
    ) -> bool:
        """Make a call, on a stream of its own until it is captured; returns whether it was replayed.

        Calls of one kind are alike: where one cannot be captured, no other is tried. With `capture=False` it is only
        made, and counts as met.
        """
        replay = self._captured.get(key) if capture else None
        if replay is not None:  # on the caller's stream: to change it twice costs the host as much as a small graph
            replay()
            return True
        with beside(device):
            known = capture and self._capture(key, call, kind)
            if known:
                self._captured[key]()
            else:
                self._meet(key)
                call()
        return known

    def _capture(self, key: Hashable, call: Callable[[], None], kind: str) -> bool:
        if kind in self.failed or key not in self._met or len(self._captured) >= self._most:
            return False
        try:
            with uncollected():
                self._captured[key] = self._graph_of(call)
        except RuntimeError as error:  # some operation cannot be captured: go on as before
            self.failed[kind] = str(error)
            return False
        return True

    def _graph_of(self, call: Callable[[], None]) -> Callable[[], None]:
        """What replays a call; it is not made here."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            call()
        finally:
            graph.capture_end()
        return graph.replay

    def _meet(self, key: Hashable) -> None:
        if len(self._met) > 4 * MOST:  # numbers that change all the time are not remembered for ever
            self._met.clear()
        self._met.add(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Graphs":
        return Graphs(self._most)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """On a stream of one's own, after what was begun before and before what comes next."""
    stream, current = _stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@cache
def _stream(device: torch.device) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)
