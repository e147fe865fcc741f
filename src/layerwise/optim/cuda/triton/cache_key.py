"""The part of the keys of Triton's cache that stands for Triton itself: a hash over all of its files, 400 MB.

Every process makes it anew, which takes a third of a second, and more beside a program that holds the interpreter's
lock. It is remembered beside the kernels, with the sizes and times of the files that it is of.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME = "layerwise_triton_key.json"


def recall() -> bool:
    """Spare Triton the hash, where it is remembered and no file has changed; whether that is so."""
    try:
        module, place = _cache(), _place()
        saved = json.loads(place.read_text(encoding="utf-8"))
        if saved["files"] != _files(module):
            return False
        key = str(saved["key"])
    except Exception:  # not remembered, or Triton keeps its cache in another way
        return False
    module.triton_key = lambda: key
    return True


def remember() -> None:
    """Make the hash, and remember it."""
    with suppress(Exception):
        module, place = _cache(), _place()
        record = json.dumps({"files": _files(module), "key": module.triton_key()})
        place.parent.mkdir(parents=True, exist_ok=True)
        written = place.with_name(f"{NAME}.{os.getpid()}")
        written.write_text(record, encoding="utf-8")
        written.replace(place)


def _cache() -> Any:
    from triton.runtime import cache  # pyright: ignore[reportMissingImports]

    return cache


def _place() -> Path:
    from triton import knobs  # pyright: ignore[reportMissingImports]

    return Path(knobs.cache.dir) / NAME


def _files(cache: Any) -> str:
    """Where each is, how large and how old."""
    root = Path(cache.__file__).parents[1]
    paths = sorted(path for kind in ("*.py", "_C/*.so") for path in root.rglob(kind))
    told = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(told).encode()).hexdigest()
