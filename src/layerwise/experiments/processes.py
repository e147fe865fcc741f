"""The engine `processes`: a pool of processes on this machine, which die with the runner."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import cycle, islice
from multiprocessing.connection import wait
from typing import Any

from layerwise.experiments.experiment import Experiment
from layerwise.experiments.tasks import CellError, Finished, Task, pieces, reachable, run_seeds, taken
from layerwise.foundations.errors import InputError, describe

VISIBLE = "CUDA_VISIBLE_DEVICES"


def run_in_processes(
    experiment: Experiment,
    config: Any,
    tasks: Sequence[Task],
    workers: int,
    threads: int,
    scratch: str | None = None,
    devices: Sequence[str] = (),
) -> Generator[Finished, None, None]:
    """Single seeds, or whole cells, in fresh processes of this machine (spawned, never forked: torch has threads).

    Of `devices`, names of GPUs, each worker sees one; they are dealt out in turn.
    """
    reference = reachable(experiment, "processes")
    parts = pieces(experiment, tasks)
    context, count = multiprocessing.get_context("spawn"), min(workers, len(parts))
    dealt = context.SimpleQueue()
    for device in islice(cycle(devices), count):
        dealt.put(device)
    pool = ProcessPoolExecutor(
        max_workers=count,
        mp_context=context,
        initializer=_begin_worker,
        initargs=(threads, dealt if devices else None),
    )
    try:
        futures = [pool.submit(run_seeds, reference, config, cell, seeds, scratch) for cell, seeds in parts]
        for future in as_completed(futures):
            yield from taken(future.result())
        pool.shutdown()
    except BrokenProcessPool as error:
        raise CellError(
            describe(
                "a worker process that died (killed, or out of memory)",
                "workers that live",
                "type the same command again to go on, perhaps with fewer --workers; all that was recorded is kept",
            )
        ) from error
    finally:
        _stop(pool)


def _stop(pool: Any) -> None:
    """End the workers now; an interrupted or failed run does not wait for tasks whose results nobody takes."""
    running = list((pool._processes or {}).values())  # the public way came only with Python 3.14
    pool.shutdown(wait=False, cancel_futures=True)
    for process in running:
        process.terminate()


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names that ``CUDA_VISIBLE_DEVICES`` has for them."""
    import torch  # only for who asks

    count, named = torch.cuda.device_count(), os.environ.get(VISIBLE)
    if not count:
        expected, do = "a GPU for them to share", "leave out --per-device, or run it where there is one"
        raise InputError(describe("tasks per device, and no GPU that torch can use", expected, do))
    return [str(k) for k in range(count)] if named is None else [name.strip() for name in named.split(",")][:count]


def _begin_worker(threads: int, dealt: Any) -> None:
    if dealt is not None:
        os.environ[VISIBLE] = dealt.get()  # before CUDA is asked for anything: it reads this once

    import torch  # in the worker alone

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's to answer
    torch.set_num_threads(threads)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
