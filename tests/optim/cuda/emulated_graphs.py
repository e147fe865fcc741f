"""What CUDA graphs do, on a CPU: operations are noted with their tensors, and done again on the same memory."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ASKED = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal")


def tensors(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


class Notes(TorchDispatchMode):
    """Every operation, its arguments and what it gave; one that asks the device for a value cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[Any, tuple, dict, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in ASKED:
            raise RuntimeError(f"{func} while a graph is captured")
        found = func(*args, **(kwargs or {}))
        given = {X.untyped_storage().data_ptr() for X in tensors(args, kwargs)}
        made = [X for X in tensors(found) if X.untyped_storage().data_ptr() not in given]
        if made or func._schema.is_mutable:  # all others are views
            self.lines.append((func, args, kwargs or {}, made))
        return found

    def replay(self) -> None:
        for func, args, kwargs, made in self.lines:
            found = func(*args, **kwargs)
            if made and not func._schema.is_mutable:
                for old, new in zip(made, tensors(found), strict=True):
                    old.copy_(new)


def captured(_: Any, call: Callable[[], None]) -> Callable[[], None]:
    """In place of `Graphs._graph_of`. A graph does nothing while it is captured: what the call changes is put back."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    class Undone(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.is_mutable:
                for X in tensors(args, kwargs):
                    whole = torch.as_strided(X.detach(), (X.untyped_storage().nbytes() // X.itemsize,), (1,), 0)
                    kept.setdefault(X.untyped_storage().data_ptr(), (whole, whole.clone()))
            return func(*args, **(kwargs or {}))

    notes = Notes()
    with Undone(), notes:
        call()
    for whole, before in kept.values():
        whole.copy_(before)
    return notes.replay


@contextmanager
def here(device: torch.device):
    """In place of `beside`."""
    yield
