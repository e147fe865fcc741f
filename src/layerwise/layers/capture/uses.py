"""Record by use: a parameter that enters a matrix product is a layer, whichever module or function multiplies by it.

``F.linear(h, self.proj.weight)``, Hugging Face's `Conv1D`, the experts ``[E, in, out]`` of a mixture, or a weight that
two places share need no module type: while a model runs, `ProductTracer` sees every product that its parameters enter,
and `propose` makes layers of those whose every use was seen. The proposal is verified like everything that is recorded
(`layerwise.layers.capture.verify`): what was not understood falls back.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from layerwise.foundations.sharded import in_graph
from layerwise.layers.capture.graph import Graph
from layerwise.layers.form import Form, Part
from layerwise.layers.rules.products import Product, grouped, readings

RowRange = tuple[int, int] | None
"""First and last row along the first axis of a parameter; None: all."""


@dataclass(frozen=True)
class Use:
    """How one product uses a parameter."""

    weight: str
    rows: RowRange
    transposed: bool
    """Whether the parameter is stored [K, I, O]."""
    bias: str | None = None
    bias_rows: RowRange = None
    first: bool = True
    """Whether it counts as one of the parameter's uses: of the groups of a grouped product only the first does."""


@dataclass(frozen=True)
class Used:
    """A layer that was found by use. Data alone, so that it can be kept beside the model."""

    name: str
    form: Form

    @property
    def stacked(self) -> bool:
        """Whether K matrices are used at once."""
        return self.form.weight is not None and self.form.weight.rows is None and len(self.form.weight.shape) == 3


