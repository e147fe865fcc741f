"""Theorems 1 to 3 of chapter 4 of George (2023), on layers drawn at random."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.george2023 import PAPER
from layerwise.experiments.over_seeds import bars, value
from layerwise.experiments.progress import within_cell

ROUNDING = 1e-10
THEOREMS = {
    "nearer than others": ("Lemma 1", "No other diagonal in the eigenbasis of K-FAC is nearer to F than EKFAC's"),
    "nearer than K-FAC": ("Theorem 2", "EKFAC is at least as near to F as K-FAC, in Frobenius norm"),
    "trace": ("Theorem 2", "EKFAC has the trace of F"),
    "true basis": ("Theorem 3", "In the eigenbasis of F the scalings are its eigenvalues, and EKFAC is F"),
    "library": ("Algorithm 1", 'structure="ekfac" is the matrix of these theorems'),
}
CONVOLUTIONS = {
    "one position": ("Section 4.2", "K-FAC of a convolution with one position is that of a linear layer"),
    "one offset": ("Section 4.2", "With kernels of one pixel uncorrelated offsets change nothing"),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Layers of 1 to 7 inputs and 1 to 6 outputs, 3 to 40 anisotropic examples, with a bias or without."""

    seeds: int = 3
    layers: int = 100
    """Drawn for each seed."""


def cells(config: Config) -> list[Cell]:
    """Linear layers and convolutions."""
    return [Cell(key="linear"), Cell(key="convolution")]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed: the worst of all layers for every statement."""
    from layerwise.studies.fisher_geometry.theorems import of_convolution, of_linear

    measure = of_linear if cell.key == "linear" else of_convolution
    for seed in seeds:
        numbers = within_cell().track(range(config.layers), f"seed {seed}", config.layers)
        found = [measure(seed, number) for number in numbers]
        yield Row(seed=seed, values={name: _worst(name, [of[name] for of in found]) for name in found[0]})


def _worst(name: str, values: Sequence[float]) -> float:
    """Gains are to be positive, all others zero; NaN stays."""
    if any(math.isnan(x) for x in values):
        return math.nan
    return min(values) if name.startswith("nearer") else max(values)


def claims(config: Config) -> list[Claim]:
    """Exact statements: what is left is rounding."""
    found = []
    for cell, statements in (("linear", THEOREMS), ("convolution", CONVOLUTIONS)):
        for name, (source, statement) in statements.items():
            gain = name.startswith("nearer")
            measured = "least difference of relative errors" if gain else "largest relative error"
            found.append(
                Claim(
                    name=f"{cell}/{name.replace(' ', '-').lower()}",
                    statement=f"{statement} ({measured} over {config.layers} layers).",
                    quantity=value(cell, name),
                    relation=">=" if gain else "<=",
                    target=-ROUNDING if gain else ROUNDING,
                    origin="paper",
                    source=source,
                    seeds=config.seeds,
                )
            )
    return found


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """How far rounding leaves the equalities, and how large the least gains are."""
    equalities = {name: name for name in THEOREMS if not name.startswith("nearer")}
    gains = {name: name for name in THEOREMS if name.startswith("nearer")}
    panels = [
        Panel(title=title, x_label="", y_label="relative to F", curves=bars(records, "linear", names))
        for title, names in (("largest error of what is equal", equalities), ("least gain", gains))
    ]
    caption = f"Median over seeds of the worst of {config.layers} random layers; the bars span all seeds."
    return [Figure(name="kfe-theorems", title="Theorems on the eigenbasis of K-FAC", caption=caption, panels=panels)]


EXPERIMENT = Experiment(
    name="kfe-theorems",
    title="Theorems on the eigenbasis of K-FAC",
    paper=PAPER,
    figure="Lemma 1 and Theorems 1 to 3 of chapter 4",
    summary=(
        "For the empirical Fisher matrix F of a layer, EKFAC is Q diag(QᵀFQ) Qᵀ in the eigenbasis Q of K-FAC. It is "
        "the nearest of all matrices that are diagonal there, so nearer than K-FAC, and has the trace of F. The thesis "
        "writes |·|₂ where it means the Frobenius norm. Nothing is said of inverses, and nothing is tried of them. "
        "Layers are of random sizes, and the library's matrices are compared with the formula's."
    ),
    presets={"smoke": Config(seeds=1, layers=12), "laptop": Config(), "paper": Config(seeds=10)},
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop ten seconds, paper a minute",
)
