"""Figure 6 of chapter 6 of George (2023): which measures of complexity go with the generalization gap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.george2023 import PAPER
from layerwise.experiments.over_seeds import POSITIVE
from layerwise.experiments.progress import within_cell

if TYPE_CHECKING:
    from layerwise.studies.tangent_alignment.classification import Task

SOURCE = "Figure 6 of chapter 6"
MEASURES = {
    "path": "path, (6.4.11)",
    "displacement": "the same by displacements",
    "displacement-trace": "|w − w⁰|√Tr K",
    "neyshabur-2019": "Neyshabur 2019",
    "bartlett-2017": "Bartlett 2017",
    "spectral-frobenius": "spectral–Frobenius",
    "frobenius": "product of Frobenius norms",
    "one-inf": "product of (1, ∞) norms",
    "fisher-rao": "Fisher–Rao",
    "parameters": "parameters",
}
SWEEPS = {"width": "hidden units", "corruption": "share of random labels", "channels": "channels of VGG19"}
WIDE = (64, 1024)
"""Between these widths the growth of measures is compared."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Networks of one hidden layer, and what is varied of them."""

    seeds: int = 4
    """Draws of the data, of the network and of the order of the data."""
    images: str = "digits"
    """"digits" (8 × 8, with scikit-learn) or "mnist"."""
    widths: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    corruptions: tuple[float, ...] = (0.0, 0.2, 0.5, 0.8, 1.0)
    """Shares of the training labels that are random."""
    hidden: int = 256
    """Units while the labels are varied."""
    trained_on: int = 500
    channels: tuple[int, ...] = ()
    """Of the first layer of VGG19 on CIFAR-10."""
    photographs: int = 50_000
    """That VGG19 is trained on."""
    lr: float | int = 0.05
    momentum: float | int = 0.9
    batch: int = 100
    stop: float | int = 0.01
    """Cross-entropy of the training data at which all trainings end."""
    most: int = 20_000
    """Steps after which they end anyway."""
    device: str = "cpu"

    def task(self, sweep: str, at: float | int) -> Task:
        """The network and its data at one value of a sweep."""
        from layerwise.studies.tangent_alignment.classification import Task

        how: dict[str, Any] = {"lr": self.lr, "momentum": self.momentum, "batch": self.batch, "device": self.device}
        if sweep == "channels":
            return Task(images="cifar10", network="vgg19", width=int(at), trained_on=self.photographs, **how)
        hidden, share = (int(at), 0.0) if sweep == "width" else (self.hidden, at)
        return Task(images=self.images, hidden=(hidden,), random_labels=share, trained_on=self.trained_on, **how)

    def sweeps(self) -> dict[str, tuple[float | int, ...]]:
        """What is varied, and over what."""
        return {"width": self.widths, "corruption": self.corruptions, "channels": self.channels}


def check(config: Config) -> None:
    """Networks that cannot be, and data that are not there."""
    from layerwise.studies.tangent_alignment.classification import check_present

    for sweep, values in config.sweeps().items():
        for at in values:
            config.task(sweep, at)
    check_present(config.images)
    if config.channels:
        check_present("cifar10")


def key(sweep: str, at: float | int) -> str:
    """The cell of a training."""
    return f"{sweep}/{at:g}"


def cells(config: Config) -> list[Cell]:
    """One a network and data."""
    found = [(sweep, at) for sweep, values in config.sweeps().items() for at in values]
    return [Cell(key=key(sweep, at), options={"sweep": sweep, "at": at}) for sweep, at in found]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed: train to the cross-entropy, then measure."""
    from layerwise.studies.tangent_alignment.complexity import measured

    for seed in within_cell().track(seeds, cell.key, len(seeds)):
        task = config.task(cell.options["sweep"], cell.options["at"])
        yield Row(seed=seed, values=measured(task, seed, stop=config.stop, most=config.most))


def across(
    sweep: str, values: Sequence[float | int], names: Sequence[str], of: Callable[..., float]
) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """A claim's quantity: a function of the columns of some measures along a sweep, for seeds that have all of it."""

    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        columns = [[by_seed(records, key(sweep, at), name) for at in values] for name in names]
        seeds = set.intersection(*(set(found) for column in columns for found in column))
        return {seed: of(*([found[seed] for found in column] for column in columns)) for seed in sorted(seeds)}

    return quantity


