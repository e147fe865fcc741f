"""`layerwise run`: the options of an experiment are the fields of its configuration."""

import dataclasses
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerwise.cli import exits
from layerwise.cli.named import ALL, find
from layerwise.cli.options import joined, parse, unchecked, value_of
from layerwise.cli.progress import chosen
from layerwise.cli.show import claims_json, claims_table, note, print_json
from layerwise.cli.stopping import stopped_by_sigterm
from layerwise.experiments import catalog, runner
from layerwise.experiments.engines import EngineOptions
from layerwise.experiments.experiment import Experiment
from layerwise.experiments.results import judge_all
from layerwise.experiments.shards import Shard
from layerwise.foundations.errors import InputError, LayerwiseError, describe

HELP = """\
usage: layerwise run EXPERIMENT [options]

Run what is missing of an experiment, record it, and judge its claims. Stop it at any moment (Ctrl-C, SIGTERM, kill):
the same command goes on.

examples:
  layerwise run {example} --preset smoke             seconds: does it work here?
  layerwise run {example}                            preset laptop
  layerwise run {example} --seeds 10                 more seeds; those that ran before are kept
  layerwise run {example} --first-seed 1000 --out fresh    seeds that nobody has looked at, in their own folder
  layerwise run {example} --engine processes         single seeds in parallel processes
  layerwise run {example} --engine processes --per-device 4    four of them on each GPU
  layerwise run {example} --engine ray --address auto      on a Ray cluster
  layerwise run {example} --shard 0/8                one of eight shares, as array jobs run them (Slurm)
  layerwise run all --preset smoke                   every experiment, one after the other
  layerwise run {folder:<35}  every experiment of this paper
  layerwise run my_package.my_module:EXPERIMENT      one of your own
  layerwise run {example} --help                     all options of this experiment

experiments (layerwise list tells more):
{names}
"""

