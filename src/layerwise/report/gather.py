"""From files of records to what the pages say: which runs there are, what was declared of them, how claims ended.

Nothing here stops at the first trouble: a file that cannot be read, a claim or a figure that fails is said on the page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerwise.experiments.experiment import PRESETS, Experiment, seeds_of
from layerwise.experiments.figures import Figure
from layerwise.experiments.records import RecordFile
from layerwise.experiments.results import Judged as Judged
from layerwise.experiments.results import Result, results
from layerwise.foundations.errors import InputError, LayerwiseError, describe

MOST = 5
"""Damaged lines of a file that a page names one by one."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One file of records: an experiment under one configuration."""

    result: Result
    figures: tuple[Figure, ...]
    expected: int
    """Cells and seeds that the configuration asks for."""
    done: int
    """Those of them that are recorded."""
    notes: tuple[str, ...]

    @property
    def experiment(self) -> Experiment:
        """What was run."""
        return self.result.experiment

    @property
    def preset(self) -> str:
        """What the configuration was made from."""
        return self.result.preset

    @property
    def config(self) -> Any:
        """The configuration of the last session."""
        return self.result.config

    @property
    def recorded(self) -> RecordFile:
        """What the file holds."""
        return self.result.recorded

    @property
    def claims(self) -> tuple[Judged, ...]:
        """Every claim, judged where that was possible."""
        return self.result.judged

    @property
    def name(self) -> str:
        """What the file is called, such as "paper-1f2e3d4c"."""
        return self.recorded.path.stem

    @property
    def manifest(self) -> Mapping[str, Any]:
        """What opened the last session."""
        return self.recorded.manifests[-1]


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """An experiment with all its runs, the most demanding preset first."""

    experiment: Experiment
    runs: tuple[Run, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _Sheaf:
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def gather(folder: Path, experiments: Sequence[Experiment]) -> tuple[list[Chapter], list[str]]:
    """Every experiment with its runs, and notes on files that belong to none of them."""
    if folder.exists() and not folder.is_dir():
        raise InputError(describe(f"{folder}, which is a file", "a folder of records", "pass the folder itself"))
    known = {experiment.name: experiment for experiment in experiments}
    sheaves = {name: _Sheaf() for name in known}
    strays: list[str] = []
    if not folder.is_dir():
        strays.append(f"There is no folder {folder.name} yet: nothing has been run.")
    found = results(folder, experiments)
    for result in found.results:
        sheaves[result.experiment.name].runs.append(_run(result))
    for path, trouble in found.troubles.items():
        sheaf = sheaves.get(path.parent.name)
        (sheaf.notes if sheaf else strays).append(
            f"{_short(path)} is left out: {trouble.replace(str(path), path.name)}"
        )
    strays += [text.replace(str(path), _short(path)) for path, text in found.strangers.items()]
    chapters = []
    for name, sheaf in sheaves.items():
        sheaf.runs.sort(key=lambda run: str(run.manifest.get("time")), reverse=True)
        sheaf.runs.sort(key=lambda run: -PRESETS.index(run.preset) if run.preset in PRESETS else 0)
        chapters.append(Chapter(experiment=known[name], runs=tuple(sheaf.runs), notes=tuple(sheaf.notes)))
    return chapters, strays


def _run(result: Result) -> Run:
    """A judged run with its figures, how far it is, and what is odd about it."""
    recorded, path = result.recorded, result.recorded.path
    notes = [note.replace(str(path), path.name) for note in recorded.notes[:MOST]]
    if len(recorded.notes) > MOST:
        notes.append(f"… and {len(recorded.notes) - MOST} more lines of {path.name} like these.")
    notes += result.repeats
    try:
        figures = tuple(result.experiment.figures(result.config, recorded.records))
    except Exception as error:  # a figure may ask for a cell that is not there yet
        said = str(error) if isinstance(error, LayerwiseError) else f"{type(error).__name__}: {error}"
        figures = ()
        notes.append(f"The figures could not be made from these records: {said}")
    seeds = recorded.manifests[-1].get("seeds") or seeds_of(result.config)
    asked = {(cell.key, seed) for cell in result.experiment.cells(result.config) for seed in seeds}
    return Run(
        result=result,
        figures=figures,
        expected=len(asked),
        done=len(asked & recorded.finished()),
        notes=tuple(notes),
    )


def _short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
