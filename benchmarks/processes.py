"""A command in a process of its own, with empty caches of compiled kernels where the start is to be a first one."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_KERNEL_CACHE_PATH", "CUDA_CACHE_PATH")


@contextlib.contextmanager
def cold_caches() -> Iterator[dict[str, str]]:
    """Environment variables that name empty folders, for a while; a second process finds what the first one left."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name.lower()) for name in CACHES}
        for path in caches.values():
            Path(path).mkdir()
        yield caches


class ProcessError(RuntimeError):
    """A process that failed, in its own last words."""


def output_of(script: Path, arguments: Sequence[str], environment: dict[str, str]) -> str:
    """What a Python script prints."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ProcessError((done.stderr.strip().splitlines() or ["no output"])[-1][:160])
    return done.stdout
