"""Beyond Wu (2023): is the Kronecker structure of layer Hessians a fact of networks, or of SGD?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.over_seeds import POSITIVE, bars
from layerwise.experiments.progress import within_cell
from layerwise.experiments.scratch import scratch
from layerwise.experiments.wu2024 import PAPER
from layerwise.experiments.wu2024.trained_networks import PAPER_SIZES, SMOKE, Networks, check, least, over_layers
from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown

SGD = "sgd"
LABELS = {SGD: "SGD", "adam": "Adam", "muon": "Muon", "soap": "SOAP", "kfac": "KFAC"}
SLOW = "slow"
"""Before the names of values of networks that were trained at a smaller rate."""
MEASURES = {
    "spectral": "relative error of the Kronecker product",
    "overlap@c-1": "overlap of leading spaces",
    "rank_one": "rank-one-ness of eigenvectors",
    "along_mean": "their part along the mean input",
    "outputs/fraction": "part of tr E[M] in c − 1 eigenvalues",
    "alignment": "mean and leading input",
    "ratio": "γ₁/γ₂ of E[xxᵀ]",
}
CHOOSING = 1000
"""The first of the seeds by which rates are chosen; none of them is reported."""


@dataclass(frozen=True, kw_only=True)
class Config(Networks):
    """Networks, optimizers, and how their rates are chosen; `lr` and `epochs` are not used."""

    methods: tuple[str, ...] = tuple(LABELS)
    """"sgd" (momentum .9), "adam", "muon", "soap", "kfac"."""
    slow: tuple[str, ...] = (SGD, "adam", "kfac")
    """Those of them that train at a smaller rate, too."""
    slower: float | int = 20
    """By how much that rate is smaller."""
    rates: tuple[float, ...] = (0.1, 0.03, 0.01, 0.003)
    """Of Adam and of updates of its size; ten times as large for SGD."""
    trials: int = 5
    """Rates that are tried for each method: these, then draws around the best of them."""
    choosing: int = 2
    """Seeds by which a rate is chosen, by the training loss at the end of `trial_steps`."""
    trial_steps: int = 60
    loss: float = 0.02
    """The training loss at which networks are compared."""
    steps: int = 8000
    """After which a run that has not come to it ends."""


def check_methods(config: Config) -> None:
    """What does not go together, or is not there."""
    check(config)
    cells(config)
    if len(config.rates) > config.trials or (len(config.rates) == 1 and config.trials > 1):
        given = f"trials={config.trials} for {len(config.rates)} rates"
        raise InputError(describe(given, "a trial for each rate, and two rates to draw between", "change one of them"))
    if config.seeds > CHOOSING:
        raise InputError(
            describe(f"seeds={config.seeds}", f"at most {CHOOSING}", "take fewer: other seeds choose the rates")
        )


def cells(config: Config) -> list[Cell]:
    """One a setting and a method."""
    for name in (*config.methods, *config.slow):
        if name not in LABELS:
            raise NameLookupError(unknown("method", name, LABELS))
    return [
        Cell(key=f"{setting}/{name}", options={"setting": setting, "method": name})
        for setting in config.settings
        for name in config.methods
    ]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Choose a rate, then train with it (and slower) on the seeds that are reported, up to the loss."""
    from layerwise.studies.hessian_structure.networks import fit
    from layerwise.studies.hessian_structure.optimizers import chosen, layers, trained_to

    def shown(function: Callable, runs: Iterable) -> Iterator:
        every = list(runs)
        return map(function, within_cell().track(every, f"{cell.key}, trials", len(every)))

    name, task = cell.options["method"], config.task(cell.options["setting"])
    folder = scratch()
    keep = None if folder is None else folder / "rates.trials"
    choosing = range(CHOOSING, CHOOSING + config.choosing)
    found = chosen(task, name, config.rates, config.trials, config.trial_steps, choosing, keep, shown).require()
    assert found.options is not None
    best = float(found.options["lr"])
    rates = {"": best} | ({f"{SLOW}/": best / config.slower} if name in config.slow else {})
    for seed in within_cell().track(seeds, f"{cell.key}, seeds", len(seeds)):
        values: dict[str, Any] = {"at_edge": ", ".join(found.at_edge)}
        for which, rate in rates.items():
            end = trained_to(task, name, rate, config.loss, config.steps, seed)
            values |= {f"{which}rate": rate, f"{which}steps": end.steps, f"{which}stopped": end.stopped}
            if end.stopped:  # then it is not comparable
                continue
            values |= {f"{which}{key}": value for key, value in fit(task, end.model, seed).items()}
            for layer, facts in layers(task, end, seed, config.leading).items():
                values |= {f"{which}{layer}/{key}": facts.values[key] for key in MEASURES if key in facts.values}
        yield Row(seed=seed, values=values)


def mean(values: Sequence[float]) -> float:
    """Over layers."""
    return sum(values) / len(values)


def over(
    above: tuple[str, Sequence[str]], below: tuple[str, Sequence[str]], name: str
) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """A claim's quantity: the mean of a measure over layers of one cell, over that of another, seed by seed."""

    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        ours, others = (over_layers(cell, layers, name, mean)(records) for cell, layers in (above, below))
        return {seed: ours[seed] / others[seed] for seed in sorted(ours.keys() & others.keys())}

    return quantity


