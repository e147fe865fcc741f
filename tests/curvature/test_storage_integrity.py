"""A saved matrix is read back as it was written, or not at all."""

import copy
import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import layerwise as lw
from error_sentences import THREE
from layerwise.curvature.matrix import ParamMatrix
from layerwise.foundations.errors import FileFormatError

STRUCTURES = ("dense", "lowrank", "block", "diag", "quasidiag", "kfac", "kfac-sua", "ekfac", "embedding-kfac", "packed")
FLIPS = 60
"""Of each structure."""


class _Packed(nn.Module):
    """Three projections in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 1, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


@cache
def _matrix(structure: str) -> ParamMatrix:
    torch.manual_seed(0)
    kind, *option = structure.split("-")
    y = torch.randint(2, (6,))
    if structure == "packed":
        return lw.fisher(_Packed(), (torch.randn(6, 3, 4), y), structure="kfac")
    if kind == "embedding":
        model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
        return lw.fisher(model, (torch.randint(5, (6, 2)), y), structure="kfac")
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2))
    return lw.fisher(model, (torch.randn(6, 2, 4), y), structure=kind, conv="sua" if option else "kfc")


@pytest.fixture(params=STRUCTURES)
def structure(request: pytest.FixtureRequest) -> str:
    return request.param


def _refused(path: Path) -> str:
    """The one line of the error."""
    with pytest.raises(FileFormatError) as caught:
        lw.load(path)
    message = str(caught.value)
    assert re.search(THREE, message)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 500 + len(str(path))
    return message


def _same(loaded: ParamMatrix, saved: ParamMatrix) -> None:
    torch.testing.assert_close(loaded.to_dense(), saved.to_dense())  # products of other strides are rounded otherwise


def _header(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


# --- bytes -------------------------------------------------------------------------------------------------


def test_flipped_bits(structure: str, tmp_path: Path):
    path = tmp_path / "F.safetensors"
    _matrix(structure).save(path)
    content = path.read_bytes()
    draw = random.Random(0)
    header = 8 + int.from_bytes(content[:8], "little")
    places = [draw.randrange(8 * len(content)) for _ in range(FLIPS // 2)]
    places += [draw.randrange(8 * header) for _ in range(FLIPS // 4)]
    places += [draw.randrange(8 * header, 8 * len(content)) for _ in range(FLIPS // 4)]
    for place in places:
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        _refused(path)
    path.write_bytes(content)
    _same(lw.load(path), _matrix(structure))


@pytest.mark.slow
def test_every_bit(tmp_path: Path):
    path = tmp_path / "F.safetensors"
    model = nn.Linear(2, 2)
    lw.fisher(model, (torch.randn(4, 2), torch.randint(2, (4,)))).save(path)
    content = path.read_bytes()
    for place in range(8 * len(content)):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        _refused(path)


def test_tensors_that_were_exchanged(tmp_path: Path):
    """Every byte is there, and each tensor is whole."""
    path = tmp_path / "F.safetensors"
    _matrix("ekfac").save(path)
    header, tensors = _header(path), load_file(path)
    for changed in (
        {**tensors, "0/s_G": tensors["0/s_G"].flip(1)},
        {**tensors, "0/U_G": tensors["0/U_G"].mT.contiguous()},
        {**tensors, "3/G": tensors["3/U_G"].clone()},
        {**tensors, "0/s_A": tensors["0/s_A"].double()},
    ):
        save_file(changed, path, metadata=header)
        assert "SHA-256" in _refused(path)


def test_a_file_without_a_checksum_is_read(structure: str, tmp_path: Path):
    """As files were before there was one."""
    path = tmp_path / "F.safetensors"
    _matrix(structure).save(path)
    header, tensors = _header(path), load_file(path)
    assert header.keys() == {"format", "description", "sha256"}
    save_file(tensors, path, metadata={k: header[k] for k in ("format", "description")})
    _same(lw.load(path), _matrix(structure))


# --- descriptions ------------------------------------------------------------------------------------------


def _places(data: Any, path: tuple = ()) -> list[tuple]:
    """Every field of a description."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, value in items for found in ((*path, key), *_places(value, (*path, key)))]


def _at(data: Any, path: tuple) -> Any:
    for key in path:
        data = data[key]
    return data


HARMLESS = {"kind", "reason", "structure", "kronecker", "one_hot", "transposed", "psd", "name", "positions", "examples"}
"""Values that nothing in the file can contradict; another type is still refused."""


def _uses(M: ParamMatrix) -> None:
    v = torch.ones(M.numel())
    answers = [M @ v, M.solve(v, 0.1), M.to_dense(), M.eigenvalues(), M.diagonal().flat(), M.trace()]
    assert all(t.numel() for t in answers)
    layers = getattr(M, "layers", None)
    for name in M.table.names() if layers is None and hasattr(M, "table") else layers or {}:  # type: ignore[attr-defined]
        M.layer(name).to_dense()


def _loads_well_or_not_at_all(path: Path) -> bool:
    """Whether a file is refused; one that is read must be of use."""
    try:
        found = lw.load(path)
    except FileFormatError:
        _refused(path)
        return True
    _uses(found)
    return False


