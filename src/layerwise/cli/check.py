"""`layerwise check`: every claim of every recorded run."""

from dataclasses import dataclass
from pathlib import Path

from layerwise.cli import exits
from layerwise.cli.options import parse, split_names
from layerwise.cli.run import find
from layerwise.cli.show import claims_json, claims_table, note, print_json
from layerwise.experiments.claims import NOT_ENOUGH
from layerwise.experiments.results import Result, results
from layerwise.experiments.runner import OUT
from layerwise.foundations.errors import InputError, describe

ABOUT = """Judge every claim of every recorded run (or of the experiments named).

Exit codes: 0 all as expected; 1 some not; 3 not enough runs; 2 bad input, such as records that cannot be judged.

Examples: layerwise check; layerwise check head-to-head; layerwise check --out other-runs --json
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
    wanted = [find(name).name for name in names] or [None]
    if options.out != OUT and not options.out.is_dir():
        raise InputError(
            describe(f"--out {options.out}, which is no folder", "a folder of records", "check the path, or run first")
        )
    found, troubles = [], []
    for name in dict.fromkeys(wanted):
        some, trouble = results(options.out, name)
        found += some
        troubles += trouble
    lacking = [name for name in wanted if name and name not in {result.experiment.name for result in found}]
    code = _code(found, troubles, lacking)
    if options.json:
        runs = [claims_json(result) for result in found]
        print_json({"exit": code, "runs": runs, "not_run": lacking, "errors": troubles})
    else:
        for result in found:
            claims_table(result)
            print(f"records: {result.recorded.path}\n")
        if not found:
            print(f"no records in {options.out}: run an experiment first, e.g. `layerwise run NAME`")
        for name in lacking:
            print(f"{name}: not run")
    for text in [text for result in found for text in result.recorded.notes] + troubles:
        note(text)
    return code


def _code(found: list[Result], troubles: list[str], lacking: list[str]) -> int:
    verdicts = [verdict for result in found for verdict in result.verdicts]
    if troubles:
        return exits.BAD_INPUT
    if any(verdict.as_expected is False for verdict in verdicts):
        return exits.UNEXPECTED
    if lacking or not found or any(verdict.status == NOT_ENOUGH for verdict in verdicts):
        return exits.NOT_ENOUGH
    return exits.OK