def agreement(a: Sequence[float | int], b: Sequence[float | int]) -> float:
    """Kendall's rank correlation: the share of pairs in one order minus that in the other.

    >>> agreement([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    pairs = [(i, j) for i in range(len(a)) for j in range(i)]
    return sum(
        math.copysign(1, (a[i] - a[j]) * (b[i] - b[j])) * (a[i] != a[j] and b[i] != b[j]) for i, j in pairs
    ) / len(pairs)


def growth(column: Sequence[float | int]) -> float:
    """The last over the first."""
    return column[-1] / column[0]


def claims(config: Config) -> list[Claim]:
    """The thesis shows curves; the limits are ours."""
    common: dict[str, Any] = {"seeds": config.seeds, "origin": "paper", "source": SOURCE}
    found = []
    if len(config.corruptions) > 1:
        found.append(
            Claim(
                name="corruption",
                statement="The more labels are random, the larger the gap and the measure (6.4.11), in one order (rank "
                "correlation).",
                quantity=across("corruption", config.corruptions, ["gap", "path"], agreement),
                relation=">=",
                target=1.0,
                test="share",
                share=0.75,
                note="All other measures rise as well, so that this does not tell one from another.",
                span=(-1, 1),
                **common,
            )
        )
    if set(WIDE) <= set(config.widths):
        found += [
            Claim(
                name="width/path",
                statement=f"From {WIDE[0]} to {WIDE[1]} units, where the gap does not grow, (6.4.11) grows by no more "
                "than 2.5; the length of the path alone falls there.",
                quantity=across("width", WIDE, ["path"], growth),
                relation="within",
                target=(1.2, 2.5),
                test="share",
                share=0.75,
                note="On seeds 100 to 107 it grows by 1.7 to 2.1, on one by 2.55.",
                span=POSITIVE,
                **common,
            ),
            Claim(
                name="width/frobenius",
                statement=f"From {WIDE[0]} to {WIDE[1]} units the product of Frobenius norms grows by 3 or more.",
                quantity=across("width", WIDE, ["frobenius"], growth),
                relation=">=",
                target=3,
                span=POSITIVE,
                **common,
            ),
            Claim(
                name="width/compared",
                statement="There (6.4.11) grows less than the product of Frobenius norms (ratio of growths).",
                quantity=across("width", WIDE, ["path", "frobenius"], lambda a, b: growth(a) / growth(b)),
                relation="<=",
                target=0.8,
                span=POSITIVE,
                **common,
            ),
        ]
    if len(config.widths) > 1 and config.widths[0] <= 8 and WIDE[0] in config.widths:
        narrow = (config.widths[0], WIDE[0])
        found.append(
            Claim(
                name="width/narrow",
                statement=f"{narrow[0]} units generalize worse than {narrow[1]}, and (6.4.11) says so (the lesser of "
                "the ratios of gaps and of measures).",
                quantity=across("width", narrow, ["gap", "path"], lambda a, b: 1 / max(growth(a), growth(b))),
                relation=">",
                target=1,
                span=POSITIVE,
                **common,
            )
        )
    for sweep in ("width", "channels"):
        values = config.sweeps()[sweep]
        if len(values) > 2 and config.images != "digits":  # the digits' gap is flat: ranks would be those of noise
            found += [_ranked(config, sweep, values, other) for other in ("frobenius", "spectral-frobenius")]
    return found


def _ranked(config: Config, sweep: str, values: Sequence[float | int], other: str) -> Claim:
    return Claim(
        name=f"{sweep}/{other}-ranks",
        statement=f"Along the {SWEEPS[sweep]}, (6.4.11) goes more with the gap than {MEASURES[other]} does (difference "
        "of rank correlations).",
        quantity=across(
            sweep, values, ["gap", "path", other], lambda gap, ours, its: agreement(gap, ours) - agreement(gap, its)
        ),
        relation=">",
        target=0,
        origin="paper",
        source=SOURCE,
        span=(-2, 2),
        seeds=config.seeds,
    )


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """For each sweep the gap, and all measures, each divided by its mean."""
    found = []
    for sweep, values in config.sweeps().items():
        if not values:
            continue
        gap = Curve(label="gap", x=list(values), y=_means(records, sweep, values, "gap"))
        curves = [
            Curve(label=label, x=list(values), y=_relative(_means(records, sweep, values, name)))
            for name, label in MEASURES.items()
        ]
        axis: dict[str, Any] = {"x_label": SWEEPS[sweep], "x_scale": "linear" if sweep == "corruption" else "log"}
        panels = [
            Panel(title="generalization gap", y_label="gap", curves=[gap], **axis),
            Panel(title="measures over their means", y_label="relative", curves=curves, y_scale="log", **axis),
        ]
        caption = "Means over seeds. The gap is that of accuracies, the training's on the labels it was given."
        found.append(Figure(name=sweep, title=f"Complexity by {SWEEPS[sweep]}", caption=caption, panels=panels))
    return found


def _means(records: Sequence[Record], sweep: str, values: Sequence[float | int], name: str) -> list[float]:
    columns = [list(by_seed(records, key(sweep, at), name).values()) for at in values]
    return [sum(column) / len(column) if column else math.nan for column in columns]


def _relative(column: Sequence[float]) -> list[float]:
    finite = [x for x in column if math.isfinite(x)]
    mean = sum(finite) / len(finite) if finite else 0.0
    return [x / mean if mean else math.nan for x in column]


EXPERIMENT = Experiment(
    name="complexity",
    title="Measures of complexity and the generalization gap",
    paper=PAPER,
    figure=SOURCE,
    summary=(
        "Networks of one hidden layer, of many widths or with some labels random, are trained to one cross-entropy. "
        "Along the way Σ|δw|√(Tr K), (6.4.11), is added up: the length of the path, step by step, with the trace of "
        "the tangent kernel of 100 training images at the thesis's snapshots. At the end it is compared with the gap "
        "and with other measures, those of the literature that the text names or its figure may have had: the legend "
        "is lost. Each is recorded as it is, and divided by the 10th percentile of the margins. The thesis has MNIST, "
        "and VGG19 on CIFAR-10."
    ),
    presets={
        "smoke": Config(seeds=1, widths=WIDE, corruptions=(0.0, 1.0), trained_on=200, stop=0.03),
        "laptop": Config(),
        "paper": Config(
            seeds=3,
            images="mnist",
            widths=(8, 16, 32, 64, 128, 256, 512, 1024, 4096),
            trained_on=10_000,
            channels=(4, 8, 12, 16, 20, 24, 28),
            lr=0.01,
            most=200_000,
            device="cuda",
        ),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke three seconds, laptop a minute and a half; paper hours on a GPU",
    ranges={"momentum": (0, 1), "corruptions": (0, 1), "channels": (1, 512)},
    check=check,
)
