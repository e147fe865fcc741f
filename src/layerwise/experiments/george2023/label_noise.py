"""Figure 2 of chapter 5 of George (2023), bottom: noisy labels, in lazy training and in feature learning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure
from layerwise.experiments.george2023 import PAPER
from layerwise.experiments.george2023.equal_progress import (
    CELL,
    check_thresholds,
    difference,
    panel,
    series,
    values,
)
from layerwise.experiments.over_seeds import combined, value
from layerwise.experiments.progress import within_cell

if TYPE_CHECKING:
    from layerwise.studies.training_regimes.regimes import Regimes
    from layerwise.studies.training_regimes.task import Finished, Log, Run

SOURCE = "Figure 2 of chapter 5, bottom"
METRICS = ("noisy", "test", "accuracy", "signs")
RISEN = 1.05
"""A run is over when its test loss is so many times its least, and all thresholds are reached."""


@dataclass(frozen=True, kw_only=True)
class TwoRegimes:
    """Images, a network, and two values of α at which it is trained."""

    seeds: int = 3
    """Divisions of the images, networks and orders of the data."""
    images: str = "digits"
    """"digits" (8 × 8, with scikit-learn) or "cifar10" (in the folder that LAYERWISE_DATA names)."""
    network: str = "mlp"
    """"mlp" for digits; "vgg11", "resnet18" or "resnet34", without batch norm, for CIFAR-10."""
    hidden: tuple[int, ...] = (256, 256)
    width: int = 64
    train: int = 1000
    alphas: tuple[float | int, ...] = (1, 100)
    """Feature learning, and lazy."""
    thresholds: tuple[float, ...] = (1.0, 0.7, 0.5)
    """Losses at which regimes are compared: of clean examples, or the mean training loss."""
    lr: float | int = 0.01
    momentum: float | int = 0.9
    batch: int = 125
    epochs: int = 1500
    """At most; a run ends at the last threshold, or when its test loss rises."""
    growth: float | int = 1.02
    """Factor between two steps that are logged."""
    device: str = "cpu"

    def regimes(self) -> Regimes:
        """How it is trained."""
        from layerwise.studies.training_regimes.regimes import Regimes

        names = ("network", "hidden", "width", "momentum", "batch", "epochs", "growth")
        return Regimes(**{name: getattr(self, name) for name in names})

    def names(self) -> tuple[str, str]:
        """Of the two runs of a seed."""
        first, second = (f"α={alpha:g}" for alpha in self.alphas)
        return first, second


@dataclass(frozen=True, kw_only=True)
class Config(TwoRegimes):
    """The share of wrong labels."""

    fraction: float | int = 0.15
    """Of wrong labels."""


def check(config: Any) -> None:
    """What does not go together, or is not there, is said before anything is trained."""
    from layerwise.foundations.errors import InputError, describe
    from layerwise.studies.training_regimes.examples import check_images

    check_thresholds(config.thresholds)
    config.regimes()
    if len(config.alphas) != 2 or min(config.alphas) <= 0 or len(set(config.alphas)) < 2:
        raise InputError(describe(f"alphas={config.alphas}", "two different values above 0", "pass e.g. (1, 100)"))
    if (config.network == "mlp") != (config.images == "digits"):
        given = f"network={config.network!r} for {config.images}"
        raise InputError(describe(given, '"mlp" for digits, another for cifar10', "change one"))
    check_images(config.images, config.train)


def cells(config: Config) -> list[Cell]:
    """One: both regimes share starts and data."""
    return [Cell(key=CELL)]


def trained(config: Config, seeds: Sequence[int]) -> Iterator[tuple[int, dict[str, Finished]]]:
    """The runs of each seed by name."""
    from layerwise.studies.training_regimes.examples import Split, noisy
    from layerwise.studies.training_regimes.task import Run

    def done(run: Run, log: Log) -> bool:
        return min(log["clean"]) <= config.thresholds[-1] and log["test"][-1] > RISEN * min(log["test"])

    for together in [seeds] if config.network == "mlp" else [[seed] for seed in seeds]:
        task = noisy([Split(config.images, seed, config.train, config.device) for seed in together], config.fraction)
        runs = [Run(seed, alpha, config.lr) for seed in together for alpha in config.alphas]
        found = config.regimes().run(task, runs, done, within_cell())
        for seed in together:
            mine = [run for run in found if run.run.seed == seed]
            yield seed, dict(zip(config.names(), mine, strict=True))


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """All seeds at once where the network is fully connected."""
    from layerwise.studies.training_regimes.regimes import falling, linearity

    along = falling(2.2, config.thresholds[-1])
    for seed, finished in trained(config, seeds):
        found: dict[str, Any] = values(finished, "clean", config.thresholds, METRICS)
        for name, one in finished.items():
            found |= {f"best/{name}": min(one.log["test"]), f"steps/{name}": one.log["step"][-1]}
            found |= {f"{measure}/{name}": number for measure, number in linearity(one).items()}
        yield Row(seed=seed, values=found, series=series(finished, "clean", along, METRICS))


def claims(config: Config) -> list[Claim]:
    """The thesis shows curves; the numbers are ours, and hold on the digits."""
    learning, lazy = config.names()
    common: dict[str, Any] = {"origin": "paper", "source": SOURCE, "seeds": config.seeds}
    explored = (
        "Thresholds of digits were fixed on seeds 100 to 103, whose differences are .22 to .31, .40 to .50 and .42 to "
        ".46 at clean losses 1, .7 and .5; best test losses .29 and .32 against .38 and .40."
    )
    found = [
        Claim(
            name=f"noise-later@{threshold:g}",
            statement=f"Where clean examples have a loss of {threshold:g}, noisy ones have a higher loss in feature "
            f"learning than in lazy training: noise is learned later (difference, {learning} minus {lazy}).",
            quantity=difference("noisy", threshold, learning, lazy),
            relation=">=",
            target=0.15 if config.images == "digits" else 0.0,
            note=explored,
            **common,
        )
        for threshold in config.thresholds
    ]
    return [
        *found,
        Claim(
            name="best-test-loss",
            statement="The best test loss is lower in feature learning (lazy minus it).",
            quantity=combined(CELL, [f"best/{learning}", f"best/{lazy}"], lambda a, b: b - a),
            relation=">=",
            target=0.05 if config.images == "digits" else 0.0,
            note=f"The least of the logged test losses; a run ends when its test loss is {RISEN:g} times its least. "
            + explored,
            **common,
        ),
        Claim(
            name="lazy-signs",
            statement="Lazy training leaves the signs of its units as they were (sign similarity at the end).",
            quantity=value(CELL, f"signs/{lazy}"),
            relation=">=",
            target=0.95,
            span=(0, 1),
            **common,
        ),
        Claim(
            name="learning-signs",
            statement="Feature learning changes them (sign similarity at the end).",
            quantity=value(CELL, f"signs/{learning}"),
            relation="<=",
            target=0.85,
            span=(0, 1),
            **common,
        ),
    ]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Losses and signs over the loss of clean examples."""
    labels = dict(
        zip(
            config.names(),
            (f"feature learning, α = {config.alphas[0]:g}", f"lazy, α = {config.alphas[1]:g}"),
            strict=True,
        )
    )
    shown = {"noisy": "loss of noisy examples", "test": "test loss", "signs": "sign similarity"}
    panels = [
        panel(records, "clean", metric, labels, "loss of clean examples", title) for metric, title in shown.items()
    ]
    caption = (
        f"Median over seeds; the band spans all. {config.images}, {config.fraction:.0%} of the training labels are "
        "wrong. Training goes from right to left."
    )
    return [Figure(name="label-noise", title="Noisy labels at equal progress", caption=caption, panels=panels)]


EXPERIMENT = Experiment(
    name="label-noise",
    title="Noisy labels, in lazy training and in feature learning",
    paper=PAPER,
    figure=SOURCE,
    summary=(
        "A network is trained as f₀ + α (f − f₀), with the rate divided by α², on images some of whose labels were "
        "replaced by a wrong class. Both regimes have the same start and the same batches, and are compared where "
        "clean examples have the same loss. Test labels are right. Preset paper has CIFAR-10 (40 000 and 10 000 of its "
        "training images) and ResNet-18 without batch norm; the thesis trains for 200 and 1000 epochs, the preset for "
        "at most 120, and from fresh weights where the released code begins at step 10 of a shared run."
    ),
    presets={
        "smoke": Config(seeds=1, hidden=(64,), train=400, thresholds=(1.0,), epochs=150, lr=0.05, growth=1.2),
        "laptop": Config(),
        "paper": Config(
            seeds=1,
            images="cifar10",
            network="resnet18",
            train=40_000,
            thresholds=(1.75, 1.5, 1.25),
            epochs=120,
            growth=1.2,
            device="cuda",
        ),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop two minutes; paper an hour on a GPU",
    ranges={"momentum": (0, 1), "fraction": (0, 1)},
    check=check,
)
