"""The axis legend, in one place; a model's parameters, and the tree of tensors that it may take as input.

| letter | axis |
|---|---|
| `N` | examples in the batch |
| `S` | positions that share the weight: sequence, pixels, repeated calls |
| `K` | independent groups: groups of a convolution, features of a norm layer |
| `I` | inputs of one group, the bias column included |
| `O` | outputs of one group |
| `V` | cotangent vectors pulled back from the model's output |
| `C` | outputs of the model at one position |
| `B` | columns: several parameter-space vectors at once |
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

Tree = Any
"""A tensor, or a tuple, list or mapping of trees: whatever the model is called with."""
HALF = (torch.bfloat16, torch.float16)
"""Types of half precision."""


def leaves(tree: Tree) -> Iterator[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return iter((tree,))
    if isinstance(tree, Mapping):
        return chain.from_iterable(map(leaves, tree.values()))
    return chain.from_iterable(map(leaves, tree)) if isinstance(tree, list | tuple) else iter(())


def map_leaves(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """The same tree with `fn` applied to every tensor; anything else is passed on untouched."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, Mapping):
        return {key: map_leaves(fn, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # named tuple
        return type(tree)(*(map_leaves(fn, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(fn, value) for value in tree)
    return tree


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Factors and moments are kept in float32 or better, whatever the model computes in."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float32


def multiplied_in(t: Tensor, statistics: torch.dtype) -> torch.dtype:
    """The type that entries of a moment are multiplied in: a GPU multiplies half types as they are, into float32."""
    return t.dtype if t.device.type == "cuda" and t.dtype in HALF else statistics


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, if it was wrapped by ``torch.compile``."""
    return getattr(model, "_orig_mod", model)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that take part, in flat order; a tensor with two names counts once."""
    return {name: p for name, p in unwrap(model).named_parameters() if p.requires_grad}
