"""`layerwise list`: what there is to run, and what has been."""

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerwise.cli import exits
from layerwise.cli.named import ABOUT_NAMES, find_all
from layerwise.cli.options import parse, split_names
from layerwise.cli.show import note, print_json
from layerwise.experiments import catalog
from layerwise.experiments.records import OUT
from layerwise.experiments.results import results

ABOUT = f"""List experiments by paper, a line each, with the state of what has been run.

Of those that are named, also the figure, the number of claims and the cost. {ABOUT_NAMES}

Examples: layerwise list; layerwise list wu2024; layerwise list --json; layerwise list my_package.mean:EXPERIMENT
"""


WIDTH = 110
"""Of a line, in characters."""


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Options of `list`."""

    out: Path = OUT
    """Folder of all records."""
    json: bool = False
    """Print one JSON document and nothing else on standard output."""


def list_experiments(argv: list[str]) -> int:
    """Print the catalog."""
    names, words = split_names(argv, ("--out",))
    options = parse(ListOptions, words, "layerwise list [EXPERIMENT ...]", ABOUT)
    wanted = find_all(names)
    found = results(options.out, wanted, only=wanted is not None)
    rows = []
    for experiment in catalog.experiments().values() if wanted is None else wanted:
        runs = [result for result in found.results if result.experiment.name == experiment.name]
        rows.append(
            {
                "name": experiment.name,
                "title": experiment.title,
                "paper": experiment.paper,
                "figure": experiment.figure,
                "claims": {preset: len(experiment.claims(config)) for preset, config in experiment.presets.items()},
                "cost": experiment.cost,
                "state": [{"preset": r.preset, "path": str(r.recorded.path), "state": r.state()} for r in runs],
            }
        )
    for text in [*found.troubles.values(), *found.strangers.values()]:
        note(text)
    if options.json:
        print_json({"experiments": rows, "errors": list(found.troubles.values())})
        return exits.OK
    if wanted is None:
        _print_lines(rows)
    else:
        _print_details(rows)
    print("run one with: layerwise run NAME")
    return exits.OK


def _print_lines(rows: list[dict[str, Any]]) -> None:
    """A line an experiment, under its paper."""
    width = max(len(row["name"]) for row in rows)
    folders = {name: folder for folder, names in catalog.folders().items() for name in names}
    for paper in dict.fromkeys(row["paper"] for row in rows):
        print(textwrap.fill(paper, WIDTH))
        for row in rows:
            if row["paper"] == paper:
                state = f" [{_cell(row['state'])}]" if row["state"] else ""
                print(f"  {row['name']:<{width}}  {row['title']}{state}")
        of_paper = sorted({folders[row["name"]] for row in rows if row["paper"] == paper and row["name"] in folders})
        if of_paper:
            print(f"run all of these with: {'; '.join(f'layerwise run {folder}' for folder in of_paper)}")
        print()
    print("figure, claims and cost of some: layerwise list NAME ...")


def _print_details(rows: list[dict[str, Any]]) -> None:
    """All that is known of each; a paper is named once."""
    for place, row in enumerate(rows):
        print(f"{row['name']}: {row['title']}")
        again = place > 0 and rows[place - 1]["paper"] == row["paper"]
        for column in ("paper", "figure", "claims", "cost", "state")[again:]:
            print(textwrap.fill(_cell(row[column]), WIDTH, initial_indent=f"  {column:<8}", subsequent_indent=" " * 10))


def _cell(value: str | dict[str, int] | list[dict[str, str]]) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} of preset {preset}" for preset, count in value.items())
    if isinstance(value, list):
        return "; ".join(f"{run['preset']}: {run['state']}" for run in value) or "not run"
    return value