def claims(config: Config) -> list[Claim]:
    """The structure is there whoever trains; how clean it is, the rate decides."""
    found: list[Claim] = []
    ours: dict[str, Any] = {"seeds": config.seeds, "note": NOTE}
    for setting in config.settings:
        layers, full = config.layers(setting), not config.short(setting)
        slower = [f"{SLOW}/{layer}" for layer in layers]
        for name in config.methods:
            cell, label = f"{setting}/{name}", LABELS[name]
            for measure, limit, text in (
                ("rank_one", 0.8, "leading eigenvectors are nearly outer products (mean ‖Mat h‖₂/‖Mat h‖_F of c − 1"),
                ("along_mean", 0.4, "with the leading input as a factor (mean ‖Mat(h) v₁‖² of c − 1"),
                ("overlap@c-1", 0.35, "their space is near that of the Kronecker product (overlap"),
            ):
                statement = f"{label}: {text}, least over layers)."
                target = limit if full else 0.6 * limit
                found.append(least(cell, layers, measure, target, statement, span=(0, 1), **ours))
            if name != SGD and SGD in config.methods and setting.startswith("digits"):
                found.append(
                    Claim(
                        name=f"{cell}/as-sgd",
                        statement=f"{label}: leading spaces are as near to those of the Kronecker product as under SGD "
                        "(ratio of mean overlaps over layers).",
                        quantity=over((cell, layers), (f"{setting}/{SGD}", layers), "overlap@c-1"),
                        relation="within",
                        target=(0.8, 1.5),
                        span=POSITIVE,
                        **ours,
                    )
                )
            if name in config.slow and full:
                found += [
                    Claim(
                        name=f"{cell}/slower-is-nearer",
                        statement=f"{label}: at a rate {config.slower:g} times smaller they are nearer (ratio of mean "
                        "overlaps over layers).",
                        quantity=over((cell, slower), (cell, layers), "overlap@c-1"),
                        relation=">=",
                        target=1.03,
                        span=POSITIVE,
                        **ours,
                    ),
                    Claim(
                        name=f"{cell}/slow-error",
                        statement=f"{label}: and the error of the Kronecker product is moderate (relative, in spectral "
                        "norms, largest over layers).",
                        quantity=over_layers(cell, slower, "spectral", max),
                        relation="<=",
                        target=0.6,
                        span=POSITIVE,
                        **ours,
                    ),
                ]
    return found


NOTE = (
    "On seeds 100 to 104, at the rates that training loss chose (.1 for SGD, .03 for the others), least and largest "
    "over layers of the overlap are .45 – .88 (SGD), .49 – .87 (Adam), .57 – .89 (Muon), .58 – .87 (SOAP) and .54 – "
    ".87 (KFAC), of rank-one-ness .84 – .96 for all, and the relative spectral error goes up to 1.43, .88, .74, .56 "
    "and .89. At small rates (.005, .001 and .002; seeds 100 and 101) the overlap is .74 – .83, .74 – .91 and .66 – "
    ".92, and the error at most .35, .33 and .46. With momentum .9 and a rate of .005, SGD ends where plain SGD at "
    ".05 does: it is the rate, not the momentum."
)


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """A measure a panel, layers side by side, a bar a method."""
    found = []
    for setting in config.settings:
        panels = []
        for measure, title in MEASURES.items():
            curves: list[Curve] = []
            for name in config.methods:
                cell = f"{setting}/{name}"
                last = config.layers(setting)[1:]
                curves += bars(records, cell, {f"{layer}/{measure}": f"{LABELS[name]}, {layer}" for layer in last})
                if name in config.slow:
                    slow = {f"{SLOW}/{layer}/{measure}": f"{LABELS[name]}, slow, {layer}" for layer in last}
                    curves += bars(records, cell, slow)
            placed = [replace(curve, x=[place]) for place, curve in enumerate(curves)]
            panels.append(Panel(title=title, x_label="", y_label=title, curves=placed))
        caption = (
            f"Networks at a training loss of {config.loss:g}; median over seeds, with least and largest. Rates are "
            f"chosen on other seeds, with equal trials; slow: {config.slower:g} times smaller. Layers but the first."
        )
        name, title = f"structure-{setting.replace('/', '-')}", f"{setting}: layer Hessians by who trains"
        found.append(Figure(name=name, title=title, caption=caption, panels=panels))
    return found


EXPERIMENT = Experiment(
    name="structure-by-optimizer",
    title="Layer Hessians by who trains: a fact of networks or of SGD?",
    paper=PAPER,
    figure="beyond the thesis",
    summary=(
        "The networks of the other experiments, trained by SGD with momentum, Adam, Muon, SOAP and KFAC to one "
        "training loss, each at the best of equally many rates, chosen on seeds that are not reported; three of them "
        "also at a rate twenty times smaller. The structure is no fact of SGD: leading eigenvectors are outer products "
        "with the mean input whoever trains, and those of the Kronecker product overlap with them as far as under SGD, "
        "or further. How clean it is, the rate decides: at small rates SGD and Adam end with the same numbers, and at "
        "the rates at which they are fastest the Kronecker product is off by half of the norm or so, at times by more. "
        "KFAC gains less from a small rate: inputs of its layers are less dominated by their mean (γ₁/γ₂ is half of "
        "SGD's)."
    ),
    presets={
        "smoke": Config(
            **SMOKE,
            methods=("sgd", "kfac"),
            slow=("sgd",),
            slower=2,
            rates=(0.01, 0.003),
            trials=2,
            choosing=1,
            trial_steps=10,
            loss=0.5,
            steps=300,
        ),
        "laptop": Config(),
        "paper": replace(Config(**PAPER_SIZES), seeds=3, settings=("mnist/200-200",), trial_steps=1000, steps=100_000),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke two seconds, laptop two minutes; paper an hour on a GPU",
    check=check_methods,
    whole_cells=True,
)
