"""Theorem 3.3.1 of Wu (2023): a student that predicts words almost perfectly and has every label wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.over_seeds import POSITIVE, band, bound
from layerwise.experiments.wu2024 import PAPER
from layerwise.foundations.errors import InputError, describe

CELL = "student"
SOURCE = "Theorem 3.3.1"


@dataclass(frozen=True, kw_only=True)
class Config:
    """A log-linear model of words."""

    seeds: int = 5
    contexts: int = 1000
    words: int = 200
    width: int = 16
    amounts: tuple[float, ...] = (0.5, 2.0, 10.0)
    """s: by how much the student's logit of the rare word is less; the last is the one that flips all labels."""


def check(config: Config) -> None:
    """Words 0 and 1 are the ones of interest."""
    if config.words < 3:
        raise InputError(
            describe(f"words={config.words}", "at least 3", "take more: the task is about two, and others follow")
        )
    if list(config.amounts) != sorted(set(config.amounts)):
        raise InputError(describe(f"amounts={config.amounts}", "numbers that rise", "sort them"))


def cells(config: Config) -> list[Cell]:
    """One."""
    return [Cell(key=CELL)]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed."""
    import numpy as np

    from layerwise.studies.anchor_vectors import counter_examples as study

    sizes = {"contexts": config.contexts, "words": config.words, "width": config.width}
    for seed in seeds:
        values = study.rare_words(np.random.default_rng(seed), config.amounts, **sizes)
        series = {name: study.as_series(values, name, config.amounts) for name in ("flipped", "divergence")}
        yield Row(seed=seed, values=values, series={"amount": list(config.amounts), **series})


def claims(config: Config) -> list[Claim]:
    """The divergence in closed form, its bound, and labels."""
    common: dict[str, Any] = {"seeds": config.seeds, "source": SOURCE}
    found = []
    for s in config.amounts:
        text = f"With s = {s:g} the divergence is s p + log(1 − p (1 − e^(−s))) (largest difference)."
        note = "The thesis derives another form, which is wrong: see anchor-errata."
        found.append(bound(CELL, f"formula@{s:g}", "<=", 1e-12, text, span=POSITIVE, note=note, **common))
        text = f"With s = {s:g} the divergence of a context is at most s p, p the rare word's probability (excess)."
        note = "The thesis has 2 s p, for p ≤ 1/2; neither the 2 nor the condition is needed. 1e-13 is for rounding."
        found.append(bound(CELL, f"above s p@{s:g}", "<=", 1e-13, text, origin="paper", note=note, **common))
        text = f"With s = {s:g} the task's value is less by s (largest difference)."
        found.append(bound(CELL, f"task@{s:g}", "<=", 1e-12, text, origin="paper", span=POSITIVE, **common))
    s = config.amounts[-1]
    if s >= 10:
        text = f"With s = {s:g} every positive label is flipped (share)."
        note = "A reference run: 1, and 0.78 at s = 2, 0.16 at s = 0.5."
        found.append(bound(CELL, f"flipped@{s:g}", ">=", 1, text, origin="paper", span=(0, 1), note=note, **common))
        text = f"With s = {s:g} the mean divergence is still small."
        note = "A reference run: 1.4e-6."
        found.append(
            bound(CELL, f"divergence@{s:g}", "<=", 1e-5, text, origin="paper", span=POSITIVE, note=note, **common)
        )
    return found


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Labels and divergence against s."""
    labels = {"x_label": "s", "x_scale": "log"}
    flipped = band(records, CELL, "amount", "flipped", "flipped labels", style="points")
    divergence = band(records, CELL, "amount", "divergence", "mean KL(p*‖p)", style="points")
    panels = [
        Panel(title="positive labels that are flipped", y_label="share", curves=[flipped], **labels),
        Panel(title="loss of prediction", y_label="nats", y_scale="log", curves=[divergence], **labels),
    ]
    caption = "Median over seeds; the band spans all. A student whose logit of one rare word is less by s."
    return [Figure(name="rare-words", title="Labels flipped at no cost", caption=caption, panels=panels)]


EXPERIMENT = Experiment(
    name="rare-words",
    title="A rare word flips all labels and costs nothing in prediction",
    paper=PAPER,
    figure=SOURCE,
    summary=(
        "The label is the sign of the sum of two logits; one of the words is rare (probability some 1e-7). A student "
        "with that logit less by s predicts words almost as well as the teacher, and has every positive label wrong. "
        "So a task that is linear in logits cannot be guaranteed by a small pre-training loss."
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
    check=check,
)
