"""The hash over Triton's files is made once for all processes, and anew when a file has changed: with a stand-in."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layerwise.optim.cuda.triton import cache_key

CACHE = """
from functools import lru_cache
from pathlib import Path
@lru_cache
def triton_key():
    here = Path(__file__)
    with open(here.parents[2] / "made", "a") as made:
        made.write("x")
    return here.read_text()[-1]
# 1"""


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package of that name, which notes beside it how often its key was made."""
    folder = tmp_path / "triton"
    for name, text in {
        "__init__.py": "",
        "runtime/__init__.py": "",
        "runtime/cache.py": CACHE,
        "knobs.py": "from types import SimpleNamespace\n"
        f"cache = SimpleNamespace(dir={str(tmp_path / 'kept' / 'deep')!r})\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    real = again()
    yield folder
    again()
    sys.modules.update(real)


def again() -> dict[str, Any]:
    """As another process imports it; what was imported before."""
    importlib.invalidate_caches()
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "triton"}


def key() -> str:
    return importlib.import_module("triton.runtime.cache").triton_key()


def made(triton: Path) -> int:
    return len((triton.parent / "made").read_text())


def record(triton: Path) -> Path:
    place = cache_key._place(importlib.import_module("triton.runtime.cache"))
    assert place.parent == triton.parent / "kept" / "deep"
    return place


def test_it_is_made_once(triton: Path):
    assert not cache_key.recall()
    cache_key.remember()
    assert made(triton) == 1
    again()
    assert cache_key.recall()
    assert key() == "1"
    assert made(triton) == 1
    assert record(triton).is_file()
    assert len([*record(triton).parent.iterdir()]) == 1


@pytest.mark.parametrize("change", ["size", "time", "another file", "gone"])
def test_it_is_made_anew_where_a_file_has_changed(change: str, triton: Path):
    cache_key.remember()
    again()
    file = triton / "runtime" / "cache.py"
    if change == "size":
        file.write_text(CACHE + "2", encoding="utf-8")
    elif change == "time":
        told = file.stat()
        file.write_text(CACHE[:-1] + "2", encoding="utf-8")
        os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns + 1))
    elif change == "another file":
        (triton / "more.py").write_text("", encoding="utf-8")
    else:
        (triton / "knobs.py").rename(triton / "elsewhere.py")
    assert not cache_key.recall()
    assert key() == ("2" if change in ("size", "time") else "1")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 1, "key": "other"}'])
def test_what_is_no_record_counts_for_nothing(text: str, triton: Path):
    place = record(triton)
    place.parent.mkdir(parents=True)
    place.write_text(text, encoding="utf-8")
    assert not cache_key.recall()
    assert key() == "1"


def test_where_nothing_can_be_written(triton: Path, monkeypatch: pytest.MonkeyPatch):
    assert cache_key.may_remember()
    (triton.parent / "kept").write_text("a file", encoding="utf-8")
    assert not cache_key.may_remember()
    cache_key.remember()
    assert not cache_key.recall()
    assert key() == "1"


@pytest.mark.parametrize("before", ["made", "recalled"])
def test_an_upgrade_beside_a_process_is_not_given_the_key_of_before(before: str, triton: Path):
    """A notebook that has used Triton, an upgrade, and another optimizer in the same notebook."""
    if before == "made":
        assert key() == "1"
    else:
        cache_key.remember()
        again()
        assert cache_key.recall()
    (triton / "runtime" / "cache.py").write_text(CACHE + "2", encoding="utf-8")
    assert not cache_key.recall()
    assert not cache_key.may_remember()
    cache_key.remember()
    again()
    assert not cache_key.recall()
    assert key() == "2"


def test_environments_that_share_a_cache_keep_a_record_each(triton: Path, tmp_path: Path):
    cache_key.remember()
    first = record(triton)
    other = tmp_path / "elsewhere"
    other.mkdir()
    triton.rename(other / "triton")
    sys.path.insert(0, str(other))
    again()
    try:
        assert not cache_key.recall()
        cache_key.remember()
        assert len([*first.parent.iterdir()]) == 2
    finally:
        sys.path.remove(str(other))
