"""Figure 1 of chapter 2 of Wu (2023): the more atoms a dictionary has, the more masking helps to find the truth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure
from layerwise.experiments.over_seeds import POSITIVE, combined, ratio
from layerwise.experiments.wu2024 import PAPER
from layerwise.experiments.wu2024.both_objectives import (
    OBJECTIVES,
    STARTS,
    across,
    cell_of,
    cells_of,
    common,
    compared,
    course,
    gap,
    printed_claims,
    swept,
)
from layerwise.foundations.errors import InputError, describe, unknown

if TYPE_CHECKING:
    from layerwise.studies.masked_sparse_coding.comparison import Setting

SOURCE = "Section 2.4.1 and its figure"
PRINTED: dict[str, dict[str, float]] = {
    "sample/200": {"standard": 0.468, "masked": 0.433},
    "sample/400": {"standard": 0.449, "masked": 0.376},
    "sample/600": {"standard": 0.465, "masked": 0.381},
    "sample/800": {"standard": 0.510, "masked": 0.379},
    "sample/1000": {"standard": 0.533, "masked": 0.384},
    "local/200": {"standard": 0.126, "masked": 0.153},
    "local/400": {"standard": 0.156, "masked": 0.149},
    "local/600": {"standard": 0.201, "masked": 0.153},
    "local/800": {"standard": 0.270, "masked": 0.158},
    "local/1000": {"standard": 0.330, "masked": 0.159},
}
NOTES = {
    "sample/400/standard": "Four seeds of a first calculation were .010 to .016 below.",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """A truth, its samples, and trainings of dictionaries of several sizes."""

    seeds: int = 3
    """Truths, samples and starts; all are one tensor program."""
    d: int = 50
    p: int = 100
    k: int = 3
    sigma: float | int = 0.1414
    """Standard deviation of the noise: about 1/√d is as much noise as signal."""
    n: int = 500
    atoms: tuple[int, ...] = (100, 200, 500)
    """p′: sizes of dictionaries."""
    starts: tuple[str, ...] = ("sample", "local")
    batch: int = 100
    epochs: int = 300
    """Part of the question: errors still change after that many."""
    lr: float | int = 1e-3
    look_every: int = 25
    precision: str = "single"
    """Or "double", as in the authors' code; no difference was found."""
    device: str = "cpu"

    def setting(self, start: str, atoms: int) -> Setting:
        """A training."""
        from layerwise.studies.masked_sparse_coding.comparison import Setting

        names = ("d", "p", "k", "sigma", "n", "batch", "epochs", "lr", "precision", "device")
        return Setting(start=start, atoms=atoms, **{name: getattr(self, name) for name in names})


SMALL = Config()
FULL = Config(seeds=5, d=100, p=200, k=5, sigma=0.1, n=1000, atoms=(200, 400, 600, 800, 1000), batch=200, epochs=500)


def check(config: Config) -> None:
    """What does not go together is said before anything is trained."""
    if list(config.atoms) != sorted(set(config.atoms)):
        raise InputError(describe(f"atoms={config.atoms}", "numbers that ascend", "sort them"))
    for start in config.starts:
        if start not in STARTS:
            raise InputError(unknown("start", start, STARTS))
        for atoms in config.atoms:
            config.setting(start, atoms)


def cells(config: Config) -> list[Cell]:
    """One a start and a number of atoms."""
    return cells_of(config.starts, "atoms", config.atoms)


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """All seeds and both objectives at once."""
    return compared(config.setting(**cell.options), seeds, config.look_every)


def same_problem(config: Config, other: Config) -> bool:
    """Whether limits that were found for one configuration are about this one."""
    free = {"seeds": 1, "atoms": (1,), "starts": ("sample",), "look_every": 1, "device": "cpu", "precision": "single"}
    return replace(config, **free) == replace(other, **free)


def claims(config: Config) -> list[Claim]:
    """The gap widens with the number of atoms; limits depend on the sizes."""
    if same_problem(config, FULL):
        return _full(config)
    if same_problem(config, SMALL):
        return _small(config)
    most = max(config.atoms)
    return [_gap(config, cell_of(start, most), 0.01, "") for start in config.starts]


def _gap(config: Config, cell: str, least: float, note: str) -> Claim:
    return Claim(
        name=f"{cell}/gap",
        statement=f"{cell}: the standard objective ends farther from the truth than the masked one (difference).",
        quantity=gap(cell),
        relation=">=",
        target=least,
        span=(-1, 1),
        **common(config.seeds, SOURCE, note),
    )


def _small(config: Config) -> list[Claim]:
    """Limits of ours, from a first calculation on other draws."""
    least = {"sample/100": 0.02, "sample/200": 0.04, "sample/500": 0.07}
    present = {cell.key for cell in cells(config)}
    found = [_gap(config, cell, limit, GAPS) for cell, limit in least.items() if cell in present]
    if {"sample/200", "sample/500"} <= present:
        places = [(cell, name) for cell in ("sample/500", "sample/200") for name in OBJECTIVES]
        found.append(
            Claim(
                name="sample/gap-widens",
                statement="From samples, the gap with 500 atoms is larger than with 200 (ratio).",
                quantity=across(places, lambda a, b, c, e: (a - b) / (c - e)),
                relation=">=",
                target=1.3,
                **common(config.seeds, SOURCE, "A first calculation had 1.58 to 1.76 on three seeds."),
            )
        )
    if "sample/500" in present:
        found += [
            _from_start(config, "sample/500", "standard", ">=", 0.03, "farther from", "+.062 to +.073"),
            _from_start(config, "sample/500", "masked", "<=", -0.02, "nearer to", "−.042 to −.038"),
        ]
    if "local/500" in present:
        found.append(_local(config, "local/500", 1.6, "A first calculation had 1.98 to 2.26 on three seeds."))
    if {"local/100", "local/200", "local/500"} <= present:
        found.append(_near_constant(config, ["local/100", "local/200", "local/500"], 0.03, "At most .017 before."))
    return found


def _full(config: Config) -> list[Claim]:
    """The figure itself, entry by entry."""
    present = {cell.key for cell in cells(config)}
    found = printed_claims({c: v for c, v in PRINTED.items() if c in present}, 0.02, SOURCE, config.seeds, NOTES)
    if "sample/1000" in present:
        found.append(_gap(config, "sample/1000", 0.12, "Printed: .149."))
    if "local/1000" in present:
        found.append(_local(config, "local/1000", 1.8, "Printed: 2.08."))
    local = [key for key in PRINTED if key.startswith("local") and key in present]
    if len(local) > 1:
        found.append(_near_constant(config, local, 0.025, "Printed: .010."))
    if "local/200" in present:
        found.append(
            Claim(
                name="local/200/standard-wins",
                statement="With as many atoms as the truth, from the truth, the standard objective stays nearer to it "
                "(by how much).",
                quantity=combined("local/200", OBJECTIVES, lambda standard, masked: masked - standard),
                relation=">=",
                target=0.015,
                span=(-1, 1),
                seeds=config.seeds,
                note="Not said in the text, but in its figure: .126 against .153.",
            )
        )
    for atoms in config.atoms:
        if "sample" in config.starts and atoms > config.p:
            found.append(_worse_than_start(config, atoms))
    return found


def _worse_than_start(config: Config, atoms: int) -> Claim:
    """Of section 2.4.1: for all p′ > p."""
    cell = cell_of("sample", atoms)
    return Claim(
        name=f"{cell}/worse-than-start",
        statement=f"{cell}: the standard objective ends farther from the truth than it started (difference of means).",
        quantity=_mean_change(cell),
        relation=">",
        target=0,
        span=(-1, 1),
        **common(config.seeds, "Section 2.4.1", TWICE if atoms == 2 * config.p else ""),
    )


