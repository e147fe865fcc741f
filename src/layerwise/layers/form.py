"""The standard form: `Form` says how parameters are one matrix a group, `LayerRule` puts a layer type in that form.

    y[n, s, k] = W[k] a[n, s, k],   W : [K, O, I],   a : [N, S, K, I],   g : [V, N, S, K, O]

A form is data alone (no module), so that a saved matrix can be loaded without the model. A rule knows no loss, factor
or optimizer. To support a layer of your own, write four short methods and register them;
`layerwise.testing.check_layer_rule` then tells whether they are right.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from layerwise.foundations.registry import import_folder
from layerwise.layers.io.one_hot import OneHot

M = TypeVar("M", bound=nn.Module)
Moment = tuple[Tensor, Tensor, int]
"""``Σ aaᵀ`` [K, I, I], ``Σ a`` [K, I] and the number of rows, the bias column left out."""


@dataclass(frozen=True)
class Part:
    """A parameter tensor, or some rows of it (the packed projections of attention)."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    rows: tuple[int, int] | None = None
    """First and last row along axis 0; None: all."""

    def numel(self) -> int:
        """Entries of this part."""
        return math.prod(self.part_shape())

    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part itself."""
        return self.shape if self.rows is None else (self.rows[1] - self.rows[0], *self.shape[1:])

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Part":
        """A part from its fields as JSON holds them."""
        rows = None if data["rows"] is None else (int(data["rows"][0]), int(data["rows"][1]))
        return Part(data["name"], tuple(data["shape"]), rows)

    def of(self, params: Mapping[str, Tensor]) -> Tensor:
        """The part of these parameters, which may carry leading column axes."""
        tensor = params[self.name]
        if self.rows is None:
            return tensor
        return tensor.narrow(tensor.ndim - len(self.shape), self.rows[0], self.rows[1] - self.rows[0])


@dataclass(frozen=True)
class Form:
    """K groups of an O × I matrix made of a weight and, as the last column, a bias."""

    groups: int
    outputs: int
    weight_inputs: int
    """Columns of the weight; 0 where only the bias takes part."""
    weight: Part | None
    bias: Part | None
    transposed: bool = False
    """The parameter is stored [K, I, O]: embeddings and transposed convolutions."""
    kronecker: bool = True
    """Whether a Kronecker product is defined; if not, the exact block of each group is kept instead."""
    taps: int = 1
    """Kernel offsets that one input channel covers: I = channels · taps."""
    one_hot: bool = False
    """Inputs are indices: the input factor is diagonal."""
    cut: bool = False
    """The groups are pieces of one matrix's outputs (query, key and value in one weight), with the same inputs."""

    @property
    def inputs(self) -> int:
        """I, the bias column included."""
        return self.weight_inputs + (self.bias is not None)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(K, O, I)."""
        return self.groups, self.outputs, self.inputs

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Weight, then bias, whichever exist."""
        return tuple(part for part in (self.weight, self.bias) if part is not None)

    def numel(self) -> int:
        """D = K·O·I."""
        return self.groups * self.outputs * self.inputs

    def join(self, params: Mapping[str, Tensor]) -> Tensor:
        """``[*B, K, O, I]`` from parameters ``[*B, *shape]``."""
        columns = []
        k, o, i = self.groups, self.outputs, self.weight_inputs
        if self.weight is not None:
            tensor = self.weight.of(params)
            lead = tensor.shape[: tensor.ndim - len(self.weight.shape)]
            if self.transposed and self.cut:
                tensor = tensor.reshape(*lead, i, k * o).mT
            elif self.transposed:
                tensor = tensor.reshape(*lead, k, i, o).mT
            flat = tensor.reshape(*lead, k, o, i)
            columns.append(flat)
        if self.bias is not None:
            tensor = self.bias.of(params)
            columns.append(tensor.reshape(*tensor.shape[: tensor.ndim - len(self.bias.shape)], k, o, 1))
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)

    def split(self, W: Tensor) -> list[tuple[Part, Tensor]]:
        """The inverse of `join`: each part with its entries."""
        pieces = []
        lead = W.shape[:-3]
        if self.weight is not None:
            matrix = W[..., : self.weight_inputs]
            if self.transposed:
                matrix = matrix.flatten(-3, -2).mT if self.cut else matrix.mT
            pieces.append((self.weight, matrix.reshape((*lead, *self.weight.part_shape()))))
        if self.bias is not None:
            pieces.append((self.bias, W[..., -1].reshape((*lead, *self.bias.part_shape()))))
        return pieces

    def to_json(self) -> dict[str, Any]:
        """A description that JSON can hold."""
        fields = asdict(self)
        return fields if self.cut else {name: value for name, value in fields.items() if name != "cut"}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Form":
        """The inverse of `to_json`."""
        fields = dict(data)
        for key in ("weight", "bias"):
            fields[key] = None if fields[key] is None else Part.from_json(fields[key])
        return Form(**fields)


