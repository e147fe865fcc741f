"""Beyond George (2023): does a layer-wise preconditioner align the tangent kernel faster, or further?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.george2023 import PAPER
from layerwise.experiments.over_seeds import POSITIVE
from layerwise.experiments.progress import within_cell
from layerwise.experiments.scratch import scratch
from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown

if TYPE_CHECKING:
    from layerwise.studies.tangent_alignment.classification import Task

LABELS = {"sgd": "SGD", "adam": "Adam", "muon": "Muon", "soap": "SOAP", "kfac": "KFAC", "ekfac": "EKFAC"}
LAYERWISE = ("muon", "soap", "kfac", "ekfac")
MEASURES = {
    "cka": "CKA with the labels",
    "effective_rank": "effective rank",
    "eigenvalue/max": "largest eigenvalue",
    "test/accuracy": "test accuracy",
    "step": "step",
}
CHOOSING = 1000
"""The first of the seeds by which rates are chosen; none of them is reported."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A task, methods, and how their rates are chosen."""

    seeds: int = 3
    """Runs that are reported."""
    methods: tuple[str, ...] = tuple(LABELS)
    images: str = "digits"
    """"digits"; "mnist" or "cifar10" (in the folder that LAYERWISE_DATA names)."""
    network: str = "mlp"
    """"mlp"; "vgg11", "vgg19" or "resnet18" for CIFAR-10."""
    trained_on: int = 1400
    batch: int = 100
    rates: tuple[float, ...] = (0.03, 0.01, 0.003, 0.001)
    """Of Adam and of updates of its size; ten times as large for SGD."""
    trials: int = 5
    """Rates that are tried for each method: these, then draws around the best of them."""
    choosing: int = 2
    """Seeds by which a rate is chosen, by the training loss at the end of `trial_steps`."""
    trial_steps: int = 100
    losses: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03, 0.01)
    """Training losses at which kernels are compared."""
    steps: int = 1000
    """After which a run that has not come to the last of them ends."""
    examples: int = 100
    """Held-out images of the kernel."""
    device: str = "cpu"

    def task(self, steps: int) -> Task:
        """The network and its images."""
        from layerwise.studies.tangent_alignment.classification import Task

        names = ("images", "network", "trained_on", "batch", "device")
        return Task(steps=steps, **{name: getattr(self, name) for name in names})


def check(config: Config) -> None:
    """What does not go together, or is not there, is said before anything is trained."""
    from layerwise.studies.tangent_alignment.classification import check_present

    check_present(config.task(config.steps).images)
    if len(config.rates) > config.trials or (len(config.rates) == 1 and config.trials > 1):
        given = f"trials={config.trials} for {len(config.rates)} rates"
        raise InputError(describe(given, "a trial for each rate, and two rates to draw between", "change one of them"))
    if len(config.losses) < 2 or list(config.losses) != sorted(set(config.losses), reverse=True):
        raise InputError(describe(f"losses={config.losses}", "falling numbers, two or more", "pass e.g. (1.0, 0.1)"))
    if config.seeds > CHOOSING:
        raise InputError(
            describe(f"seeds={config.seeds}", f"at most {CHOOSING}", "take fewer: other seeds choose the rates")
        )


def cells(config: Config) -> list[Cell]:
    """One a method."""
    for name in config.methods:
        if name not in LABELS:
            raise NameLookupError(unknown("method", name, LABELS))
    return [Cell(key=name) for name in config.methods]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Choose a rate, then train with it on the seeds that are reported, up to the last of the losses."""
    from layerwise.studies.tangent_alignment.optimizers import at_losses, chosen

    def shown(function: Callable, runs: Iterable) -> Iterator:
        every = list(runs)
        return map(function, within_cell().track(every, f"{cell.key}, trials", len(every)))

    choosing = range(CHOOSING, CHOOSING + config.choosing)
    folder = scratch()
    keep = None if folder is None else folder / "rates.trials"
    task = config.task(config.trial_steps)
    found = chosen(task, cell.key, config.rates, config.trials, choosing, keep, shown).require()
    assert found.options is not None
    rate = float(found.options["lr"])
    for seed in seeds:
        trained = at_losses(config.task(config.steps), cell.key, rate, config.losses, seed, config.examples)
        series = trained.series
        values: dict[str, Any] = {"rate": rate, "at_edge": ", ".join(found.at_edge), "stopped": trained.stopped}
        for k, loss in enumerate(series["loss"]):
            place = "start" if k == 0 else f"{loss:g}"
            values |= {f"{name}@{place}": series[name][k] for name in MEASURES}
        yield Row(seed=seed, values=values, series=series)


def over(method: str, other: str, name: str) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """A claim's quantity: a value of one method over that of another, seed by seed; none where one was not reached."""

    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        ours, others = by_seed(records, method, name), by_seed(records, other, name)
        return {seed: ours[seed] / others[seed] for seed in sorted(ours.keys() & others.keys())}

    return quantity


