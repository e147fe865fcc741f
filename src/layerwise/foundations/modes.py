"""Train and eval mode of a model's modules."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode; afterwards every module is in the mode it was in, frozen ones included.

    Flags are set one by one, since a module's own `train` may do more than that.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> _ = model[0].eval()
    >>> with evaluating(model):
    ...     any(module.training for module in model.modules())
    False
    >>> [module.training for module in model.modules()]
    [True, False, True]
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode
