"""`layerwise report`: the HTML pages."""

from dataclasses import dataclass
from pathlib import Path

from layerwise.cli import exits
from layerwise.cli.named import ABOUT_NAMES, find_all
from layerwise.cli.options import parse, split_names
from layerwise.cli.show import print_json
from layerwise.experiments.records import OUT
from layerwise.foundations.errors import InputError, describe

ABOUT = f"""Write an HTML page for every experiment (or those named): its figures, its claims and how to reproduce them.

The pages need no network and no server: open the index.html whose path is printed.

{ABOUT_NAMES}

Examples: layerwise report; layerwise report --out runs --to pages; layerwise report errata --files;
layerwise report my_package.mean:EXPERIMENT; layerwise report all my_package.mean:EXPERIMENT
"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `report`."""

    out: Path = OUT
    """Folder of all records."""
    to: Path = Path("report")
    """Folder of the pages."""
    files: bool = False
    """Also write every figure as SVG, PDF and PNG for papers, and its points as CSV, linked from its page."""
    json: bool = False
    """Print one JSON document and nothing else on standard output."""


def report(argv: list[str]) -> int:
    """Write the pages and print where they are."""
    names, words = split_names(argv, ("--out", "--to"))
    options = parse(ReportOptions, words, "layerwise report [EXPERIMENT ...]", ABOUT)
    wanted = find_all(names)
    if options.out != OUT and not options.out.is_dir():
        raise InputError(
            describe(f"--out {options.out}, which is no folder", "a folder of records", "check the path, or run first")
        )
    from layerwise.report import write

    index = write(options.out, options.to, experiments=wanted, files=options.files)
    if options.json:
        print_json({"index": str(index.resolve())})
    else:
        print(f"report: {index.resolve()}")
    return exits.OK
