"""Figure 3 of chapter 4 of George (2023): a deep auto-encoder under K-FAC, EKFAC and others, equal trials for all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.george2023 import PAPER
from layerwise.experiments.over_seeds import band
from layerwise.experiments.progress import within_cell
from layerwise.foundations.errors import InputError, describe

LABELS = {
    "sgd": "SGD",
    "sgd-bn": "SGD, batch norm",
    "adam": "Adam",
    "adam-bn": "Adam, batch norm",
    "kfac": "KFAC",
    "ekfac": "EKFAC",
    "ekfac-ra": "EKFAC-ra",
    "shampoo": "Shampoo",
    "soap": "SOAP",
    "muon": "Muon",
}
THESIS = ("sgd", "kfac", "ekfac", "ekfac-ra")
FRESH = 10_000
"""Added to a seed: the seed of the run that is reported, which had no part in the choice of options."""
LOSS = "train/loss"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The auto-encoder, and how options are chosen."""

    seeds: int = 3
    """Searches, each with a network of its own."""
    methods: tuple[str, ...] = THESIS
    images: str = "digits"
    """"digits" (8 × 8, 64-48-24-12) or "mnist" (784-1000-500-250-30)."""
    batch: int = 200
    epochs: int = 30
    rates: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03)
    dampings: tuple[float, ...] = (0.1, 0.01, 0.001)
    trials: int = 12
    """Options that are tried for each method: the grid, then draws around its best point."""
    refresh: int = 50
    """Steps between new bases or inverses."""
    device: str = "cpu"


def cells(config: Config) -> list[Cell]:
    """One a method."""
    unknown = set(config.methods) - set(LABELS)
    if unknown or not config.methods:
        raise InputError(
            describe(f"methods {', '.join(sorted(unknown)) or 'none'}", f"some of {', '.join(LABELS)}", "name them")
        )
    return [Cell(key=name) for name in config.methods]


def check(config: Config) -> None:
    """The grid must fit into the trials, for otherwise methods would get different numbers of them."""
    points = len(config.rates) * len(config.dampings)
    if not 0 < points <= config.trials or len(config.dampings) > 3:
        given = f"trials={config.trials} for {len(config.rates)} rates and {len(config.dampings)} dampings"
        raise InputError(describe(given, "a trial for each of their pairs, and at most three dampings", "change one"))
    if config.images not in ("digits", "mnist"):
        raise InputError(describe(f"images={config.images!r}", "digits or mnist", "name one"))


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed: choose options by the training loss at the end, then train with them on a fresh seed."""
    from layerwise.studies.fisher_geometry.autoencoder import method, problem
    from layerwise.training import search

    given = problem(config.images, config.batch, config.epochs, batch_norm=cell.key.endswith("-bn"))
    steps = len(list(given.batches("train", 0)))
    chosen = method(cell.key, config.rates, config.dampings, config.refresh)
    for seed in seeds:

        def shown(function: Callable, runs: Iterable, seed: int = seed) -> Iterator:
            every = list(runs)
            return map(function, within_cell().track(every, f"seed {seed}", len(every)))

        found = search(
            given,
            chosen,
            trials=config.trials,
            seeds=(seed,),
            fresh=(seed + FRESH,),
            score=LOSS,
            every=steps,
            device=config.device,
            map=shown,
        )
        tried = [[*t.options.values(), None if math.isinf(t.score) else round(t.score, 4)] for t in found.trials]
        values: dict[str, float | str] = {
            "diverged": float(sum(bool(t.diverged) for t in found.trials)),
            "at_edge": ", ".join(found.at_edge),
            "options": ", ".join(chosen.grid),
            "trials": json.dumps(tried),
        }
        series: Mapping[str, Sequence[float | int]] = {}
        if found.options is not None:
            values["best"] = found.score_of(found.options)
            values |= {f"chosen/{name}": float(value) for name, value in found.options.items()}
            values["final"] = found.reported[0].score
            series = {} if found.reported[0].diverged else found.reported[0].series
        yield Row(seed=seed, values=values, series=series)


def lower(below: str, above: str) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """By how much the loss of one method at its best options is below another's."""

    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        ours, others = by_seed(records, below, "best"), by_seed(records, above, "best")
        return {seed: others[seed] - ours[seed] for seed in sorted(ours.keys() & others.keys())}

    return quantity


def claims(config: Config) -> list[Claim]:
    """Who is below whom at the end, each at the best of its options."""
    pairs = (
        ("ekfac", "kfac", 0.0, "EKFAC ends below K-FAC"),
        ("ekfac-ra", "kfac", 1.0, "EKFAC with running scalings ends below K-FAC"),
        ("kfac", "sgd", 0.0, "K-FAC ends below SGD with momentum"),
        ("ekfac-ra", "sgd", 0.0, "EKFAC with running scalings ends below SGD with momentum"),
    )
    return [
        Claim(
            name=f"{below}-below-{above}",
            statement=f"{statement} (difference of the training losses at the best options of each).",
            quantity=lower(below, above),
            relation=">",
            target=target,
            origin="paper",
            source="Figure 3 of chapter 4",
            seeds=config.seeds,
        )
        for below, above, target, statement in pairs
        if {below, above} <= set(config.methods)
    ]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """The training loss by step and by second, each method with the options chosen for it, on fresh seeds."""
    panels = [
        Panel(
            title=f"training loss by {x}",
            x_label=label,
            y_label="cross-entropy of an image",
            y_scale="log",
            curves=[band(records, name, x, LOSS, LABELS[name]) for name in config.methods],
        )
        for x, label in (("step", "step"), ("seconds", "seconds of training"))
    ]
    caption = (
        f"Median over seeds; the band spans all. {config.trials} trials for each method, chosen by the loss at the "
        "end; the runs shown have fresh seeds. Seconds are those of the first of them."
    )
    return [Figure(name="autoencoder", title="A deep auto-encoder", caption=caption, panels=panels)]


EXPERIMENT = Experiment(
    name="autoencoder",
    title="A deep auto-encoder, equal trials for every method",
    paper=PAPER,
    figure="Figure 3 of chapter 4",
    summary=(
        "A sigmoid auto-encoder with untied weights is trained on the binary cross-entropy, summed over pixels (the "
        "thesis does not say which loss). For each method every pair of a rate and a second option (damping; momentum "
        "or ε for the others) is tried, then random draws around the best pair; the training loss at the end decides, "
        "and the chosen options are trained on a fresh seed. K-FAC and EKFAC have factors of the current batch and "
        "gradients of the loss itself, without momentum. EKFAC-ra averages its scalings over steps."
    ),
    presets={
        "smoke": Config(
            seeds=1, methods=("sgd", "ekfac-ra"), epochs=10, rates=(1.0, 0.3), dampings=(0.01,), trials=2, refresh=10
        ),
        "laptop": Config(),
        "paper": Config(
            methods=tuple(LABELS),
            images="mnist",
            epochs=50,
            rates=(0.1, 0.01, 0.001, 0.0001),
            dampings=(0.1, 0.01, 0.001),
            trials=36,
            device="cuda",
        ),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke some seconds, laptop five minutes with --engine processes; paper hours on a GPU",
    check=check,
)
