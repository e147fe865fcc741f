"""Figure 3 of chapter 4 of George (2023): a deep auto-encoder under K-FAC, EKFAC and others, equal trials for all."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.george2023 import PAPER
from layerwise.experiments.over_seeds import band
from layerwise.experiments.progress import within_cell
from layerwise.experiments.scratch import scratch
from layerwise.foundations.errors import InputError, describe, not_one_of, unknown

if TYPE_CHECKING:
    from layerwise.training import Choice, Method, Problem

LABELS = {
    "sgd": "SGD",
    "sgd-bn": "SGD, batch norm",
    "adam": "Adam",
    "adam-bn": "Adam, batch norm",
    "kfac": "KFAC",
    "ekfac": "EKFAC",
    "ekfac-ra": "EKFAC-ra",
    "kfac-sampled": "KFAC, labels of the model",
    "ekfac-sampled": "EKFAC, labels of the model",
    "ekfac-ra-sampled": "EKFAC-ra, labels of the model",
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
    """Runs that are reported, each with a network of its own."""
    choosing: int = 0
    """Seeds by which options are chosen, once for all that are reported; 0: a search for each of `seeds`, by itself."""
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
    tf32: bool = False
    """Products of float32 in TF32, where the device has it."""
    processes: int = 1
    """Over which the trials of a method are spread, those of one second option together; they may share a GPU."""


def cells(config: Config) -> list[Cell]:
    """One a method."""
    if not config.methods:
        raise InputError(describe("no methods", f"some of {', '.join(LABELS)}", "name one or more"))
    for name in config.methods:
        if name not in LABELS:
            raise InputError(unknown("method", name, LABELS))
    return [Cell(key=name) for name in config.methods]


def check(config: Config) -> None:
    """The grid must fit into the trials, for otherwise methods would get different numbers of them."""
    points = len(config.rates) * len(config.dampings)
    if not 0 < points <= config.trials or len(config.dampings) > 4:
        given = f"trials={config.trials} for {len(config.rates)} rates and {len(config.dampings)} dampings"
        raise InputError(describe(given, "a trial for each of their pairs, and at most four dampings", "change one"))
    if config.images not in ("digits", "mnist"):
        raise InputError(not_one_of("images", config.images, ("digits", "mnist")))
    if points == 1 and config.trials > 1:
        given = f"trials={config.trials} for a single rate and a single damping"
        raise InputError(describe(given, "two values of one of them, between which to draw", "give more, or one trial"))
    if len(set(config.methods)) < len(config.methods):
        raise InputError(describe(f"methods {', '.join(config.methods)}", "each once", "name them once"))
    if config.images == "mnist":
        from layerwise.data import mnist

        for split in ("train", "test"):
            mnist(split, limit=1, verify=False, progress=False)


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Choose options by the training loss at the end, then train with them on fresh seeds, one after the other."""
    from layerwise.foundations.tf32 import tf32
    from layerwise.training.workers import workers

    with tf32(config.tf32), workers(config.processes) as over:
        yield from (_chosen_once if config.choosing else _chosen_each)(config, cell, seeds, over)


def _chosen_each(config: Config, cell: Cell, seeds: Sequence[int], over: Callable) -> Iterator[Row]:
    for seed in seeds:
        found = _search(config, cell, (seed,), over)
        values = {"best": found.score_of(found.options) if found.options else math.inf}
        yield _row(config, cell, found, seed, values)


def _chosen_once(config: Config, cell: Cell, seeds: Sequence[int], over: Callable) -> Iterator[Row]:
    """The loss of a reported run counts: it had no part in the choice."""
    found = _search(config, cell, range(config.choosing), over)
    for seed in seeds:
        row = _row(config, cell, found, seed, {})
        yield replace(row, values={**row.values, "best": row.values.get("final", math.inf)})


def _search(config: Config, cell: Cell, seeds: Sequence[int], over: Callable) -> Choice:
    from layerwise.training import search

    def shown(function: Callable, runs: Iterable) -> Iterable:
        every = list(runs)
        return within_cell().track(over(function, every), f"{cell.key}, trials", len(every))

    given, method, every = _asked(config, cell)
    folder = scratch()
    keep = None if folder is None else folder / f"{'-'.join(map(str, seeds))}.trials"
    return search(
        given,
        method,
        trials=config.trials,
        seeds=tuple(seeds),
        score=LOSS,
        every=every,
        device=config.device,
        stacked="lr",
        keep=keep,
        map=shown,
    )


def _asked(config: Config, cell: Cell) -> tuple[Problem, Method, int]:
    """The problem, the method, and the steps of an epoch."""
    from layerwise.studies.fisher_geometry.autoencoder import method, problem

    bn = cell.key.endswith("-bn")
    given = problem(config.images, config.batch, config.epochs, batch_norm=bn, device=config.device)
    chosen = method(cell.key, config.rates, config.dampings, config.refresh)
    return given, chosen, len(list(given.batches("train", 0)))


def _row(config: Config, cell: Cell, found: Choice, seed: int, best: Mapping[str, float]) -> Row:
    """The chosen options trained on a fresh seed, alone and in this process, so that its seconds can be compared."""
    from layerwise.training.trials import Trainer

    given, method, every = _asked(config, cell)
    tried = [[*t.options.values(), t.seed, None if math.isinf(t.score) else round(t.score, 4)] for t in found.trials]
    values: dict[str, Any] = {
        "diverged": float(sum(bool(t.diverged) for t in found.trials)),
        "at_edge": ", ".join(found.at_edge),
        "options": ", ".join(method.grid),
        "trials": json.dumps(tried),
        **best,
    }
    series: Mapping[str, Sequence[float | int]] = {}
    if found.options is not None:
        make = functools.partial(method.make, **method.fixed)
        trainer = Trainer(problem=given, make=make, score=LOSS, every=every, device=config.device)
        reported = trainer((found.options, seed + FRESH))
        values |= {f"chosen/{name}": float(value) for name, value in found.options.items()}
        values["final"] = reported.score
        series = {} if reported.diverged else reported.series
    return Row(seed=seed, values=values, series=series)


def lower(below: str, above: str) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """By how much one method's loss at its best options is below another's; −∞ where nothing trained with it."""

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
        "gradients of the loss itself, without momentum, unless their labels are drawn from the model (see "
        "ekfac-options for what that changes). EKFAC-ra averages its scalings over steps."
    ),
    presets={
        "smoke": Config(
            seeds=1, methods=("sgd", "ekfac-ra"), epochs=5, rates=(1.0, 0.3), dampings=(0.01,), trials=2, refresh=10
        ),
        "laptop": Config(),
        "paper": Config(
            choosing=2,
            methods=tuple(LABELS),
            images="mnist",
            batch=500,
            epochs=20,
            rates=(1.0, 0.1, 0.01, 0.001),
            dampings=(0.1, 0.01, 0.001, 0.0001),
            trials=36,
            device="cuda",
            tf32=True,
            processes=6,
        ),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke some seconds, laptop five minutes with --engine processes; paper hours on a GPU",
    check=check,
    whole_cells=True,
)