def claims(config: Config) -> list[Claim]:
    """Stated from seeds 100 to 105, before any that is reported was run: sooner, not further, with less collapse."""
    if "sgd" not in config.methods:
        return []
    loss, embedded = config.losses[-2:][0], config.images == "digits"
    searched = config.trials >= 5
    found = []
    for method in config.methods:
        limits = LIMITS.get(method)
        if limits is None:
            continue
        if limits.steps is not None:
            found.append(
                _claim(
                    config,
                    f"{method}-sooner",
                    f"{LABELS[method]} comes to a training loss of {loss:g} in fewer steps than SGD (share of its "
                    "steps).",
                    over(method, "sgd", f"step@{loss:g}"),
                    "<=",
                    limits.steps if embedded and searched else 1.0,
                )
            )
        if embedded:
            found.append(
                _claim(
                    config,
                    f"{method}-not-further",
                    f"At a training loss of {loss:g} CKA with the labels is the same under {LABELS[method]} as under "
                    "SGD, up to a quarter or so (ratio).",
                    over(method, "sgd", f"cka@{loss:g}"),
                    "within",
                    (0.75, 1.3),
                )
            )
        low, high = limits.rank if embedded else (1.0, 1000)
        if method in LAYERWISE:
            text = f"At a training loss of {loss:g} the kernel has a higher effective rank under {LABELS[method]}"
            which: tuple[str, Any] = (">=", low)
        else:
            text = f"At a training loss of {loss:g} the kernel has the same effective rank under {LABELS[method]}"
            which = ("within", (low, high))
        if embedded or method in LAYERWISE:
            rank = over(method, "sgd", f"effective_rank@{loss:g}")
            found.append(_claim(config, f"{method}-rank", f"{text} as under SGD (ratio).", rank, *which))
    return found


class Limits(NamedTuple):
    """Of a method over SGD, at one training loss."""

    steps: float | None
    rank: tuple[float, float]
    """Least and largest ratio of effective ranks; of a layer-wise method only the former counts."""


LIMITS = {
    "adam": Limits(None, (0.8, 1.25)),
    "muon": Limits(0.9, (1.03, 10)),
    "soap": Limits(0.8, (1.1, 10)),
    "kfac": Limits(0.6, (1.25, 10)),
    "ekfac": Limits(0.7, (1.15, 10)),
}
NOTE = (
    "On seeds 100 to 105 of preset laptop, means at a training loss of 0.03 under SGD, Adam, Muon, SOAP, KFAC and "
    "EKFAC: steps 61, 50, 39, 34, 24, 25; CKA .130, .120, .121, .123, .128, .136 (before training .037), ratios to "
    "SGD from .83 to 1.17; effective rank 231, 227, 283, 308, 346, 316 (before training 400), least ratios to SGD "
    ".91, 1.10, 1.18, 1.41, 1.28. Nothing was run on CIFAR-10 before its claims were stated."
)


def _claim(config: Config, name: str, statement: str, quantity: Any, relation: str, target: Any) -> Claim:
    return Claim(
        name=name,
        statement=statement,
        quantity=quantity,
        relation=relation,
        target=target,
        span=POSITIVE,
        note=NOTE,
        seeds=config.seeds,
    )


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Measures by training loss, one curve a method."""
    panels = [
        Panel(
            title=title,
            x_label="training loss",
            y_label=title,
            x_scale="log",
            y_scale="log" if name == "eigenvalue/max" else "linear",
            curves=[_curve(config, records, method, name) for method in config.methods],
        )
        for name, title in MEASURES.items()
    ]
    caption = (
        f"Median over seeds; the band spans all. Tangent kernel of {config.examples} held-out images where the "
        "training loss first is as low; training goes from right to left. Rates are chosen on other seeds, with "
        "equal trials."
    )
    title = "Tangent kernels at equal training loss, by who trains"
    return [Figure(name="alignment-by-optimizer", title=title, caption=caption, panels=panels)]


def _curve(config: Config, records: Sequence[Record], method: str, name: str) -> Curve:
    """Over the losses that some seed reached."""
    columns = {loss: list(by_seed(records, method, f"{name}@{loss:g}").values()) for loss in config.losses}
    found = {loss: values for loss, values in columns.items() if values}
    return Curve(
        label=LABELS[method],
        x=list(found),
        y=[statistics.median(values) for values in found.values()],
        low=[min(values) for values in found.values()],
        high=[max(values) for values in found.values()],
    )


EXPERIMENT = Experiment(
    name="alignment-by-optimizer",
    title="The alignment of tangent kernels, by who trains",
    paper=PAPER,
    figure="beyond the thesis",
    summary=(
        "The training of the experiment spectrum under SGD, Adam, Muon, SOAP, KFAC and EKFAC, each at the best of "
        "equally many rates, chosen on seeds that are not reported. Kernels of held-out images are compared at equal "
        "training loss, not at equal steps. Layer-wise preconditioners get there in fewer steps; there, the kernel "
        "is as well aligned with the labels as SGD's, no further, but has collapsed less: its trace is spread over "
        "more directions. So it is not that they learn features that SGD does not find, as on the anisotropic data "
        "of Zhang et al. (2025): on these images they find features as well aligned, and keep more of the others."
    ),
    presets={
        "smoke": Config(
            seeds=1,
            methods=("sgd", "kfac"),
            rates=(0.01, 0.003),
            trials=2,
            choosing=1,
            trial_steps=20,
            losses=(1.0, 0.3, 0.1),
            examples=30,
            steps=60,
        ),
        "laptop": Config(),
        "paper": Config(
            images="cifar10",
            network="vgg11",
            trained_on=50_000,
            trial_steps=1000,
            losses=(1.5, 1.0, 0.7, 0.5, 0.3),
            steps=10_000,
            device="cuda",
        ),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke some seconds, laptop three minutes; paper an hour on a GPU",
    check=check,
    whole_cells=True,
)
