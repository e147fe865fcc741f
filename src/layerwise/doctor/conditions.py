"""A model made ready to be examined, and put back as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

BatchNorm = nn.modules.batchnorm._BatchNorm


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode inside: no dropout, and batch norm does not mix examples."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def trainable(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Frozen parameters require gradients inside, so that what they would contribute can be measured."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad and p.is_floating_point()}
    try:
        for p in frozen.values():
            p.requires_grad_(True)
        yield tuple(frozen)
    finally:
        for p in frozen.values():
            p.requires_grad_(False)


@contextmanager
def calibrated(model: nn.Module, run: Callable[[], None]) -> Iterator[int]:
    """Batch norm with the statistics of the data inside; gives how many layers there are.

    A layer that has not been trained has a running mean of 0 and a variance of 1, with which it normalises nothing.
    `run` calls the model on data. Layers in eval mode are left alone: their statistics are those the user wants.
    """
    layers = [module for module in model.modules() if isinstance(module, BatchNorm) and module.training]
    held = [(module, dict(module._buffers), module.momentum, module.track_running_stats) for module in layers]
    try:
        for module in layers:
            like = next((p for p in module.parameters()), None)
            device = None if like is None else like.device
            module.running_mean = torch.zeros(module.num_features, device=device)
            module.running_var = torch.ones(module.num_features, device=device)
            module.num_batches_tracked = torch.zeros((), dtype=torch.long, device=device)
            module.momentum, module.track_running_stats = None, True  # a plain mean over batches
        others = [module for module in model.modules() if module.training and not isinstance(module, BatchNorm)]
        for module in others:
            module.training = False
        try:
            if layers:
                with torch.no_grad():
                    run()
        finally:
            for module in others:
                module.training = True
        yield len(layers)
    finally:
        for module, buffers, momentum, track in held:
            module._buffers.clear()
            module._buffers.update(buffers)
            module.momentum, module.track_running_stats = momentum, track
