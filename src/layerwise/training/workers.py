"""A `map` over processes of this machine, which may share one GPU: for searches whose trials wait for the host."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import multiprocessing

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@contextmanager
def workers(count: int, threads: int = 1) -> Iterator[Map]:
    """Python's own `map` for one worker; for more, that of a pool of fresh processes, which ends with the block.

    Functions and items must be picklable. Tensors among them are shared, not copied, whether of the host or of a GPU.

    >>> with workers(1) as over:
    ...     list(over(abs, [-1, 2]))
    [1, 2]
    """
    if count == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")  # never forked: torch has threads
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(_settings(threads),))
    try:
        yield pool.map
    except BaseException:
        running = list((pool._processes or {}).values())  # the public way came only with Python 3.14
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()
        raise
    pool.shutdown()


def _settings(threads: int) -> tuple[int, str]:
    return threads, torch.get_float32_matmul_precision()


def _begin(settings: tuple[int, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is answered by who waits for the results
    threading.Thread(target=_die_with_parent, daemon=True).start()
    threads, precision = settings
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
