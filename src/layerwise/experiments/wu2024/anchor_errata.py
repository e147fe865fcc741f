"""Where chapter 3 of Wu (2023) errs: both readings on random instances."""

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
LEAST = 1e-16
"""What stands for zero on a logarithmic axis."""
EXACT = 1e-9


class Place(NamedTuple):
    """One place of the thesis."""

    where: str
    printed: str
    corrected: str
    readings: str
    """The function of the study that measures both."""
    note: str = ""


PLACES = {
    "hidden-word": Place(
        "(B.8), (B.9)",
        "KL(p*‖p) < s p⁻ log(1/(1 − p⁻)) (largest excess over it)",
        "KL(p*‖p) = s p⁻ + log(1 − p⁻ (1 − e^(−s))) (largest relative difference)",
        "hidden_word",
        "The theorem stands, with the constant 1 in place of 2, and without p⁻ ≤ 1/2.",
    ),
    "distance": Place(
        "(3.36), (3.37)",
        "The total variation is at least the change of the bulk plus that of the words of interest (shortfall)",
        "Σ|p* − p| is at least their sum, and half of it at least the larger of them (shortfall)",
        "two_distances",
        "The proof of Theorem 3.5.7 only uses the larger, so its 288 is right.",
    ),
    "cases": Place(
        "Before (3.20)",
        "ε_p ≤ Λ/3 gives 1 − e^(−ε_p) ≥ 1 − e^(−Λ/3), and ε_p > Λ/3 the other bound (shortfall)",
        "ε_p ≥ Λ/3 gives 1 − e^(−ε_p) ≥ 1 − e^(−Λ/3), and ε_p ≤ Λ/3 the other bound (shortfall)",
        "two_cases",
    ),
    "sinh": Place(
        "Before (3.20)",
        "e^(−Λ/3) (e^(2Λ/3) − 1) = sinh(Λ/3)",
        "e^(−Λ/3) (e^(2Λ/3) − 1) = 2 sinh(Λ/3)",
        "hyperbolic_sine",
        "(3.21) has the 2 again.",
    ),
    "condition": Place(
        "Remark 3.5.8",
        "4 ε_b < Γ < 3 is enough for KL ≥ p_b² Γ²/288 to follow (shortfall)",
        "8 ε_b < Γ < 6, as the theorem has it, is enough for KL ≥ p_b² Γ²/288 to follow (shortfall)",
        "condition",
        "Assumption 3.5.5 has the 4 as well.",
    ),
    "task": Place(
        "Assumption 3.5.1",
        "The task, of plain logits, is the same when logits of contexts are shifted (relative change)",
        "The task of (3.7), of anchored logits, is the same when logits of contexts are shifted (relative change)",
        "task",
    ),
    "cross-entropy": Place(
        "Section 3.2",
        "The pre-training loss is E[−p* log p] (relative difference from KL + entropy)",
        "The pre-training loss is E[−log p] (relative difference from KL + entropy)",
        "cross_entropy",
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
    """Seed by seed: how wrong both readings are at every place."""
    import numpy as np

    from layerwise.studies.anchor_vectors import errata

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
            found.append(bound(CELL, f"{name}/{reading}", "<=", EXACT, f"{text}.", **common, **more))
    return [*found, distinct(CELL, "hidden-word/printed", "Seeds are instances of their own.", seeds=config.seeds)]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """How wrong both readings are at every place."""

    def points(reading: str, label: str) -> Curve:
        columns = [[max(r["values"][f"{name}/{reading}"], LEAST) for r in records] for name in PLACES]
        lows, highs = ([edge(column, default=LEAST) for column in columns] for edge in (min, max))
        return Curve(label=label, x=list(range(len(PLACES))), y=highs, low=lows, high=highs, style="points")

    panel = Panel(
        title="by how much a reading is wrong",
        x_label="",
        y_label="relative error",
        y_scale="log",
        curves=[points("printed", "as printed"), points("corrected", "corrected")] if records else [],
        places=[place.where for place in PLACES.values()],
    )
    caption = f"The largest over seeds and its range; zero is drawn at {LEAST:g}."
    return [Figure(name="anchor-errata", title="Two readings", caption=caption, panels=[panel])]


EXPERIMENT = Experiment(
    name="anchor-errata",
    title="Where the thesis's chapter on language models errs, and what holds instead",
    paper=PAPER,
    figure="Chapter 3 and appendix B",
    summary=(
        f"{len(PLACES)} places where the text is wrong or cannot be meant as it stands. Each is a pair of claims: the "
        "printed one is known to fail, and the corrected one to hold. Not here: the width of OPT-350M's states, 512 "
        "where Table B.1 has 1024, and which part of WikiText-2 was used, which the thesis does not say."
    ),
    presets={"smoke": Config(seeds=2), "laptop": Config(), "paper": Config(seeds=20)},
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="seconds",
)
