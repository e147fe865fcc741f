"""The runner: what is missing is run, and every result is recorded the moment it is there."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerwise.experiments.catalog import find, reference_to
from layerwise.experiments.engines import EngineOptions, run_tasks
from layerwise.experiments.experiment import Cell, Experiment, digest, seeds_of
from layerwise.experiments.manifest import code_version, manifest
from layerwise.experiments.progress import shown_within
from layerwise.experiments.records import OUT as OUT
from layerwise.experiments.records import Journal, RecordFile, path_of, read
from layerwise.experiments.scratch import folder_of
from layerwise.experiments.shards import Shard, merge
from layerwise.experiments.tasks import Finished, Task
from layerwise.foundations.progress import Progress, resolve


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a call of `run` did."""

    recorded: RecordFile
    """All that the file holds now."""
    new: int
    """Cells and seeds that were run and recorded by this call."""
    kept: int
    """Those that had been recorded before."""
    missing: int
    """Those still to do; more than 0 only after an interruption."""
    interrupted: bool
    notes: tuple[str, ...]
    """Damaged lines that were found, and records of another version that were kept."""


def run(
    experiment: Experiment | str,
    config: Any = None,
    *,
    preset: str = "laptop",
    first_seed: int = 0,
    engine: EngineOptions | str = "batched",
    out: Path | str = OUT,
    progress: bool | Progress | None = False,
    shard: Shard | None = None,
) -> Outcome:
    """Run what an experiment's records lack; call it again after anything went wrong, and it goes on from there.

    Args:
        experiment: an experiment or its name.
        config: a configuration made from the preset's; None for the preset as it is.
        preset: names the file, together with the configuration.
        first_seed: the first of the seeds that are run; claims are judged on all that the file has, so that fresh
            seeds alone want another folder.
        engine: "batched", "processes", "ray", or options of one.
        out: folder of all records.
        progress: as everywhere in the library; items are `Finished`.
        shard: run one of several shares, into a file of its own; `layerwise.experiments.shards.merge` joins them.

    Returns:
        What the file holds now. Ctrl-C ends the call early with ``interrupted=True``; nothing finished is lost.
    """
    if isinstance(experiment, str):
        experiment = find(experiment)
    standard = experiment.preset(preset)
    config = standard if config is None else config
    options = EngineOptions(name=engine) if isinstance(engine, str) else engine
    options.check_packages()
    experiment.refuse_bad(config, here=options.address is None)
    cells, seeds = experiment.cells_of(config), seeds_of(config, first_seed)
    path = path_of(Path(out), experiment.name, preset, digest(experiment.name, config))
    interrupted, everything = False, [(cell, list(seeds)) for cell in cells]
    if shard is None:
        merge(path)
    else:
        path, everything = shard.path(path), shard.of(everything)
    with Journal(path) as journal:
        before = read(path)  # under the lock, so that nobody adds to it meanwhile
        tasks = unfinished(everything, before)
        total = _count(tasks)
        try:
            if tasks:
                about = {"name": options.name, "workers": options.workers, "threads": options.threads}
                about |= {} if options.per_device is None else {"per_device": options.per_device}
                journal.append([manifest(experiment, reference_to(experiment), config, preset, seeds, about)])
            shown = resolve(progress)
            results = run_tasks(experiment, config, tasks, options, str(folder_of(path)))
            with shown_within(shown), closing(results):
                for finished in shown.track(results, experiment.name, total):
                    journal.append([_record(finished, preset, path)])
        except KeyboardInterrupt:
            interrupted = True
        except Exception:
            if not (before.manifests or before.records or before.notes) and not read(path).records:
                journal.discard()  # a setting that fails at once is not a run
            raise
        if not missing_tasks(cells, _asked_for(read(path)), read(path)):
            shutil.rmtree(folder_of(path), ignore_errors=True)
    after = read(path)
    missing = _count(unfinished(everything, after))
    return Outcome(
        recorded=after,
        new=total - missing,
        kept=_count(everything) - total,
        missing=missing,
        interrupted=interrupted,
        notes=(*before.notes, *_other_versions(before)),
    )


def _asked_for(recorded: RecordFile) -> list[int]:
    """Seeds of all sessions: what one of them left unfinished another may go on with."""
    return sorted({seed for session in recorded.manifests for seed in session["seeds"]})


def missing_tasks(cells: Sequence[Cell], seeds: Sequence[int], recorded: RecordFile) -> list[Task]:
    """Cells with the seeds that no record has."""
    return unfinished([(cell, list(seeds)) for cell in cells], recorded)


def unfinished(tasks: Sequence[Task], recorded: RecordFile) -> list[Task]:
    """What is left of some tasks."""
    finished = recorded.finished()
    lacking = [(cell, [seed for seed in seeds if (cell.key, seed) not in finished]) for cell, seeds in tasks]
    return [(cell, missing) for cell, missing in lacking if missing]


def _count(tasks: Sequence[Task]) -> int:
    return sum(len(seeds) for _, seeds in tasks)


def _record(finished: Finished, preset: str, path: Path) -> dict[str, Any]:
    return {
        "cell": finished.cell.key,
        "seed": finished.row.seed,
        "preset": preset,
        "digest": path.stem.rpartition("-")[2],
        "options": finished.cell.options,
        "values": finished.row.values,
        "series": finished.row.series,
        "seconds": round(finished.seconds, 4),
    }


def _other_versions(recorded: RecordFile) -> list[str]:
    now = code_version()
    others = {
        f"{then.get('version')}{' at ' + str(then['commit'])[:10] if then.get('commit') else ''}"
        for then in (entry.get("code") for entry in recorded.manifests)
        if isinstance(then, Mapping) and (then.get("version"), then.get("commit")) != (now["version"], now["commit"])
    }
    if not others or not recorded.records:
        return []
    return [
        f"{recorded.path} has records of another version of the code ({', '.join(sorted(others))}), which are kept; "
        "move the file away to run everything again"
    ]
