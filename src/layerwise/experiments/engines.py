"""Engines: where the cells of an experiment run.

| engine | one task is | what is bit-exact on CPU |
|---|---|---|
| batched | a cell with all its missing seeds, in this process | a seed, on the same machine, number of threads and version of torch; also whatever seeds run beside it, if the experiment keeps its promise (`Experiment.run`) |
| processes | one seed of one cell (a whole cell, where its seeds share work: `Experiment.whole_cells`), in a pool of processes on this machine | the same; every worker uses `threads` threads, so it may differ from batched in the last digit |
| ray | the same, on a Ray cluster | the same on machines of one kind |

An engine yields results as they come; the runner alone writes records. If the runner dies, local workers die with it.
A worker of a Ray cluster that dies has its task run again, elsewhere if need be; one of a pool ends the run, which the
same command takes up again.
"""  # noqa: E501

import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.experiment import Experiment
from layerwise.experiments.processes import run_in_processes, visible_gpus
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
    per_device: int | None = None
    """Tasks that share a GPU, each of which sees that one alone, as "cuda"; None leaves all GPUs to every task."""

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise NameLookupError(unknown("engine", self.name, ENGINES))
        for field in ("workers", "threads", "per_device"):
            value = getattr(self, field)
            if value is not None and value < 1:
                option = field.replace("_", "-")
                raise InputError(describe(f"{field}={value}", "a number ≥ 1", f"leave out --{option}"))
        if self.address is not None and self.name != "ray":
            raise InputError(describe(f"an address and engine={self.name!r}", 'engine="ray"', "pass --engine ray"))
        if self.per_device is not None and self.name == "batched":
            given, expected = "per_device and engine='batched'", 'engine="processes" or "ray", which have several tasks'
            raise InputError(describe(given, expected, "pass --engine processes"))

    def check_packages(self) -> None:
        """Raise an error that says what to do if the engine's package or its GPU is missing, before anything is
        written."""
        if self.name == "ray":
            require_ray()
        elif self.per_device is not None:
            visible_gpus()

    def crew(self, devices: int = 0) -> tuple[int, int]:
        """How many workers, where they share so many GPUs or none, and threads of each."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = self.workers or cores
        if devices and self.per_device is not None:
            places = devices * self.per_device
            workers = min(self.workers or places, places)
        return workers, self.threads or max(1, cores // workers)


def run_tasks(
    experiment: Experiment, config: Any, tasks: Sequence[Task], options: EngineOptions, scratch: str | None = None
) -> Generator[Finished, None, None]:
    """Run the seeds of cells and yield each as it is finished; cells on this machine may keep things in `scratch`."""
    if not tasks:
        return
    if options.name == "processes":
        devices = [] if options.per_device is None else visible_gpus()
        workers, threads = options.crew(len(devices))
        yield from run_in_processes(experiment, config, tasks, workers, threads, scratch, devices)
    elif options.name == "ray":
        yield from run_on_ray(experiment, config, tasks, options.address, options.threads or 1, options.per_device)
    else:
        for cell, seeds in tasks:
            yield from run_cell(experiment, config, cell, seeds, scratch)
