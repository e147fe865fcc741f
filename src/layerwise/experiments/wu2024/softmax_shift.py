"""Theorem 3.3.2 of Wu (2023): the same probabilities with useless logits, and logits that an anchor holds fast."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.over_seeds import POSITIVE, bars, bound
from layerwise.experiments.wu2024 import PAPER

CELL = "student"
SOURCE = "Theorem 3.3.2"


@dataclass(frozen=True, kw_only=True)
class Config:
    """A log-linear model of words, and shifts of its logits."""

    seeds: int = 5
    contexts: int = 1000
    words: int = 200
    width: int = 16
    deviation: float | int = 5.0
    """Of random shifts, one a context."""


def cells(config: Config) -> list[Cell]:
    """One."""
    return [Cell(key=CELL)]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed."""
    import numpy as np

    from layerwise.studies.anchor_vectors.counter_examples import softmax_shift

    sizes = {"contexts": config.contexts, "words": config.words, "width": config.width}
    for seed in seeds:
        yield Row(seed=seed, values=softmax_shift(np.random.default_rng(seed), deviation=config.deviation, **sizes))


def claims(config: Config) -> list[Claim]:
    """What a shift leaves, and what it destroys."""
    common: dict[str, Any] = {"seeds": config.seeds, "source": SOURCE, "span": POSITIVE}
    paper: dict[str, Any] = {**common, "origin": "paper"}
    return [
        bound(CELL, "probabilities", "<=", 1e-12, "The student's log probabilities are the teacher's.", **paper),
        bound(CELL, "student's task", "<=", 0, "The student's task is zero for every context, exactly.", **paper),
        bound(CELL, "teacher's task", ">=", 1, "The teacher's is not (standard deviation).", **paper),
        bound(
            CELL,
            "anchored",
            "<=",
            1e-12,
            "Logits less log Z_bulk are the same whatever shift each context has (largest change).",
            note="Why the thesis looks for an anchor: one vector with ⟨h, v_0⟩ = log Z_bulk.",
            **common,
        ),
        bound(CELL, "labels", ">=", 0.02, "Such shifts change labels of a task of plain logits (share).", **common),
    ]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """How much logits change under random shifts."""
    names = {"plain": "plain logits", "anchored": "logits − log Z_bulk"}
    panel = Panel(title="largest change", x_label="", y_label="nats", curves=bars(records, CELL, names))
    caption = f"Shifts with standard deviation {config.deviation:g}, one a context: no probability changes."
    return [Figure(name="softmax-shift", title="What a shift changes", caption=caption, panels=[panel])]


EXPERIMENT = Experiment(
    name="softmax-shift",
    title="The same probabilities, and logits that say nothing",
    paper=PAPER,
    figure=SOURCE,
    summary=(
        "Softmax does not see a number that is added to all logits of a context, but a ReLU network of logits does. A "
        "student shifted below all thresholds predicts words exactly as the teacher and has f = 0 everywhere. Logits "
        "from which log Z_bulk is subtracted do not change."
    ),
    presets={
        "smoke": Config(seeds=2, contexts=300),
        "laptop": Config(),
        "paper": Config(seeds=20, contexts=10_000),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="seconds",
)
