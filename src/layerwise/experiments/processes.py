"""The engine `processes`: a pool of processes on this machine, which die with the runner."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

from layerwise.experiments.experiment import Experiment
from layerwise.experiments.tasks import CellError, Finished, Task, pieces, reachable, run_seeds, taken
from layerwise.foundations.errors import describe


def run_in_processes(
    experiment: Experiment, config: Any, tasks: Sequence[Task], workers: int, threads: int, scratch: str | None = None
) -> Generator[Finished, None, None]:
    """Single seeds, or whole cells, in fresh processes of this machine (spawned, never forked: torch has threads)."""
    reference = reachable(experiment, "processes")
    parts = pieces(experiment, tasks)
    pool = ProcessPoolExecutor(
        max_workers=min(workers, len(parts)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(threads,),
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


def _begin_worker(threads: int) -> None:
    import torch  # in the worker alone

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's to answer
    torch.set_num_threads(threads)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
