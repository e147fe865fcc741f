"""The part of the keys of Triton's cache that stands for Triton itself: a hash over all of its files, 400 MB.

Every process makes it anew, which takes a third of a second, and more beside a program that holds the interpreter's
lock. It is remembered beside the kernels, with the sizes and times of the files that it is of. For that a function of
Triton's is replaced, in this process, by one that returns the same.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def recall() -> bool:
    """Spare Triton the hash, where it is remembered and no file has changed; whether that is so."""
    try:
        module = _cache()
        place = _place(module)
        saved = json.loads(place.read_text(encoding="utf-8"))
        if saved["files"] != _files(module):
            return False
        key = str(saved["key"])
    except Exception:  # not remembered, or Triton keeps its cache in another way
        return False
    module.triton_key = lambda: key
    return True


def may_remember() -> bool:
    """Whether `remember` would write: not if the cache folder is read-only, nor once this process has made the hash
    (files may have been replaced since, by an upgrade beside a notebook)."""
    with suppress(Exception):
        module = _cache()
        folder = next(path for path in _place(module).parents if path.exists())
        return not _is_made(module) and folder.is_dir() and os.access(folder, os.W_OK)
    return False


def remember() -> None:
    """Make the hash, and remember it, if this process has not made it before."""
    with suppress(Exception):
        module = _cache()
        if _is_made(module):
            return
        place = _place(module)
        record = json.dumps({"files": _files(module), "key": module.triton_key()})
        place.parent.mkdir(parents=True, exist_ok=True)
        written = place.with_name(f"{place.name}.{os.getpid()}")
        written.write_text(record, encoding="utf-8")
        written.replace(place)


def _cache() -> Any:
    from triton.runtime import cache  # pyright: ignore[reportMissingImports]

    return cache


def _is_made(module: Any) -> bool:
    """Whether Triton has its hash: what it returns is then of the files as they were. Recalled, it is, too."""
    return module.triton_key.cache_info().currsize > 0 if hasattr(module.triton_key, "cache_info") else True


def _place(module: Any) -> Path:
    """One for each Triton that uses this cache: environments share it."""
    from triton import knobs  # pyright: ignore[reportMissingImports]

    installed = hashlib.sha256(str(Path(module.__file__).parents[1]).encode()).hexdigest()[:12]
    return Path(knobs.cache.dir) / f"layerwise_triton_key_{installed}.json"


def _files(cache: Any) -> str:
    """Where each is, how large and how old."""
    walked = os.walk(Path(cache.__file__).parents[1], followlinks=True)
    names = (os.path.join(folder, name) for folder, _, names in walked for name in names)
    paths = sorted(path for path in names if path.endswith((".py", ".so", ".pyd")))
    told = [(path, (stat := os.stat(path)).st_size, stat.st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(told).encode()).hexdigest()
