"""Results: recorded runs together with what was declared: the experiment, its configuration and its claims, judged.

This is the one place that turns records into verdicts; the command line and the report show what it finds. A file of
records names the module of its experiment, but no module is ever imported because a file names it: files are judged by
the experiments of the catalog, and by those that the caller hands over.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerwise.experiments import catalog
from layerwise.experiments.claims import NOT_ENOUGH, Claim, Verdict, judge
from layerwise.experiments.experiment import PRESETS, Experiment, Record, restore
from layerwise.experiments.records import RecordFile, files, read
from layerwise.foundations.errors import InputError, LayerwiseError, describe, unknown

OURS = "layerwise.experiments."
REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[\w.]*")
"""A source that can be typed as it stands; a file may hold any text there."""


class StrangerError(InputError):
    """Records of an experiment that is not part of layerwise and that nobody asked for."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A claim with its verdict, or with the reason why there is none."""

    claim: Claim
    verdict: Verdict | None = None
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One file of records, read and judged."""

    experiment: Experiment
    config: Any
    preset: str
    recorded: RecordFile
    judged: tuple[Judged, ...]
    """Every claim that is made, in order."""
    repeats: tuple[str, ...] = ()
    """Seeds of a random cell that agree bit by bit, in words."""

    @property
    def records(self) -> tuple[Record, ...]:
        """One a finished cell and seed."""
        return self.recorded.records

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Those that could be judged."""
        return tuple(one.claim for one in self.judged if one.verdict is not None)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One a claim of `claims`, in the same order."""
        return tuple(one.verdict for one in self.judged if one.verdict is not None)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Claims that could not be judged, in words."""
        return tuple(f"{self.recorded.path}: {one.trouble}" for one in self.judged if one.verdict is None)

    def state(self) -> str:
        """The claims in a few words, such as ``6 of 7 as expected``."""
        if not self.judged:
            return f"no claims are made of preset {self.preset}" + (", equal seeds" if self.repeats else "")
        good = sum(verdict.as_expected is True for verdict in self.verdicts)
        lacking = sum(verdict.status == NOT_ENOUGH for verdict in self.verdicts)
        return (
            f"{good} of {len(self.judged)} as expected"
            + (f", {lacking} not enough runs" if lacking else "")
            + (f", {len(self.troubles)} not judged" if self.troubles else "")
            + (", equal seeds" if self.repeats else "")
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a folder of records holds."""

    results: tuple[Result, ...]
    """Sorted by experiment and preset."""
    troubles: Mapping[Path, str]
    """Files that could not be judged, in words."""
    strangers: Mapping[Path, str]
    """Files of experiments that are not part of layerwise and that were not asked for, in words."""


def judge_all(experiment: Experiment, config: Any, preset: str, recorded: RecordFile) -> Result:
    """Judge every claim that an experiment makes of a configuration."""
    return Result(
        experiment=experiment,
        config=config,
        preset=preset,
        recorded=recorded,
        judged=tuple(_judged(claim, recorded) for claim in experiment.claims(config)),
        repeats=tuple(repeats(experiment, config, recorded.records)),
    )


def _judged(claim: Claim, recorded: RecordFile) -> Judged:
    try:
        return Judged(claim=claim, verdict=judge(claim, recorded.records))
    except LayerwiseError as error:
        return Judged(claim=claim, trouble=str(error))


# --- Seeds that agree -----------------------------------------------------------------------------------------


def repeats(experiment: Experiment, config: Any, records: Sequence[Record]) -> Iterator[str]:
    """A sentence for every random cell in which seeds gave the same values and series, bit by bit."""
    fixed = {cell.key for cell in experiment.cells(config) if not cell.random}
    alike: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["cell"] not in fixed and _says_something(record):
            alike.setdefault((record["cell"], _exact(record["values"])), []).append(record)
    for (cell, _), group in alike.items():
        if len(group) == 1:
            continue
        by_series: dict[str, list[int]] = {}  # compared only where the few values agree: curves are long
        for record in group:
            by_series.setdefault(_exact(record["series"]), []).append(record["seed"])
        for seeds in by_series.values():
            if len(seeds) > 1:
                yield f"{cell}: seeds {_listed(sorted(seeds))} gave bitwise equal results: is the seed used?"


def _says_something(record: Record) -> bool:
    """Whether a row has anything by which seeds could differ; runs that diverged leave ∞, NaN and their number."""
    numbers = [value for value in record["values"].values() if isinstance(value, float)]
    if record["values"] and all(map(math.isfinite, numbers)):
        return True
    curves = [value for column in record["series"].values() for value in column if isinstance(value, float)]
    return any(map(math.isfinite, curves))


def _exact(values: Mapping[str, Any]) -> str:
    """Equal texts for equal bits: Python writes a float so that it is read back exactly, −0.0 and NaN included."""
    return repr(sorted(values.items()))


def _listed(seeds: Sequence[int], most: int = 10) -> str:
    """The seeds in words.

    >>> _listed([0, 1, 4])
    '0, 1 and 4'
    """
    if len(seeds) > most:
        return f"{', '.join(map(str, seeds[:most]))} and {len(seeds) - most} more"
    return f"{', '.join(map(str, seeds[:-1]))} and {seeds[-1]}"


# --- From files -----------------------------------------------------------------------------------------------


def load(path: Path, experiments: Sequence[Experiment] | None = None) -> Result:
    """Read a file of records and judge its claims, under the configuration of its last session.

    Args:
        path: the file.
        experiments: those that may be meant, by their name; None for the catalog.
    """
    recorded = read(path)
    if not recorded.manifests:
        raise InputError(
            describe(
                f"{path}, which has no manifest that can be read",
                "a file made by `layerwise run`",
                f"run the experiment again (`layerwise run {path.parent.name}`), or move the file away",
            )
        )
    opening, line = recorded.manifests[-1], recorded.manifest_lines[-1]
    _check_manifest(opening, path, line)
    try:
        experiment = _declared(opening, path, experiments)
        config = restore(experiment.preset(opening["preset"]), opening["config"])
        return judge_all(experiment, config, opening["preset"], recorded)
    except StrangerError:
        raise
    except Exception as error:  # whatever a file holds, the others are still judged
        said = str(error) if isinstance(error, LayerwiseError) else f"{type(error).__name__}: {error}"
        raise InputError(f"{path}, line {line}: {said}") from error


def _check_manifest(opening: Record, path: Path, line: int) -> None:
    for name, kind, words in (
        ("experiment", str, "a text"),
        ("preset", str, "a text"),
        ("config", Mapping, "a mapping"),
    ):
        if not isinstance(opening.get(name), kind):
            raise InputError(
                describe(
                    f"{path}, line {line}, whose manifest has {name}={opening.get(name)!r}",
                    f"{words}, as `layerwise run` writes it",
                    "run the experiment again and move this file away",
                )
            )


def _declared(opening: Record, path: Path, experiments: Sequence[Experiment] | None) -> Experiment:
    """The experiment of a manifest, among those that are known; never by importing what the file names."""
    name, source = opening["experiment"], opening.get("source") or ""
    known = catalog.experiments() if experiments is None else {one.name: one for one in experiments}
    outside = bool(source) and not source.startswith(OURS)
    if name in known and not (outside and (catalog.reference_to(known[name]) or "").startswith(OURS)):
        return known[name]  # an experiment elsewhere may only share the name of one of ours
    if not outside:
        raise InputError(unknown("experiment", name, known))
    if not isinstance(source, str) or REFERENCE.fullmatch(source) is None:
        raise InputError(
            describe(
                f"a manifest with the source {source!r}",
                "module:ATTRIBUTE",
                "move the file away: `layerwise run` has not written it",
            )
        )
    raise StrangerError(
        f"{path} is of {source}, which is not part of layerwise; judge it with `layerwise check {source}`"
    )


def results(out: Path, experiments: Sequence[Experiment] | None = None, *, only: bool = False) -> Found:
    """All recorded runs of a folder, judged.

    Args:
        out: folder of records.
        experiments: those that may be meant; None for the catalog.
        only: leave out the files of all others.
    """
    found, troubles, strangers = [], {}, {}
    names = {one.name for one in experiments or ()} if only else {None}
    for path in [path for name in sorted(names, key=str) for path in files(out, name)]:
        if path.stat().st_size == 0:  # a run that was killed before anything happened
            continue
        try:
            found.append(load(path, experiments))
        except StrangerError as error:
            strangers[path] = str(error)
        except LayerwiseError as error:
            troubles[path] = str(error)
    found.sort(key=lambda r: (r.experiment.name, PRESETS.index(r.preset), r.recorded.path.name))
    return Found(results=tuple(found), troubles=troubles, strangers=strangers)
