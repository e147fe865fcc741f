"""Which entries of a flat vector belong to a layer; rows of a packed parameter count as a parameter of their own."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from layerwise.foundations.columns import Shapes
from layerwise.foundations.errors import NameLookupError, unknown
from layerwise.layers.form import Part
from layerwise.layers.table import LayerTable

Layers = Mapping[str, tuple[Part, ...]]


def layers_of(table: LayerTable) -> dict[str, tuple[Part, ...]]:
    """The parts of every layer, in flat order."""
    order = {name: index for index, name in enumerate(table.shapes)}
    return {spec.name: tuple(sorted(spec.form.parts, key=lambda part: order[part.name])) for spec in table.layers}


def find_layer(layers: Layers | None, shapes: Shapes, name: str) -> tuple[Part, ...]:
    """The parts of one layer; where layers are not known, every parameter is one."""
    known = layers or {p: (Part(p, tuple(shape)),) for p, shape in shapes.items()}
    if name not in known:
        raise NameLookupError(unknown("layer", name, known))
    return known[name]


def own_name(part: Part) -> str:
    """What a part is called on its own."""
    return part.name if part.rows is None else f"{part.name}[{part.rows[0]}:{part.rows[1]}]"


def own_shapes(parts: Iterable[Part]) -> dict[str, tuple[int, ...]]:
    """The parameters of a layer on its own."""
    return {own_name(part): part.part_shape() for part in parts}


def alone(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The same parts as whole parameters."""
    return tuple(Part(own_name(part), part.part_shape()) for part in parts)


def places(parts: Iterable[Part], shapes: Shapes) -> Tensor:
    """Where the parts' entries are in a flat vector."""
    flat = torch.arange(sum(torch.Size(shape).numel() for shape in shapes.values()))
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    where = {k: t.view(shape) for (k, shape), t in zip(shapes.items(), flat.split(sizes), strict=True)}
    return torch.cat([part.of(where).flatten() for part in parts])


def to_json(layers: Layers | None) -> Any:
    """A description that JSON can hold."""
    return None if layers is None else {name: [asdict(part) for part in parts] for name, parts in layers.items()}


def from_json(data: Any) -> dict[str, tuple[Part, ...]] | None:
    """The inverse of `to_json`."""
    if data is None:
        return None
    return {name: tuple(Part.from_json(part) for part in parts) for name, parts in data.items()}
