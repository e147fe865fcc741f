"""The engine `ray`: tasks on a Ray cluster, one that exists or one on this machine (extra `ray`)."""

import os
import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from layerwise.experiments.experiment import Cell, Experiment
from layerwise.experiments.tasks import CellError, Finished, Task, pieces, reachable, run_seeds, taken
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.optional import require

RETRIES = 3
"""How often a task is run again whose worker or machine died; what it brings is recorded once, when it comes."""


def run_on_ray(
    experiment: Experiment,
    config: Any,
    tasks: Sequence[Task],
    address: str | None,
    threads: int,
    per_device: int | None = None,
) -> Generator[Finished, None, None]:
    """Seeds, or whole cells, as tasks of a Ray cluster, whose machines must be able to import the experiment.

    With `per_device`, so many tasks share a GPU, which Ray shows them as the only one.
    """
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
    waiting = []
    try:
        wanted = {"CPU": float(threads)} | ({} if per_device is None else {"GPU": share_of_gpu(per_device)})
        _require_room([node["Resources"] for node in ray.nodes() if node["Alive"]], wanted, grows=address is not None)
        resources = {"num_cpus": wanted["CPU"], "num_gpus": wanted.get("GPU", 0)}
        remote = ray.remote(max_retries=RETRIES, **resources)(_run_seeds)
        parts = pieces(experiment, tasks)
        waiting = [remote.remote(reference, config, cell, seeds, threads) for cell, seeds in parts]
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            try:
                yield from taken(ray.get(done[0]))
            except ray.exceptions.RayError as error:
                raise _failure(error, reference) from error
    finally:
        with suppress(ray.exceptions.RayError):
            for task in waiting:  # of a run that ends early: nobody will take what they bring
                ray.cancel(task, force=True)
        if ours:
            ray.shutdown()


def share_of_gpu(tasks: int) -> float:
    """Of each of so many tasks; Ray rounds to four places, and they must not come to more than one GPU.

    >>> share_of_gpu(6), share_of_gpu(1)
    (0.1666, 1.0)
    """
    return (10_000 // tasks) / 10_000


def _require_room(machines: Sequence[Mapping[str, float]], wanted: Mapping[str, float], grows: bool) -> None:
    """Ray waits for ever for a machine that is large enough: an error, or a warning where it may still come."""
    if any(all(machine.get(kind, 0.0) >= count for kind, count in wanted.items()) for machine in machines):
        return
    given = f"tasks that need {' and '.join(f'{count:g} {kind}' for kind, count in wanted.items())}"
    expected = "a machine of the Ray cluster that has as much"
    if grows:
        said = describe(given, f"{expected}; there is none, and they wait until one joins", "see `ray status`")
        warnings.warn(said, UserWarning, stacklevel=2)
        return
    raise InputError(describe(given, expected, "pass a smaller --threads, or leave out --per-device"))


def _cluster(address: str | None) -> dict[str, Any]:
    """A cluster that exists, or one on this machine whose workers find the same modules as we do."""
    if address:
        return {"address": address}
    path = os.pathsep.join(folder for folder in sys.path if folder)
    return {"include_dashboard": False, "runtime_env": {"env_vars": {"PYTHONPATH": path}}}


DIED = {
    "ActorDiedError",
    "ActorUnavailableError",
    "LocalRayletDiedError",
    "NodeDiedError",
    "ObjectLostError",
    "OutOfMemoryError",
    "OwnerDiedError",
    "RaySystemError",
    "WorkerCrashedError",
}
"""Errors of Ray that say of a machine or process that it is gone, by their names: these hold for all its versions."""


def _failure(error: Exception, reference: str) -> CellError:
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, CellError):
        return CellError(str(cause))
    kinds = {kind.__name__ for kind in (*type(error).__mro__, *type(cause).__mro__)}
    reason = (str(cause).strip().splitlines() or ["no reason given"])[0]
    again = "type the same command again to go on, all that was recorded is kept"
    if kinds & DIED:
        given = f"a machine or worker of the Ray cluster that died during a task ({type(cause).__name__}: {reason})"
        do = f"see with `ray status` which machines are left, and whether one ran out of memory; {again}"
        return CellError(describe(given, "machines that live until the task is done", do))
    if kinds & {"ImportError", "RuntimeEnvSetupError", "NameLookupError"}:
        given = f"a machine of the Ray cluster that cannot import what the task needs ({reason})"
        expected = f"machines where {reference.partition(':')[0]} and layerwise can be imported"
        return CellError(describe(given, expected, f"install both there; {again}"))
    given = f"a task that failed on the Ray cluster ({type(cause).__name__}: {reason})"
    return CellError(describe(given, "a row for every seed", f"read the reason above; {again}"))


def require_ray() -> Any:
    """The package, or an error with the command to type."""
    return require("ray", "ray", "the engine `ray`", extra="ray")


def _run_seeds(reference: str, config: Any, cell: Cell, seeds: list[int], threads: int) -> Any:
    import torch  # in the worker alone

    torch.set_num_threads(threads)
    return run_seeds(reference, config, cell, seeds)
