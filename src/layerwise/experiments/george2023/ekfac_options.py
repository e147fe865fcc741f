"""What chapter 4 of George (2023) leaves open: which options K-FAC, EKFAC and EKFAC-ra want on the auto-encoder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.george2023 import PAPER
from layerwise.experiments.george2023.autoencoder import LABELS
from layerwise.experiments.over_seeds import bars
from layerwise.experiments.progress import within_cell
from layerwise.experiments.scratch import scratch
from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown

METHODS = ("kfac", "ekfac", "ekfac-ra")
PLAIN = "sampled"
VARIANTS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    PLAIN: ({}, "labels drawn from the model"),
    "empirical": ({"estimator": "empirical"}, "labels of the data (thesis)"),
    "product": ({"damping_split": "exact"}, "λ on the product"),
    "refresh-5": ({"refresh_every": 5, "factor_every": 1}, "bases of ≤ 5 steps"),
    "refresh-100": ({"refresh_every": 100}, "bases of ≤ 100 steps"),
    "averaged": ({"factor_decay": 0.95, "factor_every": 1}, "averaged factors"),
    "decay-0": ({"scaling_decay": 0.0}, "ρ = 0"),
    "decay-0.95": ({"scaling_decay": 0.95}, "ρ = 0.95"),
    "decay-0.99": ({"scaling_decay": 0.99}, "ρ = 0.99"),
}
"""What is changed in a variant, and its name in figures. All but "empirical" draw labels from the model, have factors
of the current batch, λ split between two factors, and ρ = 0.75."""


CHECKED = (
    "Two statements that were fixed on seeds 100 to 102 were refuted by seeds 0 to 2: EKFAC with scalings of the batch "
    "also wants its damping on the factors, and K-FAC does lose with old inverses. This is what is said instead, "
    "checked on seeds 3 to 5."
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The auto-encoder of digits, and how options are chosen."""

    seeds: int = 3
    methods: tuple[str, ...] = METHODS
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Those of ρ are run for ekfac-ra alone."""
    batch: int = 200
    epochs: int = 15
    rates: tuple[float, ...] = (0.3, 0.1, 0.03)
    dampings: tuple[float, ...] = (0.1, 0.01, 0.001, 0.0001)
    refresh: int = 50
    """Steps between new bases or inverses, but for the variants that change it."""


def cells(config: Config) -> list[Cell]:
    """One a method and a variant of it."""
    for kind, given, known in (("method", config.methods, METHODS), ("variant", config.variants, VARIANTS)):
        for name in given:
            if name not in known:
                raise NameLookupError(unknown(kind, name, known))
        if len(set(given)) < len(given) or not given:
            raise InputError(describe(f"{kind}s={given}", "at least one, and each once", "name them once"))
    found = [
        Cell(key=f"{method}/{variant}", options={"method": method, "variant": variant})
        for method in config.methods
        for variant in config.variants
        if method == "ekfac-ra" or not variant.startswith("decay")
    ]
    if not found:
        given = f"methods={config.methods} and variants={config.variants}"
        raise InputError(describe(given, "variants of ρ with ekfac-ra", "add ekfac-ra"))
    return found


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Try the grid for all seeds at once; each seed has its own best options."""
    from layerwise.studies.fisher_geometry.autoencoder import curvature_method, problem
    from layerwise.training import search

    name, variant = cell.options["method"], cell.options["variant"]
    labels = {} if variant == "empirical" else {"estimator": "sampled", "likelihood": "bernoulli"}
    method = curvature_method(name, config.rates, config.dampings, config.refresh, **labels, **VARIANTS[variant][0])
    given = problem("digits", config.batch, config.epochs)
    folder = scratch()

    def shown(function: Callable, runs: Iterable) -> Iterable:
        every = list(runs)
        return within_cell().track(map(function, every), f"{cell.key}, dampings", len(every))

    found = search(
        given,
        method,
        trials=len(method.points()),
        seeds=tuple(seeds),
        every=len(list(given.batches("train", 0))),
        stacked="lr",
        keep=None if folder is None else folder / f"{'-'.join(map(str, seeds))}.trials",
        map=shown,
    )
    for seed in seeds:
        own = [trial for trial in found.trials if trial.seed == seed]
        best = min(own, key=lambda trial: trial.score)
        values: dict[str, Any] = {
            "best": best.score,
            "diverged": float(sum(bool(trial.diverged) for trial in own)),
            "options": ", ".join(method.grid),
            "trials": json.dumps([[*t.options.values(), None if t.diverged else round(t.score, 4)] for t in own]),
        }
        series: Mapping[str, Sequence[float | int]] = {}
        if math.isfinite(best.score):
            values["at_edge"] = ", ".join(method.at_edge(best.options))
            values |= {f"chosen/{option}": float(value) for option, value in best.options.items()}
            series = {name: best.series[name] for name in ("step", "train/loss")}
        yield Row(seed=seed, values=values, series=series)