def test_fields_that_are_missing(structure: str, tmp_path: Path, untyped: None):
    path = tmp_path / "F.safetensors"
    _matrix(structure).save(path)
    meta, tensors = json.loads(_header(path)["description"]), load_file(path)
    for place in _places(meta)[:: 3 if structure == "packed" else 1]:
        if "positions" in place[:-1]:
            continue
        changed = copy.deepcopy(meta)
        del _at(changed, place[:-1])[place[-1]]
        save_file(tensors, path, metadata={"format": "layerwise-matrix", "description": json.dumps(changed)})
        optional = place[:1] == ("layers",) and structure in ("dense", "lowrank") and len(place) <= 3
        assert _loads_well_or_not_at_all(path) or optional, place


@pytest.mark.parametrize("instead", [None, "other", 7, -1, 0.5, True, [], {}, [3, 3], float("nan")], ids=repr)
def test_fields_that_hold_something_else(instead: Any, structure: str, tmp_path: Path, untyped: None):
    path = tmp_path / "F.safetensors"
    _matrix(structure).save(path)
    meta, tensors = json.loads(_header(path)["description"]), load_file(path)
    for place in _places(meta)[:: 1 if structure == "kfac" else 3]:
        if _at(meta, place) == instead:
            continue
        changed = copy.deepcopy(meta)
        _at(changed, place[:-1])[place[-1]] = instead
        save_file(tensors, path, metadata={"format": "layerwise-matrix", "description": json.dumps(changed)})
        known = {key for key in place if isinstance(key, str)} & HARMLESS or place == ("layers",)
        known = known or (place[-1] == "taps" and not _at(meta, place[:-1]).get("weight_inputs", 1))  # of a bias alone
        assert _loads_well_or_not_at_all(path) or known, place


def _without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {k: t for k, t in tensors.items() if k != name}


def _with(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: change(tensors[name]).contiguous()}


@pytest.mark.parametrize(
    ("structure", "change", "word"),
    [
        ("dense", _without("matrix"), "'matrix'"),
        ("dense", _with("matrix", lambda t: t[:-1]), "'matrix' of shape"),
        ("dense", _with("matrix", lambda t: t[:-1, :-1]), "'matrix' of shape"),
        ("dense", _with("matrix", lambda t: t.long()), "int64"),
        ("dense", lambda tensors: {**tensors, "more": torch.ones(2)}, "'more'"),
        ("lowrank", _with("R", lambda t: t[:, 1:]), "'R' of shape"),
        ("lowrank", _with("R", lambda t: t[0]), "'R' of shape"),
        ("kfac", _without("3/G"), "'G'"),
        ("kfac", _with("3/G", lambda t: t[:, :-1]), "shape"),
        ("kfac", _with("3/G", lambda t: t[:, :1, :1]), "operator on"),
        ("kfac", _with("3/A", lambda t: t[0]), "operator on|shape"),
        ("kfac", _with("3/A", lambda t: t[:, :-1]), "shape"),
        ("kfac", _with("3/A", lambda t: t.to(torch.int32)), "int32"),
        ("kfac", lambda tensors: {**tensors, "4/A": torch.ones(2)}, "'4/A'"),
        ("diag", _with("0/values", lambda t: t[..., 1:]), "operator on"),
        ("ekfac", _with("0/s_A", lambda t: t[:, 1:]), "'0/s_A'"),
        ("ekfac", _with("0/U_A", lambda t: t[:, 1:]), "'0/U_A'"),
        ("ekfac", _without("0/U_A"), "'U_A'"),
        ("quasidiag", _with("0/cross", lambda t: t[..., 1:]), "'0/cross'"),
        ("block", _with("0/matrix", lambda t: t[:, 1:]), "'0/matrix'"),
    ],
)
def test_tensors_that_do_not_fit(structure: str, change: Callable, word: str, tmp_path: Path, untyped: None):
    path = tmp_path / "F.safetensors"
    _matrix(structure).save(path)
    header = {k: v for k, v in _header(path).items() if k != "sha256"}
    save_file(change(load_file(path)), path, metadata=header)
    assert any(each in _refused(path) for each in word.split("|"))


def test_layers_that_do_not_make_up_the_parameters(tmp_path: Path):
    path = tmp_path / "F.safetensors"
    _matrix("packed").save(path)
    meta, tensors = json.loads(_header(path)["description"]), load_file(path)
    for dropped in range(len(meta["layers"])):
        kept = [layer for place, layer in enumerate(meta["layers"]) if place != dropped]
        names = {f"{layer['name']}/{key}" for layer in kept for key in layer["tensors"]}
        positions = {k: n for k, n in meta["positions"].items() if k in {layer["name"] for layer in kept}}
        text = json.dumps({**meta, "layers": kept, "positions": positions})
        save_file({k: tensors[k] for k in names}, path, metadata={"format": "layerwise-matrix", "description": text})
        assert "do not make up" in _refused(path)
