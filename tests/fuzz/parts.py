"""What blocks are made of: a module written as a function of its parts, and what a forward knows beside its tensor."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Apply(nn.Module):
    """Named layers, parameters and buffers, and a forward written as a function of them."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


@dataclass(frozen=True)
class Sizes:
    """What a block may depend on; `T` is the length of every batch if `fixed`, else the longest one."""

    D: int
    T: int
    number: int = 0
    """Of the block among its model's blocks: variants of a block are chosen by it."""


@dataclass
class Context:
    """What a block sees beside its tensor. Nothing here depends on more than one example, or is shared by all."""

    raw: Tensor
    """The model's input, examples first."""
    flag: bool
    """From the input: a plain value beside its tensors."""
    config: SimpleNamespace
    """On the model: no module, and changed between calls."""
    kept: Tensor | None
    """Positions that count, ``[N, T]``, at least one an example."""
    hidden: list[Tensor]
    """Auxiliary outputs, which do not reach the loss."""

    @property
    def key(self) -> Tensor:
        """``[N]``: a number of each example, different for all of them."""
        weights = torch.linspace(1.0, 1.7, self.raw[0].numel(), dtype=torch.float64)
        return self.raw.flatten(1).double() @ weights

    @property
    def positive(self) -> bool:
        """A property that all examples of a batch share (see `data`), so that a branch on it is no interaction."""
        return bool(self.raw.flatten(1)[:, 0].double().mean() > 0)

    @property
    def rare(self) -> Tensor:
        """``[N]``: True for few examples, the first of a batch among them."""
        return self.raw.flatten(1)[:, 1].double() > 2


def bare(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def along(values: Tensor, h: Tensor) -> Tensor:
    """One value an example, with the axes of h."""
    return values.reshape(-1, *[1] * (h.ndim - 1))


@dataclass(frozen=True)
class Block:
    """How a block is made, and what it needs."""

    build: Callable[[Sizes], nn.Module]
    kinds: tuple[str, ...]
    fixed: bool = False
    """All batches must have one length."""
    wants: str = ""
    """An option of the case without which the block shows nothing: "flag", "config", "kept", "two signs"."""
    train: bool = True
    """Whether it means the same in train mode."""


BLOCKS: dict[str, Block] = {}


def block(*kinds: str, **settings: Any) -> Callable[[Callable[[Sizes], nn.Module]], Callable[[Sizes], nn.Module]]:
    """Add the decorated function as the block of its name; "any" is a vector or a sequence."""
    expanded = tuple(k for kind in kinds for k in (("vector", "sequence") if kind == "any" else (kind,)))

    def add(build: Callable[[Sizes], nn.Module]) -> Callable[[Sizes], nn.Module]:
        BLOCKS[build.__name__] = Block(build, expanded, **settings)
        return build

    return add
