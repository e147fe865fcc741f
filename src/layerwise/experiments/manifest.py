"""The manifest that opens every session of records: what was asked for, by which code, on what machine, when."""

import datetime
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import layerwise
from layerwise.experiments.experiment import Experiment, digest, plain
from layerwise.experiments.records import FORMAT

LIBRARIES = ("torch", "numpy", "scipy", "scikit-learn", "ray")


def manifest(
    experiment: Experiment,
    source: str | None,
    config: Any,
    preset: str,
    seeds: Sequence[int],
    engine: Mapping[str, Any],
) -> dict[str, Any]:
    """All that one needs to know to run the same again, as plain values."""
    return {
        "kind": "manifest",
        "format": FORMAT,
        "experiment": experiment.name,
        "source": source,
        "preset": preset,
        "digest": digest(experiment.name, config),
        "config": plain(config),
        "seeds": list(seeds),
        "engine": dict(engine),
        "code": code_version(),
        "libraries": libraries(),
        "hardware": hardware(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


@functools.cache
def code_version() -> dict[str, Any]:
    """The version of this library and, in a checkout, the commit and whether files differ from it."""
    version: dict[str, Any] = {"version": layerwise.__version__, "commit": None, "changed": None}
    root = Path(layerwise.__file__).parent
    # An installed copy may lie inside somebody else's repository, whose commit says nothing about us.
    if _git(root, "ls-files", "--error-unmatch", "__init__.py") is None:
        return version
    changes = _git(root, "status", "--porcelain", "--", ".")
    return version | {"commit": _git(root, "rev-parse", "HEAD"), "changed": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@functools.cache
def libraries() -> dict[str, str]:
    """Versions of Python and of the libraries that numbers depend on, where installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def hardware() -> dict[str, Any]:
    """Processor, cores, threads that torch uses, memory, GPU and system."""
    import torch  # here, since `check` and `list` read this module's versions but compute nothing

    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory(),
        "gpu": [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
    }


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):  # a system that does not say
        return None


def _processor() -> str:
    if sys.platform.startswith("linux"):
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip().lower() in ("model name", "cpu model", "hardware") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
