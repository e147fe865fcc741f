"""Beyond Wu (2023): steps on the dictionary by K-FAC and its relatives, in place of Adam's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.over_seeds import POSITIVE, band
from layerwise.experiments.progress import within_cell
from layerwise.experiments.wu2024 import PAPER
from layerwise.experiments.wu2024.both_objectives import across
from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown

if TYPE_CHECKING:
    from layerwise.studies.masked_sparse_coding.comparison import Setting

METHODS = ("adam", "kfac", "foof", "shampoo", "soap", "muon")
LABELS = {"adam": "Adam", "kfac": "KFAC", "foof": "FOOF", "shampoo": "Shampoo", "soap": "SOAP", "muon": "Muon"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Masked trainings by several optimizers, each with the same rates to choose from."""

    seeds: int = 2
    methods: tuple[str, ...] = ("adam", "kfac", "foof", "shampoo")
    rates: tuple[float, ...] = (2e-3, 4e-3)
    """Of all methods; their `lr` means what Adam's does."""
    d: int = 50
    p: int = 100
    k: int = 3
    sigma: float | int = 0.1414
    n: int = 500
    atoms: int = 200
    batch: int = 100
    epochs: int = 140
    look_every: int = 10
    held_out: int = 200
    """Samples whose masked loss chooses the rate and the moment to stop."""
    precision: str = "single"

    def setting(self) -> Setting:
        """The problem."""
        from layerwise.studies.masked_sparse_coding.comparison import Setting

        names = ("d", "p", "k", "sigma", "n", "atoms", "batch", "epochs", "held_out", "precision")
        return Setting(**{name: getattr(self, name) for name in names})


def check(config: Config) -> None:
    """Names that are none."""
    for method in config.methods:
        if method not in METHODS:
            raise NameLookupError(unknown("method", method, METHODS))
    if len(set(config.methods)) < len(config.methods) or "adam" not in config.methods or len(config.methods) < 2:
        given = f"methods={config.methods}"
        raise InputError(describe(given, "adam, to compare with, and others, each once", "add or remove some"))
    if config.look_every > config.epochs:
        given = f"a look in {config.look_every} epochs of {config.epochs}"
        raise InputError(describe(given, "at least one", "look more often"))
    config.setting()


def cells(config: Config) -> list[Cell]:
    """One a method."""
    return [Cell(key=method, options={"method": method}) for method in config.methods]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed: a training a rate; what the held-out loss chooses, and the least error of all."""
    from layerwise.studies.masked_sparse_coding.steps import chosen, trained

    method, setting = cell.options["method"], config.setting()
    pairs = [(seed, rate) for seed in seeds for rate in config.rates]
    found = {}
    for seed, rate in within_cell().track(pairs, "trainings", len(pairs)):
        found[seed, rate] = trained(setting, method, rate, seed, every=config.look_every)
        if rate != config.rates[-1]:
            continue
        curves = [found[seed, one] for one in config.rates]
        best = curves[chosen(curves)]
        look = best.masked.index(min(best.masked))
        values: dict[str, Any] = {
            "chosen/lr": config.rates[chosen(curves)],
            "chosen/error": best.error[look],
            "chosen/loss": best.masked[look],
            "chosen/epoch": best.epoch[look],
            "least/error": min(min(one.error) for one in curves),
            "start": best.error[0],
            "trials": json.dumps(
                [
                    [r, round(min(c.masked), 4), round(min(c.error), 4)]
                    for r, c in zip(config.rates, curves, strict=True)
                ]
            ),
        }
        yield Row(seed=seed, values=values, series={"epoch": best.epoch, "error": best.error, "loss": best.masked})


def claims(config: Config) -> list[Claim]:
    """That others come nearer to the truth than Adam, at their best and as chosen without it."""
    found = []
    for method in config.methods:
        if method == "adam" or (config.epochs < 100):
            continue
        for name, most, words in (
            ("least/error", LEAST[method], "the least error of all rates and epochs"),
            ("chosen/error", CHOSEN[method], "the error where the held-out masked loss is least"),
        ):
            found.append(
                Claim(
                    name=f"{method}/{name}",
                    statement=f"{LABELS[method]}: {words} is at most so much of Adam's (ratio).",
                    quantity=across([(method, name), ("adam", name)], lambda other, adam: other / adam),
                    relation="<=",
                    target=most,
                    span=POSITIVE,
                    seeds=config.seeds,
                    note=NOTE,
                )
            )
    if config.epochs < 100:
        found += [
            Claim(
                name=f"{method}/learns",
                statement=f"{LABELS[method]} comes nearer to the truth than it started (ratio of errors).",
                quantity=across([(method, "least/error"), (method, "start")], lambda least, start: least / start),
                relation="<",
                target=1,
                span=POSITIVE,
                seeds=config.seeds,
            )
            for method in config.methods
        ]
    return found


LEAST = {"kfac": 0.99, "foof": 0.99, "shampoo": 1.01, "soap": 1.01, "muon": 1.01}
CHOSEN = {"kfac": 1.02, "foof": 1.01, "shampoo": 1.03, "soap": 1.03, "muon": 1.03}
NOTE = (
    "The limits are ours. On seeds 100 and 101 of preset laptop, least errors over Adam's: KFAC .958 and .975, FOOF "
    ".955 and .967, Shampoo .987 and .950; as chosen: .978 and .959, .958 and .941, .993 and .922. A gain of some "
    "percent, for a step that takes twice as long on a CPU. SOAP and Muon were seen on one seed, at .97."
)


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Errors and held-out losses along the chosen trainings."""
    panels = [
        Panel(
            title=title,
            x_label="epoch",
            y_label=label,
            curves=[band(records, method, "epoch", name, LABELS[method]) for method in config.methods],
        )
        for title, label, name in (
            ("distance to the truth", "recovery error", "error"),
            ("held-out samples", "masked loss", "loss"),
        )
    ]
    caption = "Each method at the rate that the held-out masked loss chooses. Median and range over seeds."
    return [Figure(name="dictionary-steps", title="Steps on the dictionary", caption=caption, panels=panels)]


EXPERIMENT = Experiment(
    name="dictionary-steps",
    title="Learning a dictionary by layer-wise preconditioned steps",
    paper=PAPER,
    figure="beyond the thesis",
    summary=(
        "A dictionary is the weight of a linear layer whose inputs are codes: K-FAC preconditions its gradient by the "
        "second moments of codes and of residuals. The masked objective of over-realised, twice the atoms of the "
        "truth, by Adam and by members of the family, with the same rates to choose from, the same samples, start "
        "and masks. Rate and epoch are chosen by the masked loss of held-out samples; the least error, which needs the "
        "truth, stands beside it."
    ),
    presets={
        "smoke": Config(
            seeds=1, methods=("adam", "kfac"), rates=(5e-3,), d=30, p=40, k=2, sigma=0.18, n=200, atoms=60, epochs=20
        ),
        "laptop": Config(),
        "paper": Config(
            seeds=3,
            methods=METHODS,
            rates=(1e-3, 2e-3, 4e-3),
            d=100,
            p=200,
            k=5,
            sigma=0.1,
            n=1000,
            atoms=400,
            batch=200,
            epochs=300,
        ),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop a minute and a half, paper four hours",
    check=check,
)
