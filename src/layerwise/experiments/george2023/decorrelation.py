"""Figure 2 of chapter 4 of George (2023): what the eigenbasis of K-FAC does to gradients, between two refreshes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.george2023 import PAPER
from layerwise.experiments.over_seeds import POSITIVE, band, value
from layerwise.experiments.progress import within_cell

if TYPE_CHECKING:
    from layerwise.studies.fisher_geometry.along_training import AlongTraining

CELL = "layer-2"
METHODS = {"kfac": "KFAC", "ekfac": "EKFAC"}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The second layer of a sigmoid network, as it trains."""

    seeds: int = 5
    """Networks and orders of the data."""
    images: str = "digits"
    """"digits" (8 × 8, with scikit-learn) or "mnist"."""
    hidden: tuple[int, ...] = (20, 20, 20)
    examples: int = 500
    """Of the empirical Fisher matrix, and of the factors."""
    steps: int = 600
    every: int = 20
    """Steps between measurements."""

    def along(self, refresh: int | None = None) -> AlongTraining:
        """What is measured."""
        from layerwise.studies.fisher_geometry.along_training import AlongTraining
        from layerwise.studies.fisher_geometry.classifiers import Classifier

        return AlongTraining(
            classifier=Classifier(images=self.images, hidden=self.hidden),
            examples=self.examples,
            steps=self.steps,
            every=self.every,
            refresh=refresh,
        )


@dataclass(frozen=True, kw_only=True)
class Config(Layer):
    """The layer, with factors that are renewed now and then."""

    refresh: int = 100
    """Steps between new factors."""


def cells(config: Config) -> list[Cell]:
    """One: everything is measured along one training."""
    return [Cell(key=CELL)]


def columns(along: AlongTraining, seed: int) -> dict[str, list[float | int]]:
    """Measurements of one training by name, one entry a step."""
    rows = list(within_cell().track(along.measured(seed), f"seed {seed}", len(along.measured_steps())))
    return {name: [row[name] for row in rows] for name in rows[0]}


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed; of what claims are about, the worst step."""
    for seed in seeds:
        found = columns(config.along(config.refresh), seed)
        names = ("correlation/basis", "correlation/parameters", "error/ekfac", "error/kfac")
        rows = list(zip(found["step"], *(found[name] for name in names), strict=True))
        values = {
            "correlation": max(basis / parameters for _, basis, parameters, _, _ in rows),
            "error": max(ekfac / kfac for step, _, _, ekfac, kfac in rows if step % config.refresh),
        }
        yield Row(seed=seed, values=values, series={name: found[name] for name in ("step", *names)})


def claims(config: Config) -> list[Claim]:
    """The thesis shows the curves; that one half is the limit is ours."""
    return [
        Claim(
            name="correlation",
            statement="In the eigenbasis gradients are at most half as correlated as by parameter (largest ratio of "
            "mean absolute correlations over the training).",
            quantity=value(CELL, "correlation"),
            relation="<=",
            target=0.5,
            origin="paper",
            source="Figure 2 of chapter 4, left",
            span=POSITIVE,
            seeds=config.seeds,
        ),
        Claim(
            name="error-between-refreshes",
            statement="Between refreshes EKFAC is nearer to the empirical Fisher matrix than K-FAC (largest ratio of "
            "their errors).",
            quantity=value(CELL, "error"),
            relation="<",
            target=1.0,
            origin="paper",
            source="Figure 2 of chapter 4, right, and Theorem 2",
            note="A theorem where the scalings are of the same examples as the matrix, whatever the age of the basis. "
            "Errors themselves depend on the age of the factors: at steps 80, 240 and 560 (seed 0) K-FAC's are .70, "
            ".35 and .40 with factors of the last refresh, and .18, .24 and .32 with those of the same step, where "
            "a first calculation of this setting, which may have had such, had .21, .25 and .34.",
            span=POSITIVE,
            seeds=config.seeds,
        ),
    ]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Correlations, and errors with factors that are renewed now and then."""
    bases = {"parameters": "by parameter", "basis": "in the eigenbasis"}
    return [
        Figure(
            name="decorrelation",
            title="Gradients in the eigenbasis of K-FAC, and approximations between refreshes",
            caption=f"Median over seeds; the band spans all. Second layer of a network that is trained on "
            f"{config.images}; new factors every {config.refresh} steps.",
            panels=[
                panel(records, "mean absolute correlation of gradients", "correlation", bases),
                panel(records, "relative error against the empirical Fisher matrix", "error", METHODS),
            ],
        )
    ]


def panel(records: Sequence[Record], title: str, of: str, labels: dict[str, str]) -> Panel:
    """Curves over the steps of a training."""
    curves = [band(records, CELL, "step", f"{of}/{name}", label) for name, label in labels.items()]
    return Panel(title=title, x_label="step", y_label=of, curves=curves)


EXPERIMENT = Experiment(
    name="decorrelation",
    title="Gradients in the eigenbasis of K-FAC",
    paper=PAPER,
    figure="Figure 2 of chapter 4",
    summary=(
        "A sigmoid network is trained by SGD. In its second layer the second moment F of the gradients is compared "
        "with K-FAC and EKFAC. Correlations are those of F, |F_ij| / (F_ii F_jj)^½, by parameter and in a fresh "
        "eigenbasis; errors are relative, in Frobenius norm, with factors that are renewed now and then, EKFAC's "
        "scalings being those of F. All matrices are of the same examples. The thesis says of its network that it has "
        "four layers and is trained on MNIST; preset paper has hidden layers of 50."
    ),
    presets={
        "smoke": Config(seeds=1, steps=200, every=50),
        "laptop": Config(),
        "paper": Config(images="mnist", hidden=(50, 50, 50), examples=2000, steps=2000, every=50),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop half a minute, paper half an hour",
    check=lambda config: config.along(config.refresh),
)
