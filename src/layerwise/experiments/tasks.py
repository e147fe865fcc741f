"""Tasks of an engine: cells with the seeds that are to be run, and what comes back."""

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.catalog import from_reference, reference_to
from layerwise.experiments.experiment import Cell, Experiment, Row
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


def run_cell(experiment: Experiment, config: Any, cell: Cell, seeds: list[int]) -> Generator[Finished, None, None]:
    """Run one cell in this process; check that exactly the seeds asked for come back."""
    missing, start = dict.fromkeys(seeds), time.perf_counter()
    try:
        for row in experiment.run(config, cell, list(seeds)):
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


def run_seed(reference: str, config: Any, cell: Cell, seed: int) -> Finished:
    """Run one seed of a cell in a process that knows the experiment by where it is."""
    (finished,) = run_cell(from_reference(reference), config, cell, [seed])
    return finished


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
