"""Figure B.2 of George (2023): eigenvectors of the tangent kernel of a random network on a line are Fourier modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.george2023 import PAPER
from layerwise.experiments.over_seeds import POSITIVE, band, bound
from layerwise.foundations.errors import InputError, describe

SOURCE = "Figure B.2"
BIASES, NONE = "biases", "no-biases"
FIRST = 8
"""Leading eigenvectors whose frequencies are compared one by one."""
PRINTED = 0.04
"""λ₁₀ / λ₁ as the thesis reports it."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A random network, and points on a line."""

    seeds: int = 20
    """Networks."""
    width: int = 256
    depth: int = 6
    """Linear layers."""
    points: int = 50
    modes: int = 25
    """Leading eigenvectors that are looked at."""


def check(config: Config) -> None:
    """As many eigenvectors as there are, and enough of them."""
    if not max(FIRST, 10) <= config.modes <= config.points or config.depth < 2:
        given = f"modes={config.modes} of {config.points} points, depth={config.depth}"
        raise InputError(describe(given, f"10 to {config.points} modes, two layers or more", "change one of them"))


def cells(config: Config) -> list[Cell]:
    """With torch's own biases, and without any."""
    return [Cell(key=BIASES), Cell(key=NONE)]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed: frequencies and eigenvalues, the leading ones first."""
    from layerwise.studies.tangent_alignment import square

    for seed in seeds:
        found = square.line_modes(seed, config.width, config.depth, config.points, biases=cell.key == BIASES)
        frequencies, values = (part[: config.modes].tolist() for part in found)
        yield Row(
            seed=seed,
            values={
                "spearman": square.spearman(frequencies),
                "inversions": square.inversions(frequencies[:FIRST]),
                "ratio": values[9] / values[0],
                "root": max(values[9] / values[0], 0.0) ** 0.5,
            },
            series={
                "mode": list(range(1, config.modes + 1)),
                "frequency": frequencies,
                "eigenvalue": [max(value / values[0], 1e-16) for value in values],
            },
        )


def claims(config: Config) -> list[Claim]:
    """Frequencies grow with the index; the ratio that is printed is one of singular values, at most."""
    some: dict[str, Any] = {"test": "share", "share": 0.9, "seeds": config.seeds}
    paper: dict[str, Any] = {"origin": "paper", "source": SOURCE}
    return [
        bound(
            BIASES,
            "spearman",
            ">=",
            0.9,
            f"The frequency of the {config.modes} leading eigenvectors grows with their index (rank correlation).",
            note="The limit is ours. On seeds 100 to 119: .90 to .99, mean .96.",
            span=(-1, 1),
            **some,
            **paper,
        ),
        bound(
            BIASES,
            "inversions",
            "<=",
            1,
            f"Of the first {FIRST} eigenvectors at most one has a lower frequency than the one before.",
            note="On seeds 100 to 119: none on 19 of them, one on the other.",
            span=POSITIVE,
            **some,
            **paper,
        ),
        bound(
            NONE,
            "spearman",
            "<",
            0.9,
            "Without biases there are no Fourier modes: the network is linear on [0, 1], and its kernel has rank 3.",
            note="Weights N(0, 2 / fan-in). On seeds 100 to 102: .26 to .33, which is rounding.",
            span=(-1, 1),
            **some,
        ),
        bound(
            BIASES,
            "ratio",
            "within",
            (PRINTED / 2, 2 * PRINTED),
            "The tenth eigenvalue is about 4 % of the first.",
            origin="misprint",
            expected="fails",
            why="It is a ratio of eigenvalues of 1e-4 to 2e-4 with torch's default initialisation; its square root, "
            "that of the Jacobian's singular values, is 1 to 1.6 %, which is nearer.",
            span=POSITIVE,
            seeds=config.seeds,
            source=SOURCE,
        ),
        bound(
            BIASES,
            "root",
            "within",
            (0.005, 0.03),
            "The tenth singular value of the Jacobian is one or two per cent of the first.",
            note="On seeds 100 to 119: .0097 to .0155.",
            span=POSITIVE,
            **some,
        ),
    ]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Frequencies and eigenvalues by index."""
    labels = {BIASES: "random network", NONE: "without biases"}
    ideal = [float((k + 1) // 2) for k in range(config.modes)]
    fourier = Curve(label="sine and cosine", x=list(range(1, config.modes + 1)), y=ideal, style="dashed")
    return [
        Figure(
            name="fourier-modes",
            title="Eigenvectors of the tangent kernel on a line",
            caption="Median over seeds; the band spans all. Frequency: that of most power in the discrete Fourier "
            "transform of an eigenvector. Eigenvalues are divided by the largest.",
            panels=[
                Panel(
                    title="frequency",
                    x_label="eigenvector",
                    y_label="periods of the interval",
                    curves=[band(records, BIASES, "mode", "frequency", labels[BIASES]), fourier],
                ),
                Panel(
                    title="eigenvalue",
                    x_label="eigenvector",
                    y_label="λ / λ₁",
                    y_scale="log",
                    curves=[band(records, cell, "mode", "eigenvalue", label) for cell, label in labels.items()],
                ),
            ],
        )
    ]


EXPERIMENT = Experiment(
    name="fourier-modes",
    title="Tangent kernel of a random network on a line",
    paper=PAPER,
    figure=SOURCE,
    summary=(
        "The tangent kernel of a random ReLU network, drawn as torch does by default, at equispaced points of [0, "
        "1]: its eigenvectors are compared with Fourier modes by the frequency that has most of their power. The "
        "thesis says nothing of the initialisation; without biases a ReLU network is linear on [0, 1], so that they "
        "must be drawn. The printed ratio of eigenvalues is not found."
    ),
    presets={"smoke": Config(seeds=3), "laptop": Config(), "paper": Config(seeds=100)},
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop and paper some seconds",
    check=check,
)
