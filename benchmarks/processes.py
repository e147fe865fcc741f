"""A command in a process of its own, with empty caches of compiled kernels where the start is to be a first one.

Processes that take turns on a device are all begun at once, and wait (`Waiting`, `wait_for_turn`) when they have
imported what they need: that takes longer than many runs, and would be on nobody's clock.
"""

import compileall
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
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


@cache
def as_installed() -> None:
    """Sources as pip leaves them: compiled to bytecode, also where processes of this machine are told to write none.

    A start imports 170 files of this library and 40 of Triton, which takes 0.3 and 0.1 s longer without bytecode; the
    processes that compile kernels import Triton, too.
    """
    for found in map(find_spec, ("layerwise", "torch", "triton")):
        if found is not None and found.origin is not None:
            compileall.compile_dir(Path(found.origin).parent, quiet=2, workers=0)


class ProcessError(RuntimeError):
    """A process that failed, in its own last words."""


class Waiting:
    """A Python script that has begun, and goes on when it is its turn; in it, `wait_for_turn` must be called."""

    def __init__(self, script: Path, arguments: Sequence[str], environment: dict[str, str]) -> None:
        command, piped = [sys.executable, str(script), *arguments], subprocess.PIPE
        as_installed()
        env = os.environ | environment
        self._process = subprocess.Popen(command, env=env, stdin=piped, stdout=piped, stderr=piped, text=True)

    def output(self) -> str:
        """Let it go on; what it prints."""
        printed, errors = self._process.communicate("go\n")
        if self._process.returncode:
            raise ProcessError((errors.strip().splitlines() or ["no output"])[-1][:160])
        return printed

    def stop(self) -> None:
        """If it has not ended."""
        self._process.kill()
        self._process.wait()


def wait_for_turn() -> None:
    """In a script that was begun by `Waiting`: until it may go on."""
    sys.stdin.readline()


def output_of(script: Path, arguments: Sequence[str], environment: dict[str, str]) -> str:
    """What a Python script prints that waits for no turn."""
    return Waiting(script, arguments, environment).output()
