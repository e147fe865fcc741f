"""Kernels that are compiled before they are launched, all at once.

Triton compiles a kernel when it is first launched: for every combination of types, flags and divisible numbers, half a
second of compiler and C compiler, one after the other. Under `listing` launches are not made, but handed to threads
that have compiled what they would run, by processes (`compile_processes`); their tensors are on the device "meta" and
have no data. Whoever then launches such a kernel waits for it (`Awaited`). A kernel that was not listed, or could not
be compiled here, is compiled at its launch, as ever. What Triton does once a process, before it compiles anything,
takes a second and can begin sooner (`prepare`).
"""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerwise.optim.cuda.triton import cache_key, compile_processes

ALIGNED = 16
"""What addresses and integers are a multiple of, or not: Triton compiles a kernel for each case."""
_STATE = threading.local()
MOST_AT_A_TIME = 16
"""Compilations; at most as many as this process' share of the cores, where others of a training are on this machine."""


def _at_a_time() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # a container's share: microseconds of each period, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, int(quota) // int(period))
    with suppress(ValueError):
        cores //= int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return min(max(cores, 1), MOST_AT_A_TIME)


_LOADING = threading.Lock()
"""Held by the thread that reads a kernel's text, looks for it in Triton's cache and loads it, all of which is Python's
work: several at once would only take the interpreter's lock from each other, and from the program. So those that are
listed first are there first."""
_SLOTS = threading.BoundedSemaphore(_at_a_time())
_PREPARING: dict[torch.device, list[threading.Thread]] = {}
_IS_NEW = threading.Event()
"""Set where no key is remembered: the cache is probably empty, and processes that compile begin before there is a
kernel for them."""
_LOCK = threading.RLock()
"""Of this module's tables."""
_KNOWN: set[Hashable] = set()
"""What has been compiled, or is being."""
_UNDONE: list[None] = []
"""One for each thread that has not compiled its kernel yet."""
_THREADS: dict[str, list[threading.Thread]] = {}
"""Those that compile, by the kernel's name, until a launch finds that they have ended."""


@contextmanager
def listing(device: torch.device) -> Iterator[None]:
    """Launches in this thread compile for this device, in the background, and run nothing."""
    prepare(device)
    if _IS_NEW.is_set():
        _IS_NEW.clear()
        _begin_to_prepare(device, lambda: compile_processes.begin(_at_a_time()))
    _STATE.device = device
    try:
        yield
    finally:
        _STATE.device = None
        if not _UNDONE:  # nothing was listed that is not known
            for thread in _PREPARING[device]:
                thread.join()
            compile_processes.end()


def launched(module: Any) -> Any:
    """A module of kernels as it is to be used now: as it is, unless launches are listed, or some have to wait."""
    device = getattr(_STATE, "device", None)
    if device is not None:
        return Listed(module, device)
    return Awaited(module) if _THREADS else module


def wait(name: str | None = None) -> None:
    """Until all variants of a kernel that were listed are compiled, or of all kernels."""
    for key in [*_THREADS] if name is None else [name]:
        for thread in _THREADS.get(key, ()):
            thread.join()
    with _LOCK:
        for key in [key for key, threads in _THREADS.items() if not any(thread.is_alive() for thread in threads)]:
            del _THREADS[key]


class Awaited:
    """A module of kernels of which some are being compiled."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        wait(name)
        return getattr(self._module, name)


class Listed:
    """A module of kernels whose launches are only listed."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device

    def __getattr__(self, name: str) -> Any:
        begin = partial(_begin, name, getattr(self._module, name), self._device)
        return defaultdict(lambda: begin)  # whatever the grid is


def _begin(name: str, kernel: Any, device: torch.device, *args: Any, **options: Any) -> None:
    """Compile what a launch with these arguments would run, unless it is known."""
    told = ("do_not_specialize", "do_not_specialize_on_alignment")
    fixed = [[getattr(param, what, False) for what in told] for param in kernel.params]
    kinds = [_kind(arg, *how) for arg, how in zip(args, fixed, strict=False)]
    key = (name, kernel.fn.__module__, device, *kinds, *sorted((k, str(v)) for k, v in options.items()))
    with _LOCK:
        if key in _KNOWN:
            return
        _KNOWN.add(key)
        # No daemon: a compiler that runs while the interpreter is taken down may crash.
        thread = threading.Thread(target=_in_turn, args=(kernel, args, options, device), name=f"compile {name}")
        thread.start()  # raises where there may be no more threads: the launch then compiles
        _UNDONE.append(None)
        _THREADS.setdefault(name, []).append(thread)


def _kind(arg: Any, varies: bool, anywhere: bool) -> Hashable:
    """What Triton tells arguments apart by: not all numbers where they vary, nor where tensors begin that may begin
    anywhere."""
    if isinstance(arg, tuple):
        return tuple(_kind(x, varies, anywhere) for x in arg)
    if isinstance(arg, Tensor):
        return arg.dtype, anywhere or arg.data_ptr() % ALIGNED == 0
    if isinstance(arg, int) and not isinstance(arg, bool):
        return -(2**31) <= arg < 2**31, not varies and arg == 1, not varies and arg % ALIGNED == 0
    return type(arg)


def _in_turn(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], device: torch.device) -> None:
    """What a thread does; the last one ends the processes."""
    try:
        with _SLOTS:
            _compile(kernel, args, options, device)
    finally:
        with _LOCK:
            _UNDONE.pop()
            last = not _UNDONE
        if last:
            compile_processes.end()


def _compile(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], device: torch.device) -> None:
    if not threading.main_thread().is_alive():  # the program has ended
        return
    try:
        for thread in _PREPARING.get(device, ()):
            thread.join()
        with torch.cuda.device(device):
            with _LOADING, compile_processes.asked(_LOADING):
                _ = kernel.device_caches[torch.cuda.current_device()]  # which two threads would make twice
                if hasattr(kernel, "compile") and not hasattr(kernel.compile, "of"):
                    kernel.compile = compile_processes.in_processes(kernel.compile)
                compiled = kernel.warmup(*args, grid=(1,), **options)
                if compile_processes.may_begin():  # which have compiled what launches it, too
                    _ = compiled.run
            _ = compiled.run  # what launches it, which the C compiler makes, and the code on the device
    except Exception:  # the launch will say what is wrong
        return


def prepare(device: torch.device) -> None:
    """Begin what Triton does once a process, for all kernels: thirty threads that compile would each do it again."""
    with _LOCK:
        if device in _PREPARING:
            return
        _PREPARING[device] = []
        _begin_to_prepare(device, lambda: _load_driver(device))
        if not cache_key.recall():
            if cache_key.may_remember():
                _IS_NEW.set()
            _begin_to_prepare(device, cache_key.remember)


def _begin_to_prepare(device: torch.device, task: Callable[[], None]) -> None:
    thread = threading.Thread(target=task, name="prepare to compile")
    with suppress(RuntimeError):  # no more threads: whoever compiles first does it
        thread.start()
        _PREPARING[device].append(thread)


def _load_driver(device: torch.device) -> None:
    """What asks the device, which the C compiler makes if it is not in the cache."""
    with suppress(Exception), torch.cuda.device(device):  # a launch will say what is wrong
        from triton.runtime.driver import driver  # pyright: ignore[reportMissingImports]

        _ = driver.active.get_current_target(), driver.active.utils
