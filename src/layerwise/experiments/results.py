"""Results: recorded runs together with what was declared: the experiment, its configuration and its claims, judged."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerwise.experiments import catalog
from layerwise.experiments.claims import NOT_ENOUGH, Claim, Verdict, judge
from layerwise.experiments.experiment import PRESETS, Experiment, Record, restore
from layerwise.experiments.records import Recorded, files, read
from layerwise.foundations.errors import InputError, LayerwiseError, describe


@dataclass(frozen=True, kw_only=True)
class Result:
    """One file of records, read and judged."""

    experiment: Experiment
    config: Any
    preset: str
    recorded: Recorded
    claims: tuple[Claim, ...]
    verdicts: tuple[Verdict, ...]
    """One a claim, in the same order."""

    @property
    def records(self) -> tuple[Record, ...]:
        """One a finished cell and seed."""
        return self.recorded.records

    def state(self) -> str:
        """The claims in a few words, such as ``6 of 7 as expected``."""
        good = sum(verdict.as_expected is True for verdict in self.verdicts)
        lacking = sum(verdict.status == NOT_ENOUGH for verdict in self.verdicts)
        return f"{good} of {len(self.verdicts)} as expected" + (f", {lacking} not enough runs" if lacking else "")


def judge_all(experiment: Experiment, config: Any, preset: str, recorded: Recorded) -> Result:
    """Judge every claim that an experiment makes of a configuration."""
    claims = tuple(experiment.claims(config))
    verdicts = tuple(judge(claim, recorded.records) for claim in claims)
    return Result(
        experiment=experiment, config=config, preset=preset, recorded=recorded, claims=claims, verdicts=verdicts
    )


def load(path: Path) -> Result:
    """Read a file of records and judge its claims, under the configuration of its last session."""
    recorded = read(path)
    if not recorded.manifests:
        raise InputError(
            describe(
                f"{path}, which has no manifest that can be read",
                "a file made by `layerwise run`",
                f"run the experiment again (`layerwise run {path.parent.name}`), or move the file away",
            )
        )
    opening = recorded.manifests[-1]
    try:
        experiment = _declared(opening)
        config = restore(experiment.preset(opening["preset"]), opening["config"])
        return judge_all(experiment, config, opening["preset"], recorded)
    except LayerwiseError as error:
        raise InputError(f"{path}: {error}") from error


def _declared(opening: Record) -> Experiment:
    """The experiment of a manifest: of the catalog by its name, of another module by where it was."""
    source = opening.get("source") or ""
    if source and not source.startswith("layerwise.experiments."):
        return catalog.from_reference(source)
    return catalog.find(opening["experiment"])


def results(out: Path, experiment: str | None = None) -> tuple[list[Result], list[str]]:
    """All recorded runs of a folder (or of one experiment), and in words the files that could not be judged."""
    found, troubles = [], []
    for path in files(out, experiment):
        if path.stat().st_size == 0:  # a run that was stopped before anything happened
            continue
        try:
            found.append(load(path))
        except LayerwiseError as error:
            troubles.append(str(error))
    found.sort(key=lambda r: (r.experiment.name, PRESETS.index(r.preset), r.recorded.path.name))
    return found, troubles
