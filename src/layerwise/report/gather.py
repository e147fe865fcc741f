"""From files of records to what the pages say: which runs there are, what was declared of them, how claims ended.

Nothing here stops at the first trouble: a file that cannot be read, a claim or a figure that fails is said on the page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerwise.experiments.catalog import from_reference
from layerwise.experiments.claims import Claim, Verdict, judge
from layerwise.experiments.experiment import PRESETS, Experiment, restore, seeds_of
from layerwise.experiments.figures import Figure
from layerwise.experiments.records import Recorded, files, read
from layerwise.foundations.errors import InputError, LayerwiseError, describe

MOST = 5
"""Damaged lines of a file that a page names one by one."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A claim with its verdict, or with the reason why there is none."""

    claim: Claim
    verdict: Verdict | None = None
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One file of records: an experiment under one configuration."""

    experiment: Experiment
    preset: str
    config: Any
    recorded: Recorded
    claims: tuple[Judged, ...]
    figures: tuple[Figure, ...]
    expected: int
    """Cells and seeds that the configuration asks for."""
    done: int
    """Those of them that are recorded."""
    notes: tuple[str, ...]

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
    for path in files(folder):
        try:
            run = load(path, known)
        except Exception as error:  # a file of another version must not hide all the others
            sheaf = sheaves.get(path.parent.name)
            (sheaf.notes if sheaf else strays).append(f"{_short(path)} is left out: {_said(error)}")
            continue
        known.setdefault(run.experiment.name, run.experiment)
        sheaves.setdefault(run.experiment.name, _Sheaf()).runs.append(run)
    chapters = []
    for name, sheaf in sheaves.items():
        sheaf.runs.sort(key=lambda run: str(run.manifest.get("time")), reverse=True)
        sheaf.runs.sort(key=lambda run: -PRESETS.index(run.preset) if run.preset in PRESETS else 0)
        chapters.append(Chapter(experiment=known[name], runs=tuple(sheaf.runs), notes=tuple(sheaf.notes)))
    return chapters, strays


def load(path: Path, known: Mapping[str, Experiment]) -> Run:
    """Read one file, judge its claims and make its figures, under the configuration of its last session."""
    recorded = read(path)
    if not recorded.manifests:
        raise InputError(
            describe("no manifest that can be read", "a file made by `layerwise run`", "run the experiment again")
        )
    opening = recorded.manifests[-1]
    experiment = known.get(opening["experiment"]) or from_reference(opening.get("source") or opening["experiment"])
    config = restore(experiment.preset(opening["preset"]), opening["config"])
    asked = {(cell.key, seed) for cell in experiment.cells_of(config) for seed in seeds_of(config)}
    notes = [note.replace(str(path), path.name) for note in recorded.notes[:MOST]]
    if len(recorded.notes) > MOST:
        notes.append(f"… and {len(recorded.notes) - MOST} more lines of {path.name} like these.")
    try:
        figures = tuple(experiment.figures(config, recorded.records))
    except Exception as error:  # a figure may ask for a cell that is not there yet
        figures = ()
        notes.append(f"The figures could not be made from these records: {_said(error)}")
    return Run(
        experiment=experiment,
        preset=opening["preset"],
        config=config,
        recorded=recorded,
        claims=tuple(_judged(claim, recorded) for claim in experiment.claims(config)),
        figures=figures,
        expected=len(asked),
        done=len(asked & recorded.finished()),
        notes=tuple(notes),
    )


def _judged(claim: Claim, recorded: Recorded) -> Judged:
    try:
        return Judged(claim=claim, verdict=judge(claim, recorded.records))
    except LayerwiseError as error:
        return Judged(claim=claim, trouble=str(error))


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, LayerwiseError) else f"{type(error).__name__}: {error}"


def _short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
