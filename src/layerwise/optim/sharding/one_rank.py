"""Sharded parameters on a mesh of one rank: nothing is sent, and a step is that of a model which is not sharded."""

from collections.abc import Mapping

import torch
from torch import nn

from layerwise.foundations.sharded import is_sharded, local


class LocalParameters:
    """Plain parameters that share the memory of sharded ones, for executors that know no `DTensor`.

    One rank holds every shard whole, so that there is nothing to exchange. Plain tensors are what the GPU's kernels and
    CUDA graphs take, and spare the host the dispatch of a `DTensor` for every operation.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        sharded = {name: p for name, p in params.items() if is_sharded(p)}
        plain = {name: nn.Parameter(local(p).detach(), requires_grad=p.requires_grad) for name, p in sharded.items()}
        self.params: dict[str, nn.Parameter] = {**params, **plain}
        """All parameters by name, plain ones in the place of sharded ones."""
        self._pairs = [(p, plain[name]) for name, p in sharded.items()]
        self._versions = [p._version for p, _ in self._pairs]
        self.begin()

    def begin(self) -> None:
        """Before a step: gradients as they came, and parameters where FSDP has them now."""
        for place, (p, plain) in enumerate(self._pairs):
            held, grad = local(p), p.grad
            if plain.data_ptr() != held.data_ptr():
                plain.data = held.detach()
            if p._version != self._versions[place]:  # somebody has written to it
                self._versions[place] = p._version
                torch.autograd.graph.increment_version([plain])
            plain.grad = None if grad is None else local(grad)

    def end(self) -> None:
        """After it: nothing keeps gradients alive that the user lets go of."""
        for _, plain in self._pairs:
            plain.grad = None