class ProductTracer(TorchFunctionMode):
    """Sees the products that a model's parameters enter, while it is on.

    `seen` is called with each, and may give an output in place of the product's.
    """

    def __init__(self, model: nn.Module, seen: Callable[[Use, Product, Tensor], Tensor]) -> None:
        super().__init__()
        instead = in_graph(model)
        named = ((name, instead.get(id(p), p)) for name, p in model.named_parameters() if p.requires_grad)
        self._parameters = {id(p): (name, p) for name, p in named}
        self._seen = seen

    def __torch_function__(
        self, func: Any, types: Collection[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, and tell of it if it is a product with a parameter."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        groups = grouped(func, args, kwargs)
        if groups is not None:
            return self._each_group(*groups, out)
        for product in readings(func, args, kwargs):
            use = self._use(product)
            if use is not None and isinstance(out, Tensor) and "out" not in kwargs:
                return self._seen(use, product, out)
        return out

    def _each_group(self, x: Tensor, weight: Tensor, sizes: list[int], out: Tensor) -> Tensor:
        """A grouped product as one product for each weight that has rows."""
        place = self._place(weight)
        if place is None or place[1] is not None or not out.requires_grad:
            return out
        name, _, flipped = place
        pieces = list[Tensor]()
        for e, (rows, piece) in enumerate(zip(x.split(sizes), out.split(sizes), strict=True)):
            use = Use(name, (e, e + 1), not flipped, first=e == 0)
            pieces.append(self._seen(use, Product(weight[e], True, rows), piece.clone()))
        return torch.cat(pieces)

    def _use(self, product: Product) -> Use | None:
        place = self._place(product.weight)
        if place is None:
            return None
        name, rows, flipped = place
        bias = None if product.bias is None else self._place(product.bias)
        return Use(name, rows, product.transposed != flipped, *(bias[:2] if bias else (None, None)))

    def _place(self, t: Tensor) -> tuple[str, RowRange, bool] | None:
        """The parameter that a tensor is or shows, which rows of it, and whether its last two axes are swapped."""
        known = self._parameters.get(id(t))
        if known is not None:
            return known[0], None, False
        base = t._base
        known = None if base is None else self._parameters.get(id(base))
        if known is None or not known[1].is_contiguous():
            return None
        name, p = known
        for flipped in (False, True) if t.ndim > 1 else (False,):
            straight = t.detach().mT if flipped else t.detach()
            if straight.shape == p.shape and straight.stride() == p.stride():
                return name, None, flipped
            if straight.stride() == p.stride() and straight.shape[1:] == p.shape[1:]:
                start = int(t.storage_offset()) // int(p.stride(0))
                return name, (start, start + straight.shape[0]), flipped
            if p.ndim == 3 and straight.shape == p.shape[1:] and straight.stride() == p.stride()[1:]:
                start = int(t.storage_offset()) // int(p.stride(0))
                return name, (start, start + 1), flipped
        return None


def propose(model: nn.Module, uses: Sequence[Use], graph: Graph, wanted: Collection[str]) -> tuple[Used, ...]:
    """Layers for the wanted parameters, where all that the graph has of them are uses that were seen."""
    parameters = dict(model.named_parameters())
    counted = graph.uses()
    seen = Counter(use.weight for use in uses if use.first) + Counter(use.bias for use in uses if use.bias is not None)
    whole = {name for name, count in seen.items() if counted[id(parameters[name])] == count}
    of_weight = defaultdict[str, list[Use]](list)
    for use in uses:
        of_weight[use.weight].append(use)
    found: list[Used] = []
    for name in wanted:
        if name in of_weight and name in whole:
            found += _layers_of(name, parameters, of_weight[name], uses, whole.intersection(wanted))
    names = {part.name for used in found for part in used.form.parts}
    return tuple(found) + _lone_biases(parameters, uses, [b for b in wanted if b in whole and b not in names])


def _layers_of(
    name: str, parameters: Mapping[str, Tensor], uses: list[Use], all_uses: Sequence[Use], whole: set[str]
) -> list[Used]:
    """One layer, or one for each piece of the parameter that is used by itself; none where pieces overlap."""
    shape = tuple(parameters[name].shape)
    pieces = _pieces(shape, {use.rows for use in uses})
    if pieces is None or len({use.transposed for use in uses}) > 1 or len(shape) not in (2, 3):
        return []
    transposed = uses[0].transposed
    found = []
    for rows in pieces:
        weight = Part(name, shape, rows)
        k, a, b = (shape[0], *shape[1:]) if len(shape) == 3 and rows is None else (1, *weight.part_shape()[-2:])
        o, i = (b, a) if transposed else (a, b)
        bias = _bias_of(name, rows, parameters, all_uses, whole) if k == 1 else None
        label = _module_of(name) if rows is None else f"{name}[{_shown(rows)}]"
        found.append(Used(label, Form(k, o, i, weight, bias, transposed)))
    return found


def _pieces(shape: tuple[int, ...], used: set[RowRange]) -> list[RowRange] | None:
    """The rows that are layers by themselves, together all of the parameter."""
    if None in used:
        return [None] if len(used) == 1 else None
    if len(shape) == 3:  # experts: those that got no token in this batch are layers too
        return [(e, e + 1) for e in range(shape[0])] if all(r[1] - r[0] == 1 for r in used if r) else None
    pieces, end = list[RowRange](), 0
    for start, stop in sorted(rows for rows in used if rows is not None):
        if start < end:
            return None
        pieces += [(end, start)] if start > end else []
        pieces.append((start, stop))
        end = stop
    return pieces + ([(end, shape[0])] if end < shape[0] else [])


def _bias_of(
    name: str, rows: RowRange, parameters: Mapping[str, Tensor], uses: Sequence[Use], whole: set[str]
) -> Part | None:
    """The bias that comes with every use of a weight, and with nothing else."""
    own = [use for use in uses if (use.weight, use.rows) == (name, rows)]
    bias = own[0].bias if own else None
    if bias is None or bias not in whole or any((use.bias, use.bias_rows) != (bias, own[0].bias_rows) for use in own):
        return None
    others = [use for use in uses if use.bias == bias and use not in own]
    if others or own[0].bias_rows is not None:
        return None
    return Part(bias, tuple(parameters[bias].shape))


def _lone_biases(parameters: Mapping[str, Tensor], uses: Sequence[Use], names: Iterable[str]) -> tuple[Used, ...]:
    """Biases that are added in several products, or in some uses of a weight and not in others."""
    rows = {name: [use.bias_rows for use in uses if use.bias == name] for name in names}
    shapes = {name: tuple(parameters[name].shape) for name, of in rows.items() if of and not any(of)}
    return tuple(
        Used(name, Form(1, shape[0], 0, None, Part(name, shape), kronecker=False)) for name, shape in shapes.items()
    )


def _module_of(name: str) -> str:
    """A weight's module stands for it, as for layers with a rule; other parameters have names of their own."""
    module, _, local = name.rpartition(".")
    return module if local == "weight" and module else name


def _shown(rows: tuple[int, int]) -> str:
    return str(rows[0]) if rows[1] - rows[0] == 1 else f"{rows[0]}:{rows[1]}"


def same_use(used: Used, use: Use) -> bool:
    """Whether a product is a call of this layer."""
    weight, bias = used.form.weight, used.form.bias
    if weight is None:
        return bias is not None and (use.bias, use.bias_rows) == (bias.name, bias.rows)
    if (use.weight, use.rows, use.transposed) != (weight.name, weight.rows, used.form.transposed):
        return False
    return bias is None or (use.bias, use.bias_rows) == (bias.name, bias.rows)
