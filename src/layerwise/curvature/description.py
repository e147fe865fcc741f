"""A saved file: writing one, and checking what it says of its matrix before anything is built of its tensors.

A description that does not fit would otherwise show when the matrix is used, as a wrong number or a `KeyError`.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from layerwise.foundations.errors import FileFormatError, describe
from layerwise.foundations.operators import BlockOperator
from layerwise.layers.form import Form, Part
from layerwise.layers.parts import from_json

NUMBER = (int, float)
FORMAT, VERSION = "layerwise-matrix", 1
CHECKSUM = "sha256"
"""Of the description and all tensors; files that were written before there was one have none."""


def write(path: str | Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write a matrix to a safetensors file: its tensors, and the rest as JSON in the header."""
    kept = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        text = json.dumps({"version": VERSION, **meta})
        save_file(kept, partial, metadata={"format": FORMAT, "description": text, CHECKSUM: checksum(text, kept)})
        partial.replace(target)  # a save that is cut short leaves the earlier file as it was
    except (SafetensorError, OSError) as error:
        with suppress(OSError):
            partial.unlink()
        raise FileFormatError(
            describe(
                f"{target}, which cannot be written ({error})",
                "a file in a folder that exists and may be written to, with room for it",
                "choose another path; an earlier file there is as it was",
            )
        ) from error


def checksum(description: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the description, and of every tensor's name, type, shape and bytes."""
    found = hashlib.sha256(description.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # strides of single entries may be anything
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


class Inconsistent(ValueError):
    """A description that does not fit itself or the tensors."""

    def __init__(self, given: str, expected: str) -> None:
        super().__init__(given, expected)
        self.given, self.expected = given, expected


def require(holds: bool, given: str, expected: str) -> None:
    """Refuse what does not hold."""
    if not holds:
        raise Inconsistent(given, expected)


def read(data: Any, key: str, kinds: type | tuple[type | None, ...], of: str = "the description") -> Any:
    """A field of one of these types; None among them allows null."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    require(isinstance(data, dict) and key in data, f"{of} without {key!r}", "all fields that F.save writes")
    value = data[key]
    fits = (None if value is None else type(value)) in allowed  # not isinstance: true is no number
    require(fits, f"{of} with {key!r} that is {_shown(value)}", " or ".join(_named(kind) for kind in allowed))
    return value


def read_shapes(meta: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters, in flat order."""
    return {name: _sizes(sizes, f"parameter {name!r}") for name, sizes in read(meta, "shapes", dict).items()}


def read_examples(meta: Any) -> int | float | None:
    """What sums were divided by."""
    examples = read(meta, "examples", (*NUMBER, None))
    fits = examples is None or (math.isfinite(examples) and examples >= 0)
    require(fits, f"{examples} examples", "a finite number ≥ 0, or none")
    return examples


def read_layers(meta: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Part, ...]] | None:
    """The parts of each layer of a matrix that is kept as one."""
    data = read(meta, "layers", (dict, None))
    if data is None:
        return None
    found = from_json(data) or {}
    for name, parts in found.items():
        require(bool(parts), f"layer {name!r} without parameters", "at least one")
        for part in parts:
            _check_part(part, shapes, name)
    return found


def read_form(data: Any, shapes: Mapping[str, tuple[int, ...]], layer: str) -> Form:
    """How a layer's parameters are its matrix."""
    given = read(data, "form", dict, f"layer {layer!r}")
    form = Form.from_json(given)
    require(json.loads(json.dumps(form.to_json())) == given, f"layer {layer!r} with another form", "the form it had")
    for part in form.parts:
        _check_part(part, shapes, layer)
    columns = {"weight": (form.weight, form.weight_inputs), "bias": (form.bias, int(form.bias is not None))}
    sizes = (form.groups, form.outputs, form.weight_inputs, form.taps)
    fits = all(type(n) is int and n >= 0 for n in sizes) and form.taps > 0 and form.weight_inputs % form.taps == 0
    fits = fits and (form.cut is False or (form.cut is True and form.groups > 1))
    require(fits, f"layer {layer!r} of sizes {sizes}", "whole numbers ≥ 0, as many inputs for each kernel offset")
    for role, (part, inputs) in columns.items():
        entries = 0 if part is None else part.numel()
        expected = form.groups * form.outputs * inputs
        require(entries == expected, f"layer {layer!r} with a {role} of {entries} entries", f"{expected} of them")
    return form


def check_whole(forms: Iterable[Form], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Every row of every parameter belongs to one layer, and to one alone."""
    rows: dict[str, list[tuple[int, int]]] = {name: [] for name in shapes}
    for form in forms:
        for part in form.parts:
            rows[part.name].append(part.rows or (0, _rows(part.shape)))
    for name, shape in shapes.items():
        end = 0
        for first, last in sorted(rows[name]):
            end = last if first == end else -1
        fits = bool(rows[name]) and end == _rows(shape)
        require(fits, f"layers that do not make up the parameter {name!r}", "each of its rows in one layer")


def check_operator(operator: BlockOperator, form: Form, options: Any, layer: str) -> None:
    """An operator as it was built from the file, against the layer's form and against what it says of itself."""
    require(
        operator.shape == form.shape,
        f"layer {layer!r} with an operator on {operator.shape}",
        f"an operator on {form.shape}, the shape of its parameters",
    )
    said = json.loads(json.dumps(operator.options()))
    require(said == options, f"layer {layer!r} with options {_shown(options)}", f"options such as {_shown(said)}")
    expected = operator.stored_shapes()
    for key, tensor in operator.tensors().items():
        if expected is not None:
            check_tensor(tensor, expected[key], f"{layer}/{key}")


def check_tensor(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    """Real numbers, in this shape."""
    given = f"tensor {name!r} of shape {tuple(tensor.shape)}, {tensor.dtype}"
    require(tensor.is_floating_point() and tuple(tensor.shape) == tuple(shape), given, f"real numbers of shape {shape}")


def check_names(tensors: Iterable[str], expected: Iterable[str]) -> None:
    """The file has the tensors that its description names, and no others."""
    given, wanted = set(tensors), set(expected)
    odd = ", ".join(repr(name) for name in sorted(given ^ wanted)[:3])
    require(given == wanted, f"tensors and a description that differ in {odd}", "the tensors that it names")


def _check_part(part: Part, shapes: Mapping[str, tuple[int, ...]], layer: str) -> None:
    known = shapes.get(part.name) if isinstance(part.name, str) else None
    require(
        known is not None and tuple(part.shape) == known,
        f"layer {layer!r} with the parameter {part.name!r} of shape {part.shape}",
        f"one of the parameters{'' if known is None else f', of shape {known}'}",
    )
    if part.rows is not None:
        first, last = part.rows
        fits = bool(known) and 0 <= first < last <= part.shape[0]
        require(fits, f"layer {layer!r} with rows {part.rows} of {part.name!r}", f"rows of a tensor of shape {known}")


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def _sizes(sizes: Any, what: str) -> tuple[int, ...]:
    fits = isinstance(sizes, list) and all(type(n) is int and n >= 0 for n in sizes)
    require(fits, f"{what} of shape {_shown(sizes)}", "a list of whole numbers ≥ 0")
    return tuple(sizes)


def _named(kind: type | None) -> str:
    return "null" if kind is None else kind.__name__


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
