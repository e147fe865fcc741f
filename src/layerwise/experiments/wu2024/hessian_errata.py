"""Where chapter 4 and appendix C of Wu (2023) err: both readings, against a computation that needs neither."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.over_seeds import bound, distinct
from layerwise.experiments.wu2024 import PAPER

CELL = "places"
LEAST = 1e-17
"""What stands for zero on a logarithmic axis."""
EXACT = 1e-6


class Place(NamedTuple):
    """One place of the thesis."""

    where: str
    printed: str
    corrected: str
    readings: str
    """The function of the study that measures both."""
    tolerance: float = EXACT
    note: str = ""


PLACES = {
    "kronecker": Place(
        "Section 4.2",
        "M ⊗ N has the entries M[i₁, i₂] N[j₁, j₂]",
        "M ⊗ N has the entries M[i₁, j₁] N[i₂, j₂]",
        "kronecker",
    ),
    "matricization": Place(
        "Definition 4.2.2", "Mat(h)[i, j] is h[(i − 1)m + j]", "Mat(h)[i, j] is h[(i − 1)n + j]", "matricization"
    ),
    "mask": Place(
        "Section 4.4 and (C.30)",
        "D has ones where the output of the unit is ≥ 0 (which is everywhere)",
        "D has ones where the input of the unit is > 0",
        "mask",
    ),
    "mean": Place(
        "(C.2)",
        "The Hessian of the training loss is the sum of those of the examples",
        "The Hessian of the training loss is the mean of those of the examples",
        "mean_loss",
    ),
    "sum-of-weights": Place(
        "Lemma C.2.1",
        "A sum of n weights of variance 1/n has variance 1/n",
        "A sum of n weights of variance 1/n has variance 1",
        "sum_of_weights",
        0.05,
        "What rests on it is in initialisation-theorem.",
    ),
    "products": Place(
        "Before (C.261)",
        "Unrelated unit vectors of m entries have a product of √(1/m) in the mean (of its size)",
        "Unrelated unit vectors of m entries have a squared product of 1/m in the mean",
        "products_of_vectors",
        0.08,
        "The result, k/m, is right.",
    ),
    "overlap": Place(
        "(C.261)",
        "The overlap of two spaces of k dimensions is the sum of the k squared products of their bases",
        "The overlap of two spaces of k dimensions is the sum of all k² squared products, divided by k",
        "overlap_as_a_sum",
        note="In the mean over random bases both are k/m.",
    ),
    "clusters": Place(
        "(C.264)",
        "E[M] is the mean of ΓᵀΓ over classes and logits",
        "E[M] is the mean of ΓᵀΓ over classes of its sum over logits",
        "clusters",
        note="On one example a class; with several, both leave out the variance within classes.",
    ),
    "default-start": Place(
        "Section C.5",
        "PyTorch draws weights of linear layers with Xavier's deviation",
        "PyTorch draws weights of linear layers evenly within ± fan-in^-½",
        "default_start",
        0.03,
        "Biases, too: they are not zero. Networks here are drawn by Xavier's rule, with biases of zero, by hand.",
    ),
    "rescaling": Place(
        "Section C.2.3",
        "H/d² has a norm that neither vanishes nor grows with d (relative change for 16 times as many inputs)",
        "H/d has a norm that neither vanishes nor grows with d (relative change for 16 times as many inputs)",
        "rescaling",
        0.05,
        "The thesis has both.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Small random instances."""

    seeds: int = 5


def cells(config: Config) -> list[Cell]:
    """One with all places."""
    return [Cell(key=CELL)]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed: the errors of both readings at every place."""
    import numpy as np

    from layerwise.studies.hessian_structure import errata

    for seed in seeds:
        values: dict[str, float] = {}
        for number, (name, place) in enumerate(PLACES.items()):
            found = getattr(errata, place.readings)(np.random.default_rng([seed, number]))
            values |= {f"{name}/printed": found.printed, f"{name}/corrected": found.corrected}
        yield Row(seed=seed, values=values)


def claims(config: Config) -> list[Claim]:
    """The printed reading is expected to fail, the corrected one to hold."""
    found = []
    for name, place in PLACES.items():
        common: dict[str, Any] = {
            "seeds": config.seeds,
            "source": place.where,
            "span": (0, math.inf),
            "note": place.note,
        }
        wrong = {"origin": "misprint", "expected": "fails", "why": f"{place.corrected}."}
        for reading, text, more in (("printed", place.printed, wrong), ("corrected", place.corrected, {})):
            found.append(bound(CELL, f"{name}/{reading}", "<=", place.tolerance, f"{text}.", **common, **more))
    return [*found, distinct(CELL, "mask/printed", "Seeds are instances of their own.", seeds=config.seeds)]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """The errors of both readings at every place."""

    def points(reading: str, label: str) -> Curve:
        columns = [[max(r["values"][f"{name}/{reading}"], LEAST) for r in records] for name in PLACES]
        lows, highs = ([edge(column, default=LEAST) for column in columns] for edge in (min, max))
        return Curve(label=label, x=list(range(len(PLACES))), y=highs, low=lows, high=highs, style="points")

    panel = Panel(
        title="distance from a computation that needs neither",
        x_label="",
        y_label="relative error",
        y_scale="log",
        curves=[points("printed", "as printed"), points("corrected", "corrected")] if records else [],
        places=[place.where for place in PLACES.values()],
    )
    caption = f"Relative error, the largest over seeds and its range; zero is drawn at {LEAST:g}."
    return [Figure(name="hessian-errata", title="Two readings", caption=caption, panels=[panel])]


EXPERIMENT = Experiment(
    name="hessian-errata",
    title="Where the thesis errs about Hessians, and what holds instead",
    paper=PAPER,
    figure="Chapter 4 and appendix C",
    summary=(
        f"{len(PLACES)} places where the text is wrong or cannot be meant as it stands. Each is a pair of claims: the "
        "printed one is known to fail, and the corrected one to hold. The closed form of theorem 4.4.1 is in "
        "initialisation-theorem; (C.257), which is true but never sharp, in input-moments. Not here: (C.18), whose "
        "last block is of x⁽ᴸ⁾, not x⁽ⁿ⁾."
    ),
    presets={"smoke": Config(seeds=2), "laptop": Config(), "paper": Config(seeds=20)},
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="seconds",
)