ABOUT_ALL = """Run what is missing of every experiment, one after the other, and judge the claims.

What fails is said at the end and does not stop the others (exit code 4). Stop it at any moment: the same command goes
on.

Examples: layerwise run all --preset smoke; layerwise run all --engine processes
"""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of every experiment."""

    preset: str = "laptop"
    """smoke (seconds), laptop (minutes on 2 cores) or paper (the paper's own setting)."""
    first_seed: int = 0
    """The first of the seeds. Claims are judged on all seeds in the folder: give fresh ones a folder of their own."""
    engine: str = "batched"
    """batched (all seeds of a cell as one tensor program), processes, or ray."""
    workers: int | None = None
    """Processes of the engine `processes`; one a core if left out."""
    threads: int | None = None
    """Threads of each worker; the cores are shared among them if left out."""
    address: str | None = None
    """A Ray cluster that exists, such as auto or ray://head:10001."""
    per_device: int | None = None
    """Tasks of the engines `processes` and `ray` that share a GPU; each sees one GPU, as cuda."""
    out: Path = runner.OUT
    """Folder of all records."""
    shard: str | None = None
    """i/n: run share i (from 0) of n, into a file of its own, as an array job does; `layerwise check` joins them."""
    json: bool = False
    """Print one JSON document and nothing else on standard output."""


def _by_folder(names: list[str]) -> str:
    """A paragraph for each paper."""
    folders = catalog.folders()
    alone = [name for name in names if not any(name in inside for inside in folders.values())]
    parts = [*(f"{folder}: {', '.join(inside)}" for folder, inside in folders.items()), ", ".join(alone)]
    return "\n".join(
        textwrap.fill(part, 118, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        for part in parts
        if part
    )


def run(argv: list[str]) -> int:
    """Run an experiment and print its claims."""
    if not argv or argv[0] in ("--help", "-h"):
        names = list(catalog.experiments())
        folder = next(iter(catalog.folders()), "FOLDER")
        text = HELP.format(names=_by_folder(names), example=names[0] if names else "EXPERIMENT", folder=folder)
        print(text, end="", file=sys.stdout if argv else sys.stderr)
        return exits.OK if argv else exits.BAD_INPUT
    if argv[0] == ALL or argv[0] in catalog.folders():
        return _run_all(parse(RunOptions, argv[1:], f"layerwise run {argv[0]}", ABOUT_ALL), argv)
    name, words = _name_first(argv)
    experiment = find(name)
    options, config = _parse(experiment, words)
    code, found = _run_one(experiment, config, options, argv)
    if options.json and found is not None:
        print_json(found)
    return code


def _engine(options: RunOptions) -> EngineOptions:
    return EngineOptions(
        name=options.engine,
        workers=options.workers,
        threads=options.threads,
        address=options.address,
        per_device=options.per_device,
    )


def _run_one(
    experiment: Experiment, config: Any, options: RunOptions, argv: list[str]
) -> tuple[int, dict[str, Any] | None]:
    """Run and judge one; its claims are printed, or returned for JSON."""
    engine = _engine(options)
    if options.preset == "paper":
        _say_cost(experiment, config, here=options.address is None)
    with stopped_by_sigterm() as terminated:
        outcome = runner.run(
            experiment,
            config,
            preset=options.preset,
            first_seed=options.first_seed,
            engine=engine,
            out=options.out,
            progress=chosen(),
            shard=None if options.shard is None else Shard.read(options.shard),
        )
    for text in outcome.notes:
        note(text)
    if outcome.interrupted:
        done = outcome.new + outcome.kept
        print(
            f"stopped: {done} of {done + outcome.missing} are recorded in {outcome.recorded.path}; go on with:\n"
            f"  layerwise run {shlex.join(argv)}",
            file=sys.stderr,
        )
        return exits.TERMINATED if terminated else exits.INTERRUPTED, None
    if options.shard is not None:
        counts = {"shard": options.shard, "new": outcome.new, "kept": outcome.kept}
        if not options.json:
            print(
                f"{experiment.name}, share {options.shard}: {outcome.new} new, {outcome.kept} kept from before, in "
                f"{outcome.recorded.path}; join all shares and judge the claims with: layerwise check"
            )
        return exits.OK, counts | {"notes": list(outcome.notes)}
    result = judge_all(experiment, config, options.preset, outcome.recorded)
    if not options.json:
        claims_table(result)
        for text in result.repeats:
            print(f"  NOT as expected: {text}")
        print(f"records: {outcome.recorded.path} ({outcome.new} new, {outcome.kept} kept from before)")
        print("figure and claims as a page: layerwise report")
    for text in result.troubles:
        note(text)
    counts = {"new": outcome.new, "kept": outcome.kept, "repeats": list(result.repeats)}
    return exits.OK, claims_json(result) | counts | {"notes": list(outcome.notes)}


def _say_cost(experiment: Experiment, config: Any, here: bool) -> None:
    """Of the preset that may take hours, before it starts."""
    experiment.refuse_bad(config, here)
    cells, device = len(experiment.cells_of(config)), getattr(config, "device", "cpu")
    cost = f"; {experiment.cost}" if experiment.cost else ""
    print(
        f"{experiment.name}: {cells} cells, {config.seeds} seeds each, on {device}{cost}. Stop it at any moment: the "
        "same command goes on.",
        file=sys.stderr,
    )


def _run_all(options: RunOptions, argv: list[str]) -> int:
    """One after the other; what fails is said at the end and does not stop the others."""
    names = catalog.folders().get(argv[0], tuple(catalog.experiments()))
    configs = {name: catalog.experiments()[name].preset(options.preset) for name in names}
    _engine(options)
    found, failed = [], {}
    for name, config in configs.items():
        try:
            code, one = _run_one(catalog.experiments()[name], config, options, argv)
        except Exception as error:  # of one experiment, whatever it is: the others go on
            failed[name] = str(error) if isinstance(error, LayerwiseError) else f"{type(error).__name__}: {error}"
            note(f"{name}: {failed[name]}")
            continue
        if code:
            return code
        found.append(one)
    if options.json:
        print_json({"runs": found, "failed": failed})
    else:
        print(f"{len(found)} of {len(found) + len(failed)} experiments ran; judge all of them with: layerwise check")
    return exits.FAILED if failed else exits.OK


def _name_first(argv: list[str]) -> tuple[str, list[str]]:
    """The name of the experiment and the other words; the name comes first, but is found elsewhere too."""
    known = catalog.experiments()
    for k, word in enumerate(argv):
        if not word.startswith("-") and (k == 0 or word in known or ":" in word):
            return word, argv[:k] + argv[k + 1 :]
    raise InputError(
        describe(
            f"`{shlex.join(['layerwise', 'run', *argv])}`",
            "`layerwise run EXPERIMENT [options]`",
            f"name one of: {', '.join(known) or 'none'}",
        )
    )


def _parse(experiment: Experiment, words: list[str]) -> tuple[RunOptions, Any]:
    preset = value_of(words, "--preset", RunOptions.preset)
    config = experiment.preset(preset)
    common = {f.name for f in dataclasses.fields(RunOptions)}
    clash = common & {f.name for f in dataclasses.fields(config)}
    if clash:
        raise InputError(
            describe(
                f"{experiment.name!r} with the settings {', '.join(sorted(clash))}",
                f"names other than those of the options ({', '.join(sorted(common))})",
                "rename the fields of its configuration",
            )
        )
    kind, default = joined("Run", RunOptions, unchecked(config))
    parsed = parse(kind, words, f"layerwise run {experiment.name}", _about(experiment, preset), default)
    values = {field.name: getattr(parsed.experiment, field.name) for field in dataclasses.fields(config)}
    return parsed.run, type(config)(**values)


def _about(experiment: Experiment, preset: str) -> str:
    return (
        f"{experiment.title}. {experiment.paper}, {experiment.figure}.\n\n{experiment.summary}\n\n"
        f"The defaults below are those of preset {preset}; see another with --preset NAME --help."
        + (f" Cost: {experiment.cost}." if experiment.cost else "")
    )
