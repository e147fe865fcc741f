"""`Graph`: what autograd recorded of one forward, read from its output.

Two forwards with the same graph did the same operations, on the same parameters and sizes, in the same order. So what
has been verified of one holds for the other, and nothing has to be believed of a model: a flag, a branch or another
length of the input makes another graph. The exception are operations that move rows by an index computed from the data:
their graph says nothing about where a row went, and `steady` is False.

Reading costs about 4 µs for each operation (2.5 ms for a transformer of twelve layers).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

MOVES_ROWS = ("Index", "Gather", "Scatter", "MaskedSelect", "MaskedScatter", "Take", "Put", "Sort", "Topk", "Kthvalue")
"""Beginnings of the names of operations that choose rows by their data."""
PRODUCTS = ("MmBackward", "BmmBackward", "AddmmBackward", "BaddbmmBackward", "MvBackward", "AddmvBackward")
AXES = ("T", "Transpose", "Permute", "Expand", "Unsqueeze", "Squeeze", "View", "UnsafeView", "ReshapeAlias")
VIEWS = (*AXES, "Slice", "Select", "Narrow", "Split", "SplitWithSizes", "Unbind", "Alias", "ToCopy")
"""What may lie between a parameter and the product it enters."""
CAST = "ToCopyBackward"
ARITHMETIC = ("Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Pow", "Where", "Lerp", "Addcmul", "Clone")
CURVES = ("Exp", "Sqrt", "Abs", "Sigmoid", "Tanh", "Relu", "Softplus", "Softmax", "LogSoftmax")
ENTRYWISE = frozenset((*VIEWS, *ARITHMETIC, *CURVES, "Cat", "Stack"))
"""Operations on entries, with broadcasting, and what chooses or joins them."""
ACCUMULATES = type(get_gradient_edge(torch.ones((), requires_grad=True)).node)
PLAIN = (int, float, bool, str, tuple, type(None))
_SETTINGS: dict[type, tuple[str, ...]] = {}


@dataclass(frozen=True)
class Graph:
    """The operations from which an output was made, in an order that depends on them alone."""

    nodes: tuple[Any, ...]
    """autograd's nodes, each before those that it has its inputs from, as far as a depth-first search tells."""
    places: Mapping[Any, int] = field(repr=False)

    @classmethod
    def of(cls, f: Tensor) -> "Graph":
        """Read the graph of an output.

        >>> x = torch.ones(2, requires_grad=True)
        >>> [node.name() for node in Graph.of((x * x).exp()).nodes]
        ['ExpBackward0', 'MulBackward0', 'torch::autograd::AccumulateGrad']
        """
        first = get_gradient_edge(f).node
        places, nodes, left = {first: 0}, [first], [first]
        while left:
            for child, _ in left.pop().next_functions:
                if child is not None and child not in places:
                    places[child] = len(nodes)
                    nodes.append(child)
                    left.append(child)
        return cls(tuple(nodes), places)

    def key(self, names: Mapping[int, str]) -> int:
        """The same for two forwards that did the same on inputs of the same sizes.

        `names` are those of the parameters, by their `id`. Sizes inside follow from those of inputs and parameters.
        """
        places, found = self.places, list[Any]()
        for node in self.nodes:
            kind = type(node)
            found.append(kind)
            for child, output in node.next_functions:
                found.append(-1 if child is None else (places[child], output))
            settings = _SETTINGS.get(kind)
            if settings is None:
                settings = _SETTINGS[kind] = _settings(kind)
            if kind is ACCUMULATES:
                found.append(names.get(id(node.variable), "another leaf"))
            for name in settings:
                value = getattr(node, name)
                found.append(value if value.__class__ in PLAIN else str(value))
        return hash(tuple(found))

    @cached_property
    def steady(self) -> bool:
        """Whether where rows go is decided by the operations alone, and not by their data."""
        return not any(_moves_rows(node) for node in self.nodes)

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Of all results on the way: a model may run some of itself under autocast."""
        return frozenset(result.dtype for node in self.nodes for result in node._input_metadata)

    def uses(self) -> Counter[int]:
        """How often each leaf is used, by its `id`.

        A cast counts as often as its result is used: autocast makes one of a parameter, and keeps it.
        """
        casts, found = dict[Any, int](), Counter[int]()
        for node in self.nodes:
            for child, _ in node.next_functions:
                if child.__class__ is ACCUMULATES:
                    if type(node).__name__.startswith(CAST):
                        casts[node] = id(child.variable)
                    else:
                        found[id(child.variable)] += 1
        if casts:
            for node in self.nodes:
                for child, _ in node.next_functions:
                    if child in casts:
                        found[casts[child]] += 1
        return found

    def broadcasts(self) -> set[int]:
        """Leaves, by `id`, that enter nothing but operations on entries, as they are or seen otherwise.

        Others may not be given more axes: some kernels (that of weight norm in torch 2.13) then read beyond the end.
        """
        left, strict = list[Any](), set[Any]()
        for node in self.nodes:
            if type(node).__name__.partition("Backward")[0] not in ENTRYWISE:
                left += [child for child, _ in node.next_functions]
        while left:
            node = left.pop()
            if node is not None and node not in strict:
                strict.add(node)
                if type(node).__name__.partition("Backward")[0] in VIEWS:
                    left += [child for child, _ in node.next_functions]
        leaves: list[Any] = [node for node in self.nodes if type(node) is ACCUMULATES]
        return {id(node.variable) for node in leaves if node not in strict}


def _moves_rows(node: Any) -> bool:
    if isinstance(node, torch.autograd.function.BackwardCFunction):  # a function of the user's own: anything
        return True
    name = type(node).__name__
    if name.startswith(MOVES_ROWS):
        return True
    if not name.startswith(PRODUCTS):
        return False
    factors = [child for child, _ in node.next_functions[-2:]]
    if all(child is not None for child in factors):
        return False
    # A product with something that is not differentiated: inputs times a parameter, or a permutation made of the data.
    return not any(child is not None and _is_parameter(child) for child in factors)


def _is_parameter(node: Any) -> bool:
    """Whether a node hands on a leaf, as it is or seen otherwise."""
    while type(node) is not ACCUMULATES:
        children = [child for child, _ in node.next_functions if child is not None]
        if len(children) != 1 or type(node).__name__.partition("Backward")[0] not in VIEWS:
            return False
        node = children[0]
    return True


def _settings(kind: type) -> tuple[str, ...]:
    """Attributes of a kind of node that hold its arguments other than tensors.

    Those that hold tensors are not touched: a checkpoint would run its part of the model again.
    """
    known = set(dir(kind))
    return tuple(a for a in sorted(known) if a.startswith("_saved_") and f"_raw{a}" not in known)


def parameter_names(named: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    """Names by `id`, as `Graph.key` wants them."""
    return {id(p): name for name, p in named}
