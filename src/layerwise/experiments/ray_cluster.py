"""The engine `ray`: tasks on a Ray cluster, one that exists or one on this machine (extra `ray`)."""

import os
import sys
from collections.abc import Generator, Sequence
from typing import Any

from layerwise.experiments.experiment import Cell, Experiment
from layerwise.experiments.tasks import CellError, Finished, Task, reachable, run_seed
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.optional import require


def run_on_ray(
    experiment: Experiment, config: Any, tasks: Sequence[Task], address: str | None, threads: int
) -> Generator[Finished, None, None]:
    """Single seeds as tasks of a Ray cluster; the experiment's module must be importable on its machines."""
    ray = require_ray()
    reference = reachable(experiment, "ray")
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(log_to_driver=False, **_cluster(address))
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(
                describe(
                    f"address={address!r}, where no Ray cluster answers ({error})",
                    "the address of a cluster",
                    "start one with `ray start --head`, or leave out --address",
                )
            ) from error
    try:
        remote = ray.remote(num_cpus=threads)(_run_seed)
        waiting = [remote.remote(reference, config, cell, seed, threads) for cell, seeds in tasks for seed in seeds]
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            try:
                yield ray.get(done[0])
            except ray.exceptions.RayError as error:
                raise _failure(error, reference) from error
    finally:
        if ours:
            ray.shutdown()


def _cluster(address: str | None) -> dict[str, Any]:
    """A cluster that exists, or one on this machine whose workers find the same modules as we do."""
    if address:
        return {"address": address}
    path = os.pathsep.join(folder for folder in sys.path if folder)
    return {"include_dashboard": False, "runtime_env": {"env_vars": {"PYTHONPATH": path}}}


def _failure(error: Exception, reference: str) -> CellError:
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, CellError):
        return CellError(str(cause))
    reason = str(cause).strip().splitlines()
    return CellError(
        describe(
            f"a task that failed on the Ray cluster ({reason[0] if reason else type(cause).__name__})",
            f"machines where {reference.partition(':')[0]} and layerwise can be imported",
            "install both there; type the same command again to go on, all that was recorded is kept",
        )
    )


def require_ray() -> Any:
    """The package, or an error with the command to type."""
    return require("ray", "ray", "the engine `ray`", extra="ray")


def _run_seed(reference: str, config: Any, cell: Cell, seed: int, threads: int) -> Finished:
    import torch  # in the worker alone

    torch.set_num_threads(threads)
    return run_seed(reference, config, cell, seed)
