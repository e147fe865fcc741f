"""Compilation of Triton's kernels in processes of their own, which leave what they make in Triton's cache.

In threads, compilers hold the interpreter's lock for about a seventh of their time: thirty of them slow each other
down, and all that the program does meanwhile. A process that needs neither torch nor this library's modules, but only
Triton and the files of kernels, begins in a third of a second. Whatever fails there, or takes too long, is compiled by
whoever asked for it; and so is everything where this file cannot tell if a kernel is in the cache.

Run as a script, this file is such a process: nothing is imported here that is not Python's.
"""

import hashlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

LONGEST = 60.0
"""Seconds after which a process is given up."""
DONE, FAILED = b"1", b"0"
_IDLE: list["Process"] = []
_LOST = threading.Event()
"""That a process has not answered: there are no others after it."""
_LOCK = threading.Lock()
_STATE = threading.local()


class Process:
    """One that compiles, a kernel at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._say(sys.path)

    def _say(self, what: Any) -> None:
        requests = self._process.stdin
        assert requests is not None
        requests.write(pickle.dumps(what))
        requests.flush()

    def compile(self, job: tuple[Any, ...]) -> bytes:
        """`DONE` or `FAILED`; or that there was no answer."""
        self._say((_packages(job[0]), _key_of_triton(), *job))
        answers = self._process.stdout
        assert answers is not None
        return os.read(answers.fileno(), 1) if wait([answers.fileno()], LONGEST) else b""

    def end(self) -> None:
        """Now, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()


def in_processes(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's `compile`, in a process first where a thread asks for that (`asked`) and the result is not cached."""

    def compiled(src: Any, target: Any = None, options: Any = None, **others: Any) -> Any:
        lock, call = getattr(_STATE, "lock", None), partial(compile, src, target=target, options=options, **others)
        cached = lock is None or _is_cached(src, target, options)
        if lock is None or cached:
            return call()
        lock.release()
        try:
            job = (src.fn.__module__, src.fn.__name__, src.signature, src.constants, src.attrs, target, options)
            if cached is None or not may_begin() or not _first(job):
                return call()
        finally:
            lock.acquire()
        return call()

    compiled.of = compile  # type: ignore[attr-defined]
    return compiled


@contextmanager
def asked(lock: threading.Lock):
    """What this thread compiles, a process compiles first; the thread holds the lock, but while it is compiled."""
    _STATE.lock = lock
    try:
        yield
    finally:
        _STATE.lock = None


def begin(count: int) -> None:
    """So many processes, before there is anything to do: they read Triton meanwhile."""
    with suppress(Exception):  # no more processes: threads compile
        for _ in range(count if may_begin() else 0):
            process = Process()
            with _LOCK:
                _IDLE.append(process)


def may_begin() -> bool:
    """Whether Python can be begun anew: not where a program has it built in, nor where that has failed."""
    is_python = Path(sys.executable or "").name.startswith("python") and not getattr(sys, "frozen", False)
    return is_python and not _LOST.is_set()


def end() -> None:
    """All processes that have nothing to do."""
    with _LOCK:
        ended = [*_IDLE]
        _IDLE.clear()
    for process in ended:
        process.end()


def _first(job: tuple[Any, ...]) -> bool:
    """Hand a job to an idle process, or a new one; one that does not answer is ended. Returns whether it is done."""
    with _LOCK:
        process = _IDLE.pop() if _IDLE else None
    answer = b""
    with suppress(Exception):  # no more processes, or a job that cannot be sent
        process = process or Process()
        answer = process.compile(job)
    if process is not None and answer in (DONE, FAILED):
        with _LOCK:
            _IDLE.append(process)
        return answer == DONE
    _LOST.set()
    if process is not None:
        process.end()
    return False


def _packages(module: str) -> dict[str, list[str]]:
    """The packages that a module of kernels is in, and where their files are."""
    parts = module.split(".")[:-1]
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return {name: [*sys.modules[name].__path__] for name in names}


def _key_of_triton() -> str | None:
    """What stands for it in the keys of its cache (`cache_key`), which a process need not find out."""
    with suppress(Exception):
        from triton.runtime.cache import triton_key  # pyright: ignore[reportMissingImports]

        return triton_key()
    return None


def _is_cached(src: Any, target: Any, options: Any) -> bool | None:
    """Whether `compile` would find it; None where Triton has changed, and looks otherwise."""
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars  # pyright: ignore[reportMissingImports]
        from triton.compiler import make_backend  # pyright: ignore[reportMissingImports]
        from triton.runtime.cache import get_cache_key, get_cache_manager  # pyright: ignore[reportMissingImports]

        backend = make_backend(target)
        chosen = backend.parse_options(dict(options or {}, **src.parse_options()))
        key = get_cache_key(src, backend, chosen, env_vars=get_cache_invalidating_env_vars())
        name = f"{src.name[:150]}.json"
        return name in (get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name) or {})
    except Exception:
        return None


# --- the process ---------------------------------------------------------------------------------------------


def _serve() -> None:
    """Read jobs until there are no more, and answer each; what compilers print goes to the errors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the program, which ends this
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    sys.path[:] = pickle.load(jobs)
    with suppress(Exception):  # a job will fail
        importlib.import_module("triton.compiler")
        _compile_c_quickly(importlib.import_module("triton.runtime.build"))
    while True:
        try:
            packages, key, *job = pickle.load(jobs)
        except EOFError:
            return
        for name in packages.keys() - sys.modules.keys():  # only their files: what they import is not needed
            sys.modules[name] = package = types.ModuleType(name)
            package.__path__ = packages[name]
        if key is not None:
            with suppress(ImportError):
                vars(importlib.import_module("triton.runtime.cache"))["triton_key"] = lambda key=key: key
        try:
            answers.write(DONE if _done(*job) else FAILED)
        except BrokenPipeError:  # the program is gone
            return


def _compile_c_quickly(build: Any) -> None:
    """Not optimized: what launches a kernel is a page of C, and gcc would need three times as long for it."""

    def check_call(command: list[str], **options: Any) -> int:
        return subprocess.check_call(["-O0" if word == "-O3" else word for word in command], **options)

    build.subprocess = types.SimpleNamespace(**vars(subprocess) | {"check_call": check_call})


def _done(module: str, name: str, signature: Any, constants: Any, attrs: Any, target: Any, options: Any) -> bool:
    try:
        compiler = importlib.import_module("triton.compiler")
        kernel = getattr(importlib.import_module(module), name)
        found = compiler.compile(
            compiler.ASTSource(kernel, signature, constants, attrs), target=target, options=options
        )
    except Exception:  # whoever asked will see it
        return False
    with suppress(Exception):  # what launches it, which the C compiler makes; of Triton's for NVIDIA
        importlib.import_module("triton.backends.nvidia.driver").CudaLauncher(found.src, found.metadata)
    return True


if __name__ == "__main__":
    _serve()
