"""`layerwise list`: what there is to run, and what has been."""

import textwrap
from dataclasses import dataclass
from pathlib import Path

from layerwise.cli import exits
from layerwise.cli.named import ABOUT_NAMES, find_all
from layerwise.cli.options import parse, split_names
from layerwise.cli.show import note, print_json
from layerwise.experiments import catalog
from layerwise.experiments.records import OUT
from layerwise.experiments.results import results

ABOUT = f"""List experiments: paper, figure, number of claims, cost, and the state of what has been run.

{ABOUT_NAMES}

Examples: layerwise list; layerwise list --json; layerwise list my_package.mean:EXPERIMENT
"""


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
    for row in rows:
        print(f"{row['name']}: {row['title']}")
        for column in ("paper", "figure", "claims", "cost", "state"):
            print(textwrap.fill(_cell(row[column]), 110, initial_indent=f"  {column:<8}", subsequent_indent=" " * 10))
    print("run one with: layerwise run NAME")
    return exits.OK


def _cell(value: str | dict[str, int] | list[dict[str, str]]) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} of preset {preset}" for preset, count in value.items())
    if isinstance(value, list):
        return "; ".join(f"{run['preset']}: {run['state']}" for run in value) or "not run"
    return value