TWICE = (
    "With twice the atoms of the truth it is no more than chance: .002 above the start on average of seeds 0 to 4 (by "
    "seed −.009, .006, .012, −.006 and .007), .002 to .009 below it on four seeds of a first calculation, for which "
    "this was expected to fail until the five seeds had been run. With three times and more it is clear."
)


def _mean_change(cell: str):
    change = combined(cell, ["standard", "start"], lambda end, start: end - start)

    def quantity(records: Sequence[Record]) -> dict[int, float]:
        found = change(records)
        return {seed: sum(found.values()) / len(found) for seed in found}

    return quantity


def _from_start(config: Config, cell: str, name: str, relation: str, limit: float, words: str, seen: str) -> Claim:
    return Claim(
        name=f"{cell}/{name}-from-start",
        statement=f"{cell}: the {name} objective ends {words} the truth than it started (change of the error).",
        quantity=combined(cell, [name, "start"], lambda end, start: end - start),
        relation=relation,
        target=limit,
        span=(-1, 1),
        **common(config.seeds, SOURCE, f"A first calculation had {seen} on three seeds."),
    )


def _local(config: Config, cell: str, least: float, note: str) -> Claim:
    return Claim(
        name=f"{cell}/ratio",
        statement=f"{cell}: the standard objective leaves the truth farther behind than the masked one (ratio).",
        quantity=ratio(cell, "standard", "masked"),
        relation=">=",
        target=least,
        span=POSITIVE,
        **common(config.seeds, SOURCE, note),
    )


def _near_constant(config: Config, places: Sequence[str], most: float, note: str) -> Claim:
    return Claim(
        name="local/near-constant",
        statement="From the truth, the masked error hardly depends on the number of atoms (largest minus least).",
        quantity=across([(cell, "masked") for cell in places], lambda *errors: max(errors) - min(errors)),
        relation="<=",
        target=most,
        span=(0, 1),
        **common(config.seeds, SOURCE, note),
    )


GAPS = (
    "The limits are ours, from a first calculation on other draws, whose least gaps over three seeds were .036, .059 "
    "and .104 with 100, 200 and 500 atoms."
)


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Errors over the number of atoms, and along the training of the largest dictionary."""
    printed = PRINTED if same_problem(config, FULL) else None
    panels = [
        swept(records, {n: cell_of(start, n) for n in config.atoms}, STARTS[start], "atoms", printed)
        for start in config.starts
    ]
    most = max(config.atoms)
    courses = [course(records, cell_of(start, most), f"{most} atoms, {STARTS[start]}") for start in config.starts]
    caption = (
        f"Recovery error after {config.epochs} epochs; the truth has {config.p} atoms. Median and range over seeds."
    )
    along = "Neither objective is at rest after these epochs: masking is slower to fit the noise, not free of it."
    return [
        Figure(name="over-realised", title="More atoms than the truth", caption=caption, panels=panels),
        Figure(name="course", title="Along the training", caption=along, panels=courses),
    ]


EXPERIMENT = Experiment(
    name="over-realised",
    title="Dictionaries with more atoms than the truth, with and without masking",
    paper=PAPER,
    figure=SOURCE,
    summary=(
        "Samples are sparse combinations of the atoms of a dictionary, with as much noise as signal. A dictionary is "
        "learned from them by decoding with OMP and steps of Adam, from other samples or from the truth itself. With "
        "the standard objective a larger dictionary represents the noise and loses the truth; with a tenth of the "
        "coordinates hidden from the codes, and the loss of those alone, it does not. Both objectives have the same "
        "truth, samples and start; masks are drawn for each batch, and batches are not shuffled."
    ),
    presets={
        "smoke": Config(
            seeds=1, d=30, p=40, k=2, sigma=0.18, atoms=(150,), starts=("sample",), epochs=60, lr=5e-3, look_every=20
        ),
        "laptop": SMALL,
        "paper": FULL,
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop a minute, paper an hour (--device cuda: minutes)",
    whole_cells=True,
    check=check,
)
