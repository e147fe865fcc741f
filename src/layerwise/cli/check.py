"""`layerwise check`: every claim of every recorded run."""

from dataclasses import dataclass
from pathlib import Path

from layerwise.cli import exits
from layerwise.cli.named import ABOUT_NAMES, find_all
from layerwise.cli.options import parse, split_names
from layerwise.cli.show import claims_json, claims_table, note, print_json
from layerwise.experiments.claims import NOT_ENOUGH
from layerwise.experiments.records import OUT
from layerwise.experiments.results import Result, results
from layerwise.experiments.shards import merge_all
from layerwise.foundations.errors import InputError, describe

ABOUT = f"""Judge every claim of every recorded run (or of the experiments named).

{ABOUT_NAMES}

Records of shares (`layerwise run … --shard i/n`) are joined before.

Exit codes: 0 all as expected; 1 some not, or seeds that gave bitwise equal results; 3 not enough runs, or a preset of
which nothing is claimed; 2 bad input, such as records that cannot be judged. Records of experiments outside layerwise
that are not named are listed in a note and change no exit code: what a file names is never imported.

Examples: layerwise check; layerwise check head-to-head; layerwise check my_package.mean:EXPERIMENT;
layerwise check --out other-runs --json
"""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `check`."""

    out: Path = OUT
    """Folder of all records."""
    json: bool = False
    """Print one JSON document and nothing else on standard output."""


def check(argv: list[str]) -> int:
    """Judge recorded runs; the exit code says how it went."""
    names, words = split_names(argv, ("--out",))
    options = parse(CheckOptions, words, "layerwise check [EXPERIMENT ...]", ABOUT)
    wanted = find_all(names)
    if options.out != OUT and not options.out.is_dir():
        raise InputError(
            describe(f"--out {options.out}, which is no folder", "a folder of records", "check the path, or run first")
        )
    merge_all(options.out)
    found = results(options.out, wanted, only=wanted is not None)
    troubles = [*found.troubles.values(), *(text for result in found.results for text in result.troubles)]
    run = {result.experiment.name for result in found.results}
    lacking = [experiment.name for experiment in wanted or [] if experiment.name not in run]
    code = _code(found.results, troubles, lacking)
    if options.json:
        runs = [claims_json(result) | {"repeats": list(result.repeats)} for result in found.results]
        document = {"exit": code, "runs": runs, "not_run": lacking, "errors": troubles}
        print_json(document | {"not_judged": list(found.strangers.values())})
    else:
        for result in found.results:
            claims_table(result)
            for text in result.repeats:
                print(f"  NOT as expected: {text}")
            print(f"records: {result.recorded.path}\n")
        if not found.results:
            print(f"no records in {options.out}: run an experiment first, e.g. `layerwise run NAME`")
        for name in lacking:
            print(f"{name}: not run")
    notes = [text for result in found.results for text in result.recorded.notes]
    for text in [*notes, *troubles, *found.strangers.values()]:
        note(text)
    return code


def _code(found: tuple[Result, ...], troubles: list[str], lacking: list[str]) -> int:
    verdicts = [verdict for result in found for verdict in result.verdicts]
    if troubles:
        return exits.BAD_INPUT
    if any(verdict.as_expected is False for verdict in verdicts) or any(result.repeats for result in found):
        return exits.UNEXPECTED
    if lacking or not found or any(verdict.status == NOT_ENOUGH for verdict in verdicts):
        return exits.NOT_ENOUGH
    if not all(result.judged for result in found):  # a run of which nothing is claimed shows nothing
        return exits.NOT_ENOUGH
    return exits.OK