def higher(one: str, other: str) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """By how much the loss of one cell at its best options is above that of another."""

    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        ours, others = by_seed(records, one, "best"), by_seed(records, other, "best")
        return {seed: ours[seed] - others[seed] for seed in sorted(ours.keys() & others.keys())}

    return quantity


def _more(first: Callable, second: Callable) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        ours, others = first(records), second(records)
        return {seed: ours[seed] - others[seed] for seed in sorted(ours.keys() & others.keys())}

    return quantity


def claims(config: Config) -> list[Claim]:
    """Differences of training losses, each at the best of its grid."""
    kfac, ekfac, fast = (f"{name}/{PLAIN}" for name in METHODS)
    at_best = "(difference of the training losses, each at the best of its rates and dampings)"
    stated = [
        (
            f"sampled-{name}",
            (f"{name}/empirical", f"{name}/{PLAIN}"),
            higher(f"{name}/empirical", f"{name}/{PLAIN}"),
            (">", limit),
            f"{LABELS[name]} ends lower with labels drawn from the model than with those of the data",
        )
        for name, limit in (("kfac", 2.0), ("ekfac", 0.0), ("ekfac-ra", 0.5))
    ]
    stated += [
        (
            "kfac-needs-split-damping",
            ("kfac/product", kfac),
            higher("kfac/product", kfac),
            (">", 2.0),
            "K-FAC ends lower with √λ on each factor than with λ on their product",
        ),
        (
            "ekfac-ra-needs-no-split",
            ("ekfac-ra/product", fast),
            higher("ekfac-ra/product", fast),
            ("<", 1.0),
            "EKFAC-ra ends as low with λ on the product",
        ),
        (
            "running-below-batch",
            (fast, ekfac),
            higher(fast, ekfac),
            ("<", 0.3),
            "With labels drawn from the model, EKFAC-ra ends as low as EKFAC",
        ),
        (
            "running-above-batch-empirical",
            ("ekfac-ra/empirical", "ekfac/empirical"),
            higher("ekfac-ra/empirical", "ekfac/empirical"),
            (">", 0.0),
            "With labels of the data, EKFAC-ra ends above EKFAC",
        ),
        *(
            (
                f"refresh-{name}",
                (f"{name}/refresh-5", f"{name}/refresh-100"),
                higher(f"{name}/refresh-100", f"{name}/refresh-5"),
                ("<", 1.0),
                f"{LABELS[name]} loses little if its bases may be 100 steps old instead of 5",
            )
            for name in ("ekfac", "ekfac-ra")
        ),
        (
            "refresh-kfac",
            ("kfac/refresh-5", "kfac/refresh-100", "ekfac/refresh-5", "ekfac/refresh-100"),
            _more(higher("kfac/refresh-100", "kfac/refresh-5"), higher("ekfac/refresh-100", "ekfac/refresh-5")),
            (">", 0.5),
            "K-FAC loses more than EKFAC if its inverses may be 100 steps old instead of 5",
        ),
        *(
            (
                f"decay-{decay}",
                (f"ekfac-ra/decay-{decay}", fast),
                higher(f"ekfac-ra/decay-{decay}", fast),
                ("within", (-0.7, 0.7)),
                f"EKFAC-ra with ρ = {decay} ends where it does with ρ = 0.75",
            )
            for decay in ("0", "0.95")
        ),
        (
            "decay-too-long",
            ("ekfac-ra/decay-0.99", fast),
            higher("ekfac-ra/decay-0.99", fast),
            (">", 0.0),
            "EKFAC-ra with ρ = 0.99 ends above ρ = 0.75: an average over more steps than the training's early part",
        ),
        *(
            (
                f"averaged-{name}",
                (f"{name}/averaged", f"{name}/{PLAIN}"),
                higher(f"{name}/averaged", f"{name}/{PLAIN}"),
                ("within", (-1.5, 1.0)),
                f"{LABELS[name]} does as well with factors of one batch as with averaged ones",
            )
            for name in METHODS
        ),
    ]
    present = {cell.key for cell in cells(config)}
    return [
        Claim(
            name=name,
            statement=f"{statement} {at_best}.",
            quantity=quantity,
            relation=relation,
            target=target,
            seeds=config.seeds,
            note=CHECKED if name in ("ekfac-ra-needs-no-split", "refresh-kfac") else "Fixed on seeds 100 to 102.",
        )
        for name, needed, quantity, (relation, target), statement in stated
        if set(needed) <= present
    ]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """A bar for every variant, a panel for each method."""
    present = {cell.key for cell in cells(config)}
    panels = []
    for method in config.methods:
        shown: list[Curve] = []
        for variant in config.variants:
            if (key := f"{method}/{variant}") in present:
                shown += bars(records, key, {"best": VARIANTS[variant][1]})
        spread = [
            Curve(label=bar.label, x=[place], y=bar.y, low=bar.low, high=bar.high, style="bars")
            for place, bar in enumerate(shown)
        ]
        panels.append(
            Panel(title=LABELS[method], x_label="", y_label="training loss at the best options", curves=spread)
        )
    caption = (
        f"Median over seeds, from the least to the largest; {len(config.rates)} rates × {len(config.dampings)} "
        f"dampings for each bar, {config.epochs} epochs."
    )
    return [Figure(name="ekfac-options", title="Options of K-FAC and EKFAC", caption=caption, panels=panels)]


