"""Appendices A.5.1 and A.5.2 of George (2023): other batch sizes, and a rate that is halved on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.george2023 import PAPER
from layerwise.experiments.george2023.autoencoder import lower
from layerwise.experiments.george2023.conv_nets import LABELS, Training, check_names, panels, trained
from layerwise.experiments.george2023.conv_nets import check as check_training
from layerwise.experiments.over_seeds import bars
from layerwise.foundations.errors import InputError, describe

SOURCE = "Appendices A.5.1 and A.5.2"
OPTIONS = ("network", "method", "batch", "halved")


@dataclass(frozen=True, kw_only=True)
class Config(Training):
    """Batch sizes, and when the rate is halved."""

    methods: tuple[str, ...] = ("sgd", "kfac", "ekfac-ra")
    batches: tuple[int, ...] = (50, 100, 200, 400)
    """Of every method, at a constant rate."""
    batch: int = 100
    """At which a constant rate is compared with one that is halved."""
    parts: int = 4
    """Of the epochs: the rate is halved after each."""


def key(network: str, method: str, batch: int, halved: bool = False) -> str:
    """The cell of a method."""
    return f"{network}/{method}/{batch}" + ("/halved" if halved else "")


def cells(config: Config) -> list[Cell]:
    """One a network, a method and a batch size; at one size also with a rate that is halved."""
    check_names(config)
    ways = [(batch, False) for batch in dict.fromkeys((*config.batches, config.batch))] + [(config.batch, True)]
    every = [(*pair, *way) for pair in product(config.networks, config.methods) for way in ways]
    return [Cell(key=key(*one), options=dict(zip(OPTIONS, one, strict=True))) for one in every]


def check(config: Config) -> None:
    """As for `conv-nets`; and every part must have an epoch."""
    check_training(config)
    if not 2 <= config.parts <= config.epochs:
        given = f"parts={config.parts} of epochs={config.epochs}"
        raise InputError(describe(given, "two parts or more, of an epoch at least", "change one of them"))


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed: choose options for this batch size and schedule, then train with them on a fresh seed."""
    options = dict(cell.options)
    after = config.epochs / config.parts if options.pop("halved") else None
    yield from trained(config, seeds, **options, halve_epochs=after, refresh_batch=config.batch)


def claims(config: Config) -> list[Claim]:
    """Only that the advantage outlives the schedule: what batch sizes do is shown, not judged."""
    first = _first(config)
    if first is None or "ekfac-ra" not in config.methods:
        return []
    common: dict[str, Any] = {"origin": "paper", "source": SOURCE, "seeds": config.seeds}
    return [
        Claim(
            name=f"{network}/advantage-under-halving",
            statement=f"{network}: with a rate that is halved on the way, EKFAC-ra still ends below {LABELS[first]} "
            "(difference of the training losses at the best options of each).",
            quantity=lower(key(network, "ekfac-ra", config.batch, True), key(network, first, config.batch, True)),
            relation=">",
            target=0.0,
            **common,
        )
        for network in config.networks
    ]


def _first(config: Config) -> str | None:
    """SGD, as it was asked for."""
    return next((name for name in ("sgd-bn", "sgd") if name in config.methods), None)


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """For each network, the last loss by batch size, and curves under both schedules."""
    found = []
    for network in config.networks:
        sizes = sorted({cell.options["batch"] for cell in cells(config)})
        schedules = {
            key(network, method, config.batch, halved): LABELS[method] + (", halved" if halved else "")
            for method, halved in product(config.methods, (False, True))
        }
        caption = (
            f"Median over seeds; the band spans all. {config.trials} trials for each method, batch size and schedule. "
            f"Left: the best of them. Others: fresh seeds, batches of {config.batch}, the rate constant or halved "
            f"after every {config.epochs / config.parts:g} epochs; seconds are those of the first seed."
        )
        last = Panel(
            title=f"{network}: training loss at the end",
            x_label="batch size",
            y_label="cross-entropy",
            x_scale="log",
            y_scale="log",
            curves=[_by_size(records, network, method, sizes) for method in config.methods],
        )
        found.append(
            Figure(
                name=f"batch-and-schedule-{network}",
                title=f"{network} on {config.images}: batch sizes and schedules",
                caption=caption,
                panels=[last, *panels(records, network, schedules)],
            )
        )
    return found


def _by_size(records: Sequence[Record], network: str, method: str, sizes: Sequence[int]) -> Curve:
    """The loss at the best options against the batch size; sizes at which nothing trained are left out."""
    found = [(size, bars(records, key(network, method, size), {"best": ""})[0]) for size in sizes]
    kept = [(size, bar) for size, bar in found if bar.y[0] == bar.y[0]]  # not NaN
    return Curve(
        label=LABELS[method],
        x=[size for size, _ in kept],
        y=[bar.y[0] for _, bar in kept],
        low=[bar.low[0] for _, bar in kept if bar.low],
        high=[bar.high[0] for _, bar in kept if bar.high],
    )


EXPERIMENT = Experiment(
    name="batch-and-schedule",
    title="Convolutional networks: batch sizes and schedules",
    paper=PAPER,
    figure=SOURCE,
    summary=(
        "The comparison of `conv-nets` at several batch sizes, all with as many epochs, and with a rate that is halved "
        "after each of four equal parts of the training. Options are chosen for each batch size and schedule, with "
        "equal trials; bases and inverses are renewed after as many steps at all batch sizes. The thesis does not list "
        "its batch sizes, and halves every 20 epochs."
    ),
    presets={
        "smoke": Config(
            seeds=1,
            methods=("sgd", "ekfac-ra"),
            examples=300,
            width=16,
            epochs=4,
            rates=(0.3, 0.1),
            dampings=(0.03,),
            trials=2,
            batches=(50,),
            batch=50,
        ),
        "laptop": Config(seeds=2, batches=(100, 200, 400)),
        "paper": Config(
            seeds=1,
            networks=("vgg11", "resnet34"),
            methods=("sgd-bn", "kfac", "ekfac-ra"),
            images="cifar10",
            width=64,
            epochs=20,
            rates=(0.1, 0.03, 0.01, 0.003),
            trials=8,
            batches=(100, 200, 500, 1000),
            batch=500,
            refresh_epochs=5,
            device="cuda",
            tf32=True,
        ),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke some seconds, laptop a minute with --engine processes; paper hours on a GPU",
    check=check,
)
