"""Experiments about the errors of a text: at each place, how wrong the printed and the corrected reading are."""

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.over_seeds import bound, distinct

CELL = "places"
LEAST = 1e-16
"""What stands for zero on a logarithmic axis."""


@dataclass(frozen=True)
class Place:
    """One place of a text that is wrong, or cannot be meant as it stands."""

    where: str
    printed: str
    corrected: str
    readings: str
    """The function of the study that measures both."""
    tolerance: float = 1e-6
    """Up to this error a reading counts as right."""
    note: str = ""
    doubt: str = ""
    """Why the printed reading may not be the author's, such as damage of a scanned text."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Small random instances."""

    seeds: int = 5


def numbered(study: str) -> Callable[[Place, int, int], Any]:
    """The readings of a study's functions; each takes a NumPy generator, its own for every seed and place."""

    def measure(place: Place, seed: int, number: int) -> Any:
        import numpy as np

        return getattr(importlib.import_module(study), place.readings)(np.random.default_rng([seed, number]))

    return measure


def experiment(
    places: Mapping[str, Place],
    measure: Callable[[Place, int, int], Any],
    *,
    name: str,
    title: str,
    paper: str,
    figure: str,
    elsewhere: str,
) -> Experiment:
    """A pair of claims for each place: the printed reading is expected to fail, and the corrected one to hold.

    Args:
        places: by name.
        measure: from a place, a seed and the place's number to ``printed`` and ``corrected``, two errors.
        name: of the experiment, and of its figure.
        title: in a line.
        paper: whose text it is.
        figure: where in the paper.
        elsewhere: what the summary says of errors that are not among the places.
    """

    def cells(config: Config) -> list[Cell]:
        return [Cell(key=CELL)]

    def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
        for seed in seeds:
            values: dict[str, float] = {}
            for number, (key, place) in enumerate(places.items()):
                found = measure(place, seed, number)
                values |= {f"{key}/printed": found.printed, f"{key}/corrected": found.corrected}
            yield Row(seed=seed, values=values)

    def claims(config: Config) -> list[Claim]:
        found = []
        for key, place in places.items():
            both: dict[str, Any] = {
                "seeds": config.seeds,
                "source": place.where,
                "span": (0, math.inf),
                "note": place.note,
            }
            wrong = {"origin": "misprint", "expected": "fails", "why": f"{place.corrected}."}
            printed = both | wrong | {"note": place.doubt or place.note}
            for reading, text, options in (("printed", place.printed, printed), ("corrected", place.corrected, both)):
                found.append(bound(CELL, f"{key}/{reading}", "<=", place.tolerance, f"{text}.", **options))
        first = f"{next(iter(places))}/printed"
        return [*found, distinct(CELL, first, "Seeds are instances of their own.", seeds=config.seeds)]

    def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
        def points(reading: str, label: str) -> Curve:
            columns = [[max(r["values"][f"{key}/{reading}"], LEAST) for r in records] for key in places]
            lows, highs = ([edge(column, default=LEAST) for column in columns] for edge in (min, max))
            return Curve(label=label, x=list(range(len(places))), y=highs, low=lows, high=highs, style="points")

        panel = Panel(
            title="by how much a reading is wrong",
            x_label="",
            y_label="relative error",
            y_scale="log",
            curves=[points("printed", "as printed"), points("corrected", "corrected")] if records else [],
            places=[place.where for place in places.values()],
        )
        caption = f"Relative error, the largest over seeds and its range; zero is drawn at {LEAST:g}."
        return [Figure(name=name, title="Two readings", caption=caption, panels=[panel])]

    return Experiment(
        name=name,
        title=title,
        paper=paper,
        figure=figure,
        summary=(
            f"{len(places)} places where the text is wrong or cannot be meant as it stands. Each is a pair of claims: "
            f"the printed one is known to fail, and the corrected one to hold. {elsewhere}"
        ),
        presets={"smoke": Config(seeds=2), "laptop": Config(), "paper": Config(seeds=20)},
        cells=cells,
        run=run,
        claims=claims,
        figures=figures,
        cost="seconds",
    )