EXPERIMENT = Experiment(
    name="ekfac-options",
    title="Which options K-FAC and EKFAC want",
    paper=PAPER,
    figure="beyond the thesis",
    summary=(
        "The thesis does not say how EKFAC-ra averages, which labels the curvature is taken at, or how damping is "
        "split. Here each is changed by itself on the auto-encoder of digits, and every variant has a grid of rates "
        "and dampings of its own; the training loss at the end is compared, each seed at its best options. "
        "What matters most is the labels: drawn from the model (the Fisher matrix) instead of the data's (the "
        "empirical one), K-FAC ends far lower, and EKFAC-ra is no longer above EKFAC. K-FAC and EKFAC want their "
        "damping on the factors; EKFAC-ra takes either. EKFAC's bases may be old, K-FAC's inverses may not. ρ matters "
        "little up to 0.95."
    ),
    presets={
        "smoke": Config(
            seeds=1,
            methods=("ekfac-ra",),
            variants=(PLAIN, "empirical"),
            epochs=5,
            rates=(0.3, 0.1),
            dampings=(0.1,),
            refresh=15,
        ),
        "laptop": Config(variants=tuple(name for name in VARIANTS if name != "averaged")),
        "paper": Config(
            seeds=5, epochs=30, rates=(1.0, 0.3, 0.1, 0.03, 0.01), dampings=(1.0, 0.1, 0.01, 0.001, 0.0001, 1e-5)
        ),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke some seconds, laptop four minutes with --engine processes, paper half an hour",
    whole_cells=True,
)
