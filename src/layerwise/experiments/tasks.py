"""Tasks of an engine: cells with the seeds that are to be run, and what comes back."""

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.catalog import from_reference, reference_to
from layerwise.experiments.experiment import Cell, Experiment, Row
from layerwise.experiments.scratch import scratch_in
from layerwise.foundations.errors import InputError, LayerwiseError, describe

Task = tuple[Cell, list[int]]


class CellError(LayerwiseError, RuntimeError):
    """A cell that failed while it ran; what was recorded before is kept."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One seed of one cell, run."""

    cell: Cell
    row: Row
    seconds: float

    def __str__(self) -> str:
        return f"{self.cell.key} seed {self.row.seed}"


def run_cell(
    experiment: Experiment, config: Any, cell: Cell, seeds: list[int], scratch: str | None = None
) -> Generator[Finished, None, None]:
    """Run one cell in this process; check that exactly the seeds asked for come back."""
    missing, start = dict.fromkeys(seeds), time.perf_counter()
    try:
        for row in _rows(experiment, config, cell, list(seeds), scratch):
            if row.seed not in missing:
                raise InputError(
                    describe(
                        f"a row of seed {row.seed}",
                        f"one of the seeds {list(missing)}",
                        "correct `run`",
                    )
                )
            del missing[row.seed]
            now = time.perf_counter()
            yield Finished(cell=cell, row=row, seconds=now - start)
            start = now
        if missing:
            raise InputError(describe(f"no row of the seeds {list(missing)}", "a row a seed", "correct `run`"))
    except Exception as error:
        raise CellError(
            describe(
                f"cell {cell.key!r}, seeds {list(missing)}, of {experiment.name!r}, which failed "
                f"({type(error).__name__}: {error})",
                "a row for every seed",
                "read the reason above; type the same command again to go on, all that was recorded is kept",
            )
        ) from error


def _rows(experiment: Experiment, config: Any, cell: Cell, seeds: list[int], scratch: str | None) -> Iterator[Row]:
    """Of the cell, each made while `scratch` is its folder, and not while somebody else deals with the last one."""
    rows = iter(experiment.run(config, cell, seeds))
    while True:
        with scratch_in(scratch, cell.key):
            row = next(rows, None)
        if row is None:
            return
        yield row


def run_seeds(
    reference: str, config: Any, cell: Cell, seeds: list[int], scratch: str | None = None
) -> tuple[list[Finished], CellError | None]:
    """Run seeds of a cell in a process that knows the experiment by where it is; those before an error come with it."""
    found: list[Finished] = []
    try:
        found.extend(run_cell(from_reference(reference), config, cell, seeds, scratch))
    except CellError as error:
        return found, error
    return found, None


def taken(found: tuple[list[Finished], CellError | None]) -> Generator[Finished, None, None]:
    """What `run_seeds` brought: all that is finished, then its error."""
    finished, error = found
    yield from finished
    if error is not None:
        raise error


def pieces(experiment: Experiment, tasks: Sequence[Task]) -> list[Task]:
    """What other processes are given: single seeds, or all of a cell where they share work."""
    if experiment.whole_cells:
        return list(tasks)
    return [(cell, [seed]) for cell, seeds in tasks for seed in seeds]


def reachable(experiment: Experiment, engine: str) -> str:
    """Where another process finds the experiment; an error if nowhere."""
    reference = reference_to(experiment)
    if reference is None:
        raise InputError(
            describe(
                f"engine={engine!r} and the experiment {experiment.name!r}, which no module has by a name",
                "an experiment at the top of the module of its functions",
                'assign it there, such as EXPERIMENT = Experiment(…), or use engine="batched"',
            )
        )
    return reference
