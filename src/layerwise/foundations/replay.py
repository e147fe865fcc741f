"""A step that is made many thousand times: on CUDA its launches are recorded once, as a graph, and replayed.

A step of a small network is some thirty to a hundred kernels of a few microseconds each, which a host cannot launch as
fast as a device runs them. A replayed graph is one launch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from layerwise.foundations.held_together import HeldTogether

FIRST = 3
"""Calls that are made as they are before one is recorded: kernels are chosen and states of optimizers made in them."""


@contextmanager
def _without_collection() -> Iterator[None]:
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


uncollected = HeldTogether(_without_collection)
"""While a graph is recorded Python collects no cycles: among them may be an optimizer that nobody needs any more, and
the end of its graphs would end the recording."""


class Replayed:
    """A function of tensors that only changes other tensors, in place.

    It must not look at values (``if``, ``float``, ``.item()``) nor draw random numbers, and what else it reads must be
    the same tensors each time. Inputs of another shape are recorded apart, as the last batch of an epoch is. On other
    devices, and where something in the function cannot be recorded, it is called as it is.

    >>> total = torch.zeros(2)
    >>> step = Replayed(lambda x: total.add_(x))
    >>> for k in range(3):
    ...     step(torch.tensor([1.0, k]))
    >>> total
    tensor([3., 3.])
    """

    def __init__(self, call: Callable[..., object]) -> None:
        self.call = call
        self.fault: str | None = None
        """Why calls are not recorded, if that was tried."""
        self._made: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, tuple[list[Tensor], torch.cuda.CUDAGraph]] = {}

    def __call__(self, *inputs: Tensor, key: Hashable = None) -> None:
        """Make one call.

        Args:
            inputs: one tensor or more, copied for a recorded call.
            key: numbers that the function reads beside tensors, such as a learning rate: each is recorded apart.
        """
        if not inputs[0].is_cuda or self.fault is not None:
            self.call(*inputs)
            return
        known = (key, *((t.shape, t.dtype) for t in inputs))
        if known not in self._recorded and not self._record(known, inputs):
            return
        kept, graph = self._recorded[known]
        for own, given in zip(kept, inputs, strict=True):
            own.copy_(given)
        graph.replay()

    def _record(self, known: Hashable, inputs: tuple[Tensor, ...]) -> bool:
        """Whether there is a graph now; else the call has been made."""
        self._made[known] = self._made.get(known, 0) + 1
        device = inputs[0].device
        with torch.cuda.device(device):
            beside, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
            if self._made[known] > FIRST:
                kept, graph = [t.clone() for t in inputs], torch.cuda.CUDAGraph()
                try:
                    with uncollected(), torch.cuda.graph(graph, stream=beside, capture_error_mode="thread_local"):
                        self.call(*kept)
                except RuntimeError as error:  # nothing was computed: go on without
                    self.fault = str(error)
                else:
                    self._recorded[known] = kept, graph
                    return True
            beside.wait_stream(current)
            with torch.cuda.stream(beside):
                self.call(*inputs)
            current.wait_stream(beside)
        return False
