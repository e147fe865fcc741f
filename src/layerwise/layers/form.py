"""`Form`: how parameters of a layer are one matrix a group, ``W [K, O, I]``, and back.

A form is data alone (no module), so that a saved matrix can be loaded without the model.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


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
