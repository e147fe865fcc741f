"""Engines: where the cells of an experiment run.

| engine | one task is | what is bit-exact on CPU |
|---|---|---|
| batched | a cell with all its missing seeds, in this process | a seed, on the same machine, number of threads and version of torch; also whatever seeds run beside it, if the experiment keeps its promise (`Experiment.run`) |
| processes | one seed of one cell (a whole cell, where its seeds share work: `Experiment.whole_cells`), in a pool of processes on this machine | the same; every worker uses `threads` threads, so it may differ from batched in the last digit |
| ray | the same, on a Ray cluster | the same on machines of one kind |

An engine yields results as they come; the runner alone writes records. If the runner dies, local workers die with it.
"""  # noqa: E501

import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.experiment import Experiment
from layerwise.experiments.processes import run_in_processes
from layerwise.experiments.ray_cluster import require_ray, run_on_ray
from layerwise.experiments.tasks import Finished, Task, run_cell
from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown

ENGINES = ("batched", "processes", "ray")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs."""

    name: str = "batched"
    workers: int | None = None
    """Processes of the engine `processes`; None for one a core."""
    threads: int | None = None
    """Threads of each worker; None shares the cores among them."""
    address: str | None = None
    """A Ray cluster that exists, such as "auto" or "ray://head:10001"; None starts one on this machine."""

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise NameLookupError(unknown("engine", self.name, ENGINES))
        for field in ("workers", "threads"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InputError(describe(f"{field}={value}", "a number ≥ 1", f"leave out --{field}"))
        if self.address is not None and self.name != "ray":
            raise InputError(describe(f"an address and engine={self.name!r}", 'engine="ray"', "pass --engine ray"))

    def check_packages(self) -> None:
        """Raise an error with the command to type if the engine's package is missing, before anything is written."""
        if self.name == "ray":
            require_ray()

    def crew(self) -> tuple[int, int]:
        """How many workers, and threads of each."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = self.workers or cores
        return workers, self.threads or max(1, cores // workers)


def run_tasks(
    experiment: Experiment, config: Any, tasks: Sequence[Task], options: EngineOptions, scratch: str | None = None
) -> Generator[Finished, None, None]:
    """Run the seeds of cells and yield each as it is finished; cells on this machine may keep things in `scratch`."""
    if not tasks:
        return
    workers, threads = options.crew()
    if options.name == "processes":
        yield from run_in_processes(experiment, config, tasks, workers, threads, scratch)
    elif options.name == "ray":
        yield from run_on_ray(experiment, config, tasks, options.address, options.threads or 1)
    else:
        for cell, seeds in tasks:
            yield from run_cell(experiment, config, cell, seeds, scratch)
