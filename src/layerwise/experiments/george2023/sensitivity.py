"""Figure B.1 of George (2023): outputs move along the leading directions of the Jacobian, and hardly along others."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.george2023 import PAPER
from layerwise.experiments.over_seeds import POSITIVE, band, combined, value

if TYPE_CHECKING:
    from layerwise.studies.tangent_alignment.classification import Task

SOURCE = "Figure B.1"


@dataclass(frozen=True, kw_only=True)
class Config:
    """A network, its training, and steps in parameter space."""

    seeds: int = 3
    images: str = "digits"
    """"digits" or "cifar10" (in the folder that LAYERWISE_DATA names)."""
    network: str = "mlp"
    """"mlp"; "vgg11" for CIFAR-10."""
    trained_on: int = 1400
    lr: float | int = 0.02
    momentum: float | int = 0.9
    batch: int = 100
    steps: int = 1000
    examples: int = 100
    """Training images of the Jacobian."""
    directions: int = 50
    size: float | int = 1e-3
    """Norm of a step, relative to that of the parameters."""
    device: str = "cpu"

    def task(self) -> Task:
        """The training."""
        from layerwise.studies.tangent_alignment.classification import Task

        names = ("images", "network", "trained_on", "lr", "momentum", "batch", "steps", "device")
        return Task(**{name: getattr(self, name) for name in names})


def check(config: Config) -> None:
    """What does not go together, or is not there, is said before anything is trained."""
    from layerwise.foundations.errors import InputError, describe
    from layerwise.studies.tangent_alignment.classification import CLASSES, check_present

    check_present(config.task().images)
    if config.directions > config.examples * CLASSES or config.examples > config.trained_on:
        given = f"{config.directions} directions of {config.examples} examples, of {config.trained_on}"
        raise InputError(describe(given, f"at most {CLASSES} directions an example", "ask for fewer"))


def cells(config: Config) -> list[Cell]:
    """One."""
    return [Cell(key=config.network)]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed: train, and step along both kinds of directions."""
    from layerwise.studies.tangent_alignment.sensitivity import sensitivity
    from layerwise.training import train

    task = config.task()
    for seed in seeds:
        split = task.split(seed)
        model = train(task.problem(split), task.sgd, seed=seed, measures=(), device=task.device).model.eval()
        found = sensitivity(
            model,
            split.x[: config.examples],
            split.held_x[:2000],
            directions=config.directions,
            size=config.size,
            seed=seed,
        )
        middle = {name: statistics.median(getattr(found, name).tolist()) for name in found._fields}
        values = {"ratio": middle["leading"] / middle["random"], **middle}
        series = {name: getattr(found, name).tolist() for name in found._fields}
        series["over_random"] = [change / middle["random"] for change in series["leading"]]
        series["direction"] = list(range(1, config.directions + 1))
        yield Row(seed=seed, values=values, series=series)


def claims(config: Config) -> list[Claim]:
    """By how much leading directions matter more, and that the linearization says so."""
    (cell,) = cells(config)
    common: dict[str, Any] = {"seeds": config.seeds, "span": POSITIVE, "note": NOTE}
    return [
        Claim(
            name=f"{cell.key}/ratio",
            statement=f"Held-out outputs move further along the {config.directions} leading right singular vectors "
            "of the Jacobian than along as many random directions of the same length (ratio of the medians).",
            quantity=value(cell.key, "ratio"),
            relation=">=",
            target=5.0,
            origin="paper",
            source=SOURCE,
            **common,
        ),
        Claim(
            name=f"{cell.key}/theory",
            statement="That ratio is what eigenvalues of the kernel of training images say, √λ over √(Tr K / P), up "
            "to a factor of two (measured over predicted).",
            quantity=combined(cell.key, ["ratio", "theory"], lambda ratio, theory: ratio / theory),
            relation="within",
            target=(0.5, 2.0),
            **common,
        ),
    ]


NOTE = "The limits are ours. On seeds 100 to 102 of preset laptop: 14.2 to 14.3, and .93 to .95 of the prediction."


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """The change of outputs by direction."""
    (cell,) = cells(config)
    measured = {"leading": "leading directions", "random": "random directions"}
    compared = {"over_random": ("measured", "line"), "theory": ("linearization", "dashed")}
    return [
        Figure(
            name="sensitivity",
            title="Outputs along directions of parameter space",
            caption=f"Median over seeds; the band spans all. Steps of {config.size:g} of the norm of the parameters; "
            "change of the outputs at held-out images, root mean square.",
            panels=[
                Panel(
                    title="change of outputs",
                    x_label="direction",
                    y_label="root mean square",
                    y_scale="log",
                    curves=[band(records, cell.key, "direction", name, label) for name, label in measured.items()],
                ),
                Panel(
                    title="over the median random direction",
                    x_label="direction",
                    y_label="ratio",
                    y_scale="log",
                    curves=[
                        band(records, cell.key, "direction", name, label, style)
                        for name, (label, style) in compared.items()
                    ],
                ),
            ],
        )
    ]


EXPERIMENT = Experiment(
    name="sensitivity",
    title="Directions of parameter space that outputs are sensitive to",
    paper=PAPER,
    figure=SOURCE,
    summary=(
        "After a training, parameters are moved by steps of one length along the leading right singular vectors of "
        "the Jacobian of a hundred training images, and along random directions; what is measured is how far the "
        "outputs at held-out images move. The network of the embedded setting is that of the experiment spectrum."
    ),
    presets={
        "smoke": Config(seeds=1, steps=60, examples=30, directions=20),
        "laptop": Config(),
        "paper": Config(images="cifar10", network="vgg11", trained_on=50_000, lr=0.01, steps=5000, device="cuda"),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop some seconds; paper minutes on a GPU",
    check=check,
)
