"""Figures 5 and 6 of chapter 4 of George (2023): VGG11 and ResNet34 on CIFAR-10, equal trials for every method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.george2023 import PAPER
from layerwise.experiments.george2023.autoencoder import FRESH, lower
from layerwise.experiments.george2023.autoencoder import LABELS as WITHOUT_ADAMW
from layerwise.experiments.over_seeds import POSITIVE, band
from layerwise.experiments.progress import within_cell
from layerwise.experiments.scratch import scratch
from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown

LABELS = WITHOUT_ADAMW | {"adamw": "AdamW"}
FAST = "ekfac-ra"
CURVATURE = ("kfac", "ekfac", FAST)
FAMILY = (*CURVATURE, *(f"{name}-sampled" for name in CURVATURE))
"""K-FAC's: their statistics are taken at labels of the data, or at labels drawn from the model."""
NETWORKS = {"digits": ("three-convolutions",), "cifar10": ("vgg11", "resnet18", "resnet34")}
"""By the images that they take."""
SOURCE = "Figures 5 and 6 of chapter 4"
ON_PAR = (
    "With SUA and inverses that are kept for an epoch, K-FAC diverges at the rate 0.3 and the damping 0.1, where it "
    "does best without SUA; with SUA and new inverses at every step (batches of 100) it does not. At what is left to "
    "it, it is above SGD rather than below: on seeds 1000 to 1011 by 0.009 on average, 95 % interval [-0.0003, 0.017]."
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Networks, images, and how options are chosen."""

    seeds: int = 3
    """Searches, each with a network of its own."""
    networks: tuple[str, ...] = ("three-convolutions",)
    methods: tuple[str, ...] = ("sgd", *CURVATURE)
    """Those that end in "-bn" have batch norm in the network."""
    images: str = "digits"
    """"digits" (8 × 8, for three-convolutions) or "cifar10" (for vgg11, resnet18 and resnet34)."""
    examples: int | None = None
    """Images to train on; None: all."""
    width: int = 32
    """Of the networks: 64 is VGG11's and ResNet's own, and 16 channels of three-convolutions."""
    epochs: int = 5
    rates: tuple[float, ...] = (0.3, 0.1, 0.03)
    dampings: tuple[float, ...] = (0.1, 0.01)
    trials: int = 6
    """Options that are tried for each method: the grid, then draws around its best point."""
    refresh_epochs: float | int = 1.0
    """Epochs between new bases or inverses of K-FAC and EKFAC."""
    device: str = "cpu"
    tf32: bool = False
    """Whether a GPU may round factors of float32 products to ten bits."""
    bfloat16: bool = False
    """Whether forward and backward passes are in bfloat16 (autocast); weights, statistics and steps are in float32."""


@dataclass(frozen=True, kw_only=True)
class Config(Training):
    """Batches, and how K-FAC sees a kernel's offsets."""

    batch: int = 125
    """Of K-FAC and EKFAC."""
    batch_small: int = 125
    """Of the others."""
    sua: tuple[bool, ...] = (True,)
    """Whether K-FAC and EKFAC take activations at different offsets of a kernel to be uncorrelated; both values make
    cells of both, those without have "kfc" in their names."""


def key(network: str, method: str, sua: bool = True) -> str:
    """The cell of a method."""
    return f"{network}/{method}" + ("" if sua else "/kfc")


def cells(config: Config) -> list[Cell]:
    """One a network, a method and, for K-FAC and EKFAC, a way to see a kernel's offsets."""
    check_names(config)
    ways = [
        (network, method, sua)
        for network, method in product(config.networks, config.methods)
        for sua in (config.sua if method in FAMILY else (True,))
    ]
    return [Cell(key=key(*way), options=dict(zip(("network", "method", "sua"), way, strict=True))) for way in ways]


def check_names(config: Training) -> None:
    """Of images, networks and methods; a network takes images of one kind, and K-FAC has no batch norm here."""
    for kind, given, known in (
        ("images", (config.images,), NETWORKS),
        ("network", config.networks, [name for names in NETWORKS.values() for name in names]),
        ("method", config.methods, LABELS),
    ):
        for name in given:
            if name not in known:
                raise NameLookupError(unknown(kind, name, known))
    other = [name for name in config.networks if name not in NETWORKS[config.images]]
    if other:
        expected = f"some of {', '.join(NETWORKS[config.images])} for images={config.images!r}"
        raise InputError(describe(f"networks={other}", expected, "change one of them"))


def check(config: Training) -> None:
    """The grid must fit into the trials, for otherwise methods would get different numbers; the data must be there."""
    check_names(config)
    points = len(config.rates) * len(config.dampings)
    if not points <= config.trials or len(config.dampings) > 3:
        given = f"trials={config.trials} for {len(config.rates)} rates and {len(config.dampings)} dampings"
        raise InputError(describe(given, "a trial for each of their pairs, and at most three dampings", "change one"))
    from layerwise.studies.fisher_geometry.image_classifiers import TRAINING, check_present, method

    if config.examples is not None and config.examples > TRAINING[config.images]:
        given = f"examples={config.examples} of {config.images}"
        raise InputError(describe(given, f"at most {TRAINING[config.images]}", "leave it out for all of them"))
    for name in config.methods:
        method(name, config.rates, config.dampings, refresh=1)
    check_present(config.images)


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed: choose options by the training loss at the end, then train with them on a fresh seed."""
    batch = config.batch if cell.options["method"] in FAMILY else config.batch_small
    yield from trained(config, seeds, batch=batch, **cell.options)


def trained(
    config: Training,
    seeds: Sequence[int],
    network: str,
    method: str,
    batch: int,
    sua: bool = True,
    halve_epochs: float | None = None,
    refresh_batch: int | None = None,
) -> Iterator[Row]:
    """The rows of a method: its search, and its curves on a fresh seed.

    Steps between refreshes are those of `refresh_epochs` with batches of `refresh_batch`, by default of `batch`.
    """
    from layerwise.foundations.tf32 import tf32
    from layerwise.studies.fisher_geometry import image_classifiers as study

    images = study.splits(config.images, config.examples, config.device)
    given = study.problem(network, images, batch, config.epochs, method.endswith("-bn"), config.width, config.bfloat16)
    examples = len(images["train"][0])
    refresh = max(1, round(config.refresh_epochs * math.ceil(examples / (refresh_batch or batch))))
    halve = None if halve_epochs is None else max(1, round(halve_epochs * math.ceil(examples / batch)))
    chosen = study.method(method, config.rates, config.dampings, refresh, sua, halve)
    for seed in seeds:

        def shown(function: Callable, runs: Iterable, seed: int = seed) -> Iterator:
            every = list(runs)
            return map(function, within_cell().track(every, f"seed {seed}", len(every)))

        folder = scratch()
        with tf32(config.tf32):
            values, series = study.compared(
                given,
                chosen,
                keep=None if folder is None else folder / f"{seed}.trials",
                trials=config.trials,
                seed=seed,
                fresh=seed + FRESH,
                device=config.device,
                map=shown,
            )
        yield Row(seed=seed, values=values, series=series)


def sooner(fast: str, slow: str) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """Seconds until one cell's training loss is below another's last one, over the seconds of that.

    ∞: it never is, or it diverged; 0: the other diverged.
    """

    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        by_cell = [{r["seed"]: r["series"] for r in records if r["cell"] == cell} for cell in (fast, slow)]
        found = {}
        for seed in sorted(set(by_cell[0]) & set(by_cell[1])):
            ours, other = (series[seed] for series in by_cell)
            if not ours or not other:
                found[seed] = 0.0 if ours else math.inf
                continue
            after = zip(ours["seconds"], ours["train/loss"], strict=True)
            below = [seconds for seconds, loss in after if loss <= other["train/loss"][-1]]
            found[seed] = below[0] / other["seconds"][-1] if below else math.inf
        return found

    return quantity


def claims(config: Config) -> list[Claim]:
    """Who is below whom at the end, each at the best of its options; on CIFAR-10 also who is there first."""
    toy = config.images == "digits"
    first = "sgd" if toy else "sgd-bn"
    pairs = [("ekfac", "kfac"), (FAST, first), *([("kfac", first), ("ekfac", first)] if toy else [(FAST, "kfac")])]
    found = []
    for network, sua in product(config.networks, config.sua):
        ours = [_below(config, network, sua, *pair) for pair in pairs]
        found += [claim for claim in (*ours, None if toy else _sooner(config, network, sua)) if claim is not None]
    return found


def _below(config: Config, network: str, sua: bool, below: str, above: str) -> Claim | None:
    toy, on_par = config.images == "digits", sua and (below, above) == ("kfac", "sgd")
    if not {below, above} <= set(config.methods) or (on_par and config.seeds == 1):
        return None
    common: dict[str, Any] = {"seeds": config.seeds}
    if on_par:
        common |= {"test": "mean", "expected": "fails", "why": ON_PAR}
    elif not toy:
        common |= {"origin": "paper", "source": SOURCE}
    under, over = key(network, below, sua), key(network, above, sua or above not in FAMILY)
    return Claim(
        name=f"{under}-below-{above}",
        statement=f"{network}: {_name(below, sua)} ends below {_name(above, sua)} (difference of the training losses "
        "at the best options of each).",
        quantity=lower(under, over),
        relation=">",
        target=0.0,
        **common,
    )


def _sooner(config: Config, network: str, sua: bool) -> Claim | None:
    if not {FAST, "kfac"} <= set(config.methods):
        return None
    fast, slow = key(network, FAST, sua), key(network, "kfac", sua)
    return Claim(
        name=f"{fast}-sooner",
        statement=f"{network}: {_name(FAST, sua)} reaches the last training loss of {_name('kfac', sua)} in less "
        "time (share of its seconds, on fresh seeds; 0 where that diverged).",
        quantity=sooner(fast, slow),
        relation="<",
        target=1.0,
        span=POSITIVE,
        origin="paper",
        source=SOURCE,
        seeds=config.seeds,
    )


def _name(method: str, sua: bool) -> str:
    return LABELS[method] + ("" if sua or method not in FAMILY else " without SUA")


PANELS = (
    ("training loss by epoch", "epoch", "epoch", "train/loss", "cross-entropy"),
    ("training loss by second", "seconds", "seconds of training", "train/loss", "cross-entropy"),
    ("test error by epoch", "epoch", "epoch", "test/error", "share of the test images"),
)


def panels(records: Sequence[Record], network: str, labels: Mapping[str, str]) -> list[Panel]:
    """Training loss by epoch and by second, and test error: from cells to their labels."""
    return [
        Panel(
            title=f"{network}: {title}",
            x_label=x_label,
            y_label=y_label,
            y_scale="log",
            curves=[band(records, cell, x, y, label) for cell, label in labels.items()],
        )
        for title, x, x_label, y, y_label in PANELS
    ]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """One a network."""
    caption = (
        f"Median over seeds; the band spans all. {config.trials} trials for each method, chosen by the training loss "
        "at the end; the runs shown have fresh seeds. Seconds are those of the first of them."
    )
    found = []
    for network in config.networks:
        labels = {
            cell.key: _name(cell.options["method"], cell.options["sua"])
            for cell in cells(config)
            if cell.options["network"] == network
        }
        found.append(
            Figure(
                name=f"conv-nets-{network}",
                title=f"{network} on {config.images}",
                caption=caption,
                panels=panels(records, network, labels),
            )
        )
    return found


EXPERIMENT = Experiment(
    name="conv-nets",
    title="Convolutional networks, equal trials for every method",
    paper=PAPER,
    figure=SOURCE,
    summary=(
        "Networks without batch norm under K-FAC and EKFAC, with it under SGD and Adam. For each method every pair of "
        "a rate and a second option is tried, then random draws around the best pair; the loss of all training images "
        "at the end decides, and the chosen options are trained on a fresh seed, whose curves are shown. (The thesis "
        "takes other options for every epoch of a curve.) K-FAC and EKFAC have factors of the current batch and "
        "gradients of the loss itself, without momentum; layers take turns to be renewed, and are renewed more often "
        "in the first steps. Images are not augmented."
    ),
    presets={
        "smoke": Config(
            seeds=1,
            methods=("sgd", "kfac", "ekfac-ra"),
            examples=300,
            width=16,
            epochs=4,
            batch=50,
            batch_small=50,
            rates=(0.3, 0.1),
            dampings=(0.03,),
            trials=2,
        ),
        "laptop": Config(sua=(True, False)),
        "paper": Config(
            seeds=1,
            networks=("vgg11", "resnet34"),
            methods=("sgd-bn", "adam-bn", *CURVATURE, "soap", "shampoo", "muon", "adamw"),
            images="cifar10",
            width=64,
            epochs=20,
            rates=(0.1, 0.03, 0.01, 0.003),
            trials=8,
            batch=500,
            batch_small=200,
            refresh_epochs=5,
            device="cuda",
            tf32=True,
        ),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke some seconds, laptop a minute and a half with --engine processes; paper hours on a GPU",
    check=check,
)
