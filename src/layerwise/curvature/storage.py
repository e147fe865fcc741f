"""Save and load as safetensors: tensors and a JSON description, no pickle."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from layerwise.curvature.block_diagonal import BlockDiagonal
from layerwise.curvature.dense import DenseMatrix
from layerwise.curvature.low_rank import LowRank
from layerwise.curvature.matrix import ParamMatrix
from layerwise.foundations import kronecker, quasi_diagonal  # noqa: F401 - register their operators
from layerwise.foundations.errors import FileFormatError, UnsupportedError, describe
from layerwise.foundations.operators import OPERATORS
from layerwise.layers.form import Form
from layerwise.layers.parts import from_json, to_json
from layerwise.layers.table import LayerSpec, LayerTable

FORMAT, VERSION = "layerwise-matrix", 1


@dataclass(frozen=True)
class _Described:
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def save(matrix: ParamMatrix, path: str | Path) -> None:
    """Write a matrix; structures that keep nothing cannot be written."""
    if isinstance(matrix, BlockDiagonal):
        described = _describe_blocks(matrix)
    elif isinstance(matrix, DenseMatrix):
        described = _Described({"matrix": matrix.matrix}, {"psd": matrix.psd, "layers": to_json(matrix.layers)})
    elif isinstance(matrix, LowRank):
        described = _Described({"R": matrix.R}, {"layers": to_json(matrix.layers)})
    else:
        raise UnsupportedError(
            describe(
                f"a {matrix.structure!r} matrix, which keeps nothing of its own",
                "dense, block, diag, quasidiag, kfac, ekfac or lowrank",
                "save its parts, or estimate it in one of these structures",
            )
        )
    meta = {
        "version": VERSION,
        "class": type(matrix).__name__,
        "shapes": {k: list(v) for k, v in matrix.shapes.items()},
        "examples": getattr(matrix, "examples", None),
        **described.meta,
    }
    tensors = {k: t.detach().cpu().contiguous().clone() for k, t in described.tensors.items()}
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        save_file(tensors, partial, metadata={"format": FORMAT, "description": json.dumps(meta)})
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


def _describe_blocks(matrix: BlockDiagonal) -> _Described:
    tensors, layers = {}, []
    for spec in matrix.table.layers:
        operator = matrix.operators[spec.name]
        for key, tensor in operator.tensors().items():
            tensors[f"{spec.name}/{key}"] = tensor
        layers.append(
            {
                "name": spec.name,
                "kind": spec.kind,
                "reason": spec.reason,
                "form": spec.form.to_json(),
                "operator": operator.kind,
                "tensors": list(operator.tensors()),
                "options": operator.options(),
            }
        )
    meta = {"structure": matrix.structure, "layers": layers, "positions": dict(matrix.positions or {})}
    return _Described(tensors, meta)


def load(path: str | Path, device: torch.device | str = "cpu") -> ParamMatrix:
    """Read a matrix that `save` has written.

    Raises:
        FileFormatError: the file is missing, truncated, or not one of ours.
    """
    path = Path(path)
    if not path.exists():
        raise FileFormatError(describe(f"{path}, which does not exist", "a file written by F.save(path)", "check it"))
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
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
    except (SafetensorError, ValueError, TypeError, KeyError, EOFError, OSError) as error:
        raise _unreadable(path, error) from error
    if meta.get("version") != VERSION:
        raise FileFormatError(
            describe(
                f"{path} of format version {meta.get('version')}",
                f"version {VERSION}",
                "use a matching release",
            )
        )
    try:
        return _build(meta, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> FileFormatError:
    return FileFormatError(
        describe(
            f"{path}, which cannot be read ({type(error).__name__}: {error})",
            "a whole file written by F.save(path)",
            "it is truncated or of another kind: save it again",
        )
    )


def _build(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ParamMatrix:
    shapes = {k: tuple(v) for k, v in meta["shapes"].items()}
    if meta["class"] == "DenseMatrix":
        return DenseMatrix(tensors["matrix"], shapes, bool(meta["psd"]), meta["examples"], from_json(meta["layers"]))
    if meta["class"] == "LowRank":
        return LowRank(tensors["R"], shapes, meta["examples"], from_json(meta["layers"]))
    specs, operators = [], {}
    for layer in meta["layers"]:
        name = layer["name"]
        specs.append(LayerSpec(name, Form.from_json(layer["form"]), layer["kind"], (), layer["reason"]))
        own = {key: tensors[f"{name}/{key}"] for key in layer["tensors"]}
        operators[name] = OPERATORS[layer["operator"]].from_tensors(own, layer["options"])
    table = LayerTable(tuple(specs), shapes)
    return BlockDiagonal(table, operators, meta["structure"], meta["examples"], meta["positions"])
