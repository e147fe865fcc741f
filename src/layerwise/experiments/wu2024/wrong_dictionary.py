"""Theorem 2.3.2 of Wu (2023), built: a dictionary that is wrong, and represents samples better than the truth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.over_seeds import POSITIVE, bars, bound, combined, distinct, ratio
from layerwise.experiments.wu2024 import PAPER
from layerwise.foundations.errors import InputError, describe

SOURCE = "Theorem 2.3.2"
CELL = "pairs"


@dataclass(frozen=True, kw_only=True)
class Config:
    """A truth small enough to try all supports."""

    seeds: int = 3
    d: int = 20
    p: int = 30
    k: int = 2
    noise: float | int = 0.05
    """Variance of the noise: 1/d is as much as the signal has."""
    directions: int = 8
    """Atoms in the plane of two atoms of the truth."""
    samples: int = 2000
    masks: int = 20
    hidden: int = 2


def check(config: Config) -> None:
    """What does not go together."""
    if not 2 * config.k <= config.d - config.hidden or config.k > config.p:
        given = f"k={config.k}, d={config.d}, hidden={config.hidden}"
        raise InputError(describe(given, "2k visible coordinates at least", "take a smaller k"))
    if config.directions < 2 or config.p < 2:
        given = f"directions={config.directions}, p={config.p}"
        raise InputError(describe(given, "two or more of both", "take e.g. --directions 8"))
    if math.comb(config.p, config.k) > 200_000:
        given = f"all supports of {config.k} of {config.p} atoms"
        raise InputError(describe(given, "at most 200,000 supports", "take fewer atoms"))


def cells(config: Config) -> list[Cell]:
    """One."""
    return [Cell(key=CELL)]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed."""
    from layerwise.studies.masked_sparse_coding.comparison import one_thread
    from layerwise.studies.masked_sparse_coding.theorems import wrong_dictionary

    names = ("d", "p", "k", "directions", "samples", "masks", "hidden")
    for seed in seeds:
        with one_thread("cpu"):
            sizes = {name: getattr(config, name) for name in names}
            yield Row(seed=seed, values=wrong_dictionary(seed, sigma=config.noise**0.5, **sizes))


def claims(config: Config) -> list[Claim]:
    """The three inequalities."""
    common: dict[str, Any] = {"seeds": config.seeds, "origin": "paper", "source": SOURCE}
    k, variance = config.k, config.noise
    return [
        Claim(
            name="wins",
            statement="B with k atoms represents samples better than the truth with its best k, by a multiple of kσ² "
            "(which multiple).",
            quantity=combined(CELL, ["A, exhaustive", "B"], lambda truth, wrong: (truth - wrong) / (k * variance)),
            relation=">=",
            target=1.5,
            note="The constant is ours; a first calculation had 2.88. The loss of B is by OMP, an upper bound; that of "
            "the truth is the least over all supports.",
            **common,
        ),
        bound(
            CELL,
            "distance/squared",
            ">=",
            0.5 * variance,
            "B is wrong: its mean squared distance to atoms of the truth is a multiple of σ² at least.",
            span=POSITIVE,
            note=f"The constant ½ is ours. By construction it is 2(1 − cos(π/2T)) or more, "
            f"{2 * (1 - math.cos(math.pi / 2 / config.directions)):.4f}.",
            **common,
        ),
        Claim(
            name="masked-loses",
            statement="The masked loss prefers the truth (ratio of that of B to that of the truth).",
            quantity=ratio(CELL, "masked/B", "masked/A"),
            relation=">=",
            target=1.03,
            span=POSITIVE,
            seeds=config.seeds,
            note="The whole chapter in one line. A first calculation had .1801/.1659 = 1.086; both contain the noise "
            "of hidden coordinates, which no dictionary predicts.",
        ),
        Claim(
            name="imitates",
            statement="k atoms of B nearly do what 2k atoms of the truth do (share of the gain that is reached).",
            quantity=combined(CELL, ["A", "B", "A, 2k"], lambda a, b, more: (a - b) / (a - more)),
            relation=">=",
            target=0.8,
            note="The mechanism of the proof; the limit is ours, a first calculation had .95.",
            **common,
        ),
        distinct(CELL, "B", "Seeds are truths and samples of their own.", seeds=config.seeds),
    ]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Losses of both dictionaries, with and without masks."""
    standard = {"A, exhaustive": "truth, all supports", "A": "truth", "A, 2k": "truth, 2k atoms", "B": "wrong"}
    masked = {"masked/A": "truth", "masked/B": "wrong", "floor": "noise alone"}
    panels = [
        Panel(title=title, x_label="", y_label="loss", curves=bars(records, CELL, names))
        for title, names in (("standard loss", standard), ("masked loss", masked))
    ]
    caption = (
        "The standard loss prefers the wrong dictionary, the masked loss the right one. Median and range over seeds."
    )
    return [Figure(name="wrong-dictionary", title="Which dictionary wins", caption=caption, panels=panels)]


EXPERIMENT = Experiment(
    name="wrong-dictionary",
    title="A wrong dictionary that represents samples better than the truth",
    paper=PAPER,
    figure=SOURCE,
    summary=(
        "In the plane of every two atoms of the truth, eight atoms at equal angles, none near an atom of the truth: "
        "each imitates two atoms, so that k of them represent noise as 2k do. The construction is ours, simpler than "
        "the net of the proof: codes have any scale, so that directions alone need covering. By the standard loss this "
        "dictionary is better than the truth; by the masked loss, where noise cannot be represented, it is worse."
    ),
    presets={
        "smoke": Config(seeds=2, samples=300, masks=3),
        "laptop": Config(),
        "paper": Config(seeds=10, samples=20_000),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop ten seconds, paper five minutes",
    check=check,
)