def flat_form(part: Part) -> Form:
    """The form of a parameter with no rule: every entry is a group of its own."""
    return Form(part.numel(), 1, 1, part, None, kronecker=False)


class LayerRule(ABC, Generic[M]):
    """What the rest of the library needs to know of a layer type."""

    own_forward: ClassVar[bool] = False
    """The rule runs an equivalent forward while recording (attention), and records inside it."""
    rounds_inputs: ClassVar[bool] = False
    """Under autocast the layer's inputs of single precision are rounded to the half type of its outputs."""

    def refuses(self, module: M) -> str | None:
        """Why this module cannot be put in standard form, or None."""
        return None

    @abstractmethod
    def forms(self, module: M, parts: dict[str, Part]) -> dict[str, Form]:
        """One form for each call site (the site "" is the module's own call).

        `parts` holds the trainable parameters by their name inside the module; leave out what is not there.
        """

    @abstractmethod
    def lead(self, module: M, site: str, x: Tensor) -> int:
        """How many leading axes of the input are not the layer's own (batch, time, …)."""

    @abstractmethod
    def inputs(self, module: M, site: str, x: Tensor) -> Tensor | OneHot:
        """``[*lead, S, K, I]`` from the layer's input, the bias column left out."""

    @abstractmethod
    def outgrads(self, module: M, site: str, dy: Tensor) -> Tensor:
        """``[V, *lead, S, K, O]`` from gradients ``[V, *out]`` of the layer's output."""

    def copies_of_input(self, module: M) -> int | None:
        """About how many times the size of x `input_moment` needs as scratch; None: as the standard form does."""
        return None

    def input_moment(self, module: M, site: str, x: Tensor) -> Moment | None:
        """A faster route to ``Σ aaᵀ`` than through `inputs`; None where there is none."""
        return None

    def channel_moment(self, module: M, site: str, x: Tensor) -> Moment | None:
        """``Σ aaᵀ`` over input channels alone (SUA); None where the layer has no kernel."""
        return None

    def forward(self, module: M, record: Callable[[str, Tensor, Tensor], None], *args: Any, **kwargs: Any) -> Any:
        """The equivalent forward of a rule with `own_forward`; `record(site, input, output)` each linear call."""
        raise NotImplementedError(f"{type(self).__name__} has no forward of its own")


class Rules:
    """Rules by module type, found through the MRO of the type asked for.

    The modules of `layers/rules` are imported at the first look-up, not at import: each of them imports this one.
    """

    def __init__(self) -> None:
        self._entries: dict[type, LayerRule] = {}
        self._discovered = False

    def add(self, key: type, value: LayerRule) -> None:
        """Register `value` for `key` and its subclasses; the newest registration wins."""
        self._entries[key] = value

    def find(self, key: type) -> LayerRule | None:
        """The rule of the nearest base of `key`, or None."""
        base = self.registered(key)
        return None if base is None else self._entries[base]

    def registered(self, key: type) -> type | None:
        """The nearest base of `key` that has an entry, or None."""
        self._discover()
        return next((base for base in key.__mro__ if base in self._entries), None)

    def names(self) -> list[str]:
        """Names of the classes that have an entry."""
        self._discover()
        return sorted(key.__name__ for key in self._entries)

    def _discover(self) -> None:
        if not self._discovered:
            self._discovered = True
            import_folder("layerwise.layers.rules")


RULES = Rules()


def layer_rule(*types: type[nn.Module]) -> Callable[[type[LayerRule]], type[LayerRule]]:
    """Register a rule for module types and their subclasses.

    >>> @layer_rule(nn.Linear)                      # doctest: +SKIP
    ... class LinearRule(LayerRule[nn.Linear]): ...
    """

    def register(cls: type[LayerRule]) -> type[LayerRule]:
        rule = cls()
        for module_type in types:
            RULES.add(module_type, rule)
        return cls

    return register
