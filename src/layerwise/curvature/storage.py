"""Load what ``F.save(path)`` has written: tensors and a JSON description as safetensors, no pickle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from layerwise.curvature.block_diagonal import BlockDiagonal
from layerwise.curvature.description import (
    CHECKSUM,
    FORMAT,
    VERSION,
    Inconsistent,
    check_names,
    check_operator,
    check_tensor,
    check_whole,
    checksum,
    read,
    read_examples,
    read_form,
    read_layers,
    read_shapes,
    require,
)
from layerwise.curvature.low_rank import LowRank
from layerwise.curvature.matrix import DenseMatrix, ParamMatrix
from layerwise.foundations import kronecker, quasi_diagonal  # noqa: F401 - register their operators
from layerwise.foundations.errors import FileFormatError, describe
from layerwise.foundations.operators import OPERATORS, BlockOperator
from layerwise.layers.table import LayerSpec, LayerTable


def load(path: str | Path, device: torch.device | str = "cpu") -> ParamMatrix:
    """Read a matrix that `save` has written.

    Raises:
        FileFormatError: the file is missing, truncated, changed, or not one of ours.
    """
    path = Path(path)
    if not path.exists():
        raise FileFormatError(
            describe(f"{path}, which does not exist", "a file written by F.save(path)", "check the path")
        )
    try:
        # On the host, where the checksum is computed, whatever the device.
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise FileFormatError(
                    describe(
                        f"{path}, a safetensors file that holds something else",
                        "a file written by F.save(path)",
                        "load it with the library that wrote it",
                    )
                )
            meta = dict(json.loads(header["description"]))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    except FileFormatError:
        raise
    except (*_UNREADABLE, SafetensorError, EOFError, OSError) as error:
        raise _unreadable(path, error) from error
    if meta.get("version") != VERSION:
        raise FileFormatError(
            describe(
                f"{path} of format version {meta.get('version')}",
                f"version {VERSION}",
                "use a matching release",
            )
        )
    _check_sum(path, header, tensors)
    try:
        return _build(meta, {key: tensor.to(device) for key, tensor in tensors.items()})
    except Inconsistent as error:
        raise FileFormatError(
            describe(
                f"{path}, which has {error.given}", error.expected, "it was written or changed wrongly: save it again"
            )
        ) from error
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


_UNREADABLE = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    ArithmeticError,
    AssertionError,
    RecursionError,
)
"""What reading a description that means nothing may end in."""


def _check_sum(path: Path, header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Refuse a file of which a bit has changed; another name beside the three would be a changed one of theirs."""
    odd = sorted(header.keys() - {"format", "description", CHECKSUM})
    if odd or header.get(CHECKSUM, None) not in (None, checksum(header["description"], tensors)):
        raise FileFormatError(
            describe(
                f"{path}, whose bytes are not those that were written"
                + (f" (it has {odd[0]!r} in its header)" if odd else " (its SHA-256 is another)"),
                "a file as F.save(path) has left it",
                "copy it again from where it is intact, or save it again",
            )
        )


def _unreadable(path: Path, error: Exception) -> FileFormatError:
    return FileFormatError(
        describe(
            f"{path}, which cannot be read ({type(error).__name__}: {error})",
            "a whole file written by F.save(path)",
            "it is truncated or of another kind: save it again",
        )
    )


def _build(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ParamMatrix:
    kind, shapes, examples = read(meta, "class", str), read_shapes(meta), read_examples(meta)
    d = sum(torch.Size(shape).numel() for shape in shapes.values())
    if kind == "DenseMatrix":
        check_names(tensors, ["matrix"])
        check_tensor(tensors["matrix"], (d, d), "matrix")
        psd = read(meta, "psd", bool)
        return DenseMatrix(tensors["matrix"], shapes, psd, examples, read_layers(meta, shapes))
    if kind == "LowRank":
        check_names(tensors, ["R"])
        check_tensor(tensors["R"], (len(tensors["R"]), d), "R")
        return LowRank(tensors["R"], shapes, examples, read_layers(meta, shapes))
    require(kind == "BlockDiagonal", f"a matrix of class {kind!r}", "BlockDiagonal, DenseMatrix or LowRank")
    return _build_blocks(meta, tensors, shapes, examples)


def _build_blocks(
    meta: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shapes: dict[str, tuple[int, ...]],
    examples: int | float | None,
) -> BlockDiagonal:
    specs, operators, used = [], dict[str, BlockOperator](), list[str]()
    for layer in read(meta, "layers", list):
        name = read(layer, "name", str, "a layer")
        of = f"layer {name!r}"
        form = read_form(layer, shapes, name)
        specs.append(LayerSpec(name, form, read(layer, "kind", str, of), (), read(layer, "reason", (str, None), of)))
        keys, options = read(layer, "tensors", list, of), read(layer, "options", dict, of)
        own = {key: tensors[f"{name}/{key}"] for key in keys if f"{name}/{key}" in tensors}
        used += [f"{name}/{key}" for key in keys]
        check_names(own, keys)
        require(name not in operators, f"two layers {name!r}", "one of each name")
        operators[name] = OPERATORS[read(layer, "operator", str, of)].from_tensors(own, options)
        check_names(operators[name].tensors(), keys)
        check_operator(operators[name], form, options, name)
    require(bool(specs), "no layers", "at least one")
    check_names(tensors, used)
    check_whole([spec.form for spec in specs], shapes)
    positions = read(meta, "positions", dict)
    counted = positions.keys() <= operators.keys() and all(type(n) is int and n >= 0 for n in positions.values())
    require(counted, "positions that are no counts of its layers", "a number ≥ 0 for layers that it has")
    structure = read(meta, "structure", str)
    return BlockDiagonal(LayerTable(tuple(specs), shapes), operators, structure, examples, positions)
