"""Figure 3 of chapter 2 of Wu (2023): the more noise, the more masking helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure
from layerwise.experiments.over_seeds import POSITIVE, bound, combined, ratio
from layerwise.experiments.wu2024 import PAPER
from layerwise.experiments.wu2024.both_objectives import (
    OBJECTIVES,
    STARTS,
    cell_of,
    cells_of,
    common,
    compared,
    gap,
    printed_claims,
    swept,
)
from layerwise.foundations.errors import InputError, describe, unknown

if TYPE_CHECKING:
    from layerwise.studies.masked_sparse_coding.comparison import Setting

SOURCE = "Section 2.4.3 and its figure"
PRINTED: dict[str, dict[str, float]] = {
    "sample/0.01": {"standard": 0.007, "masked": 0.005},
    "sample/0.0325": {"standard": 0.136, "masked": 0.061},
    "sample/0.055": {"standard": 0.303, "masked": 0.165},
    "sample/0.0775": {"standard": 0.439, "masked": 0.275},
    "sample/0.1": {"standard": 0.535, "masked": 0.384},
    "local/0.01": {"standard": 0.003, "masked": 0.004},
    "local/0.0325": {"standard": 0.055, "masked": 0.037},
    "local/0.055": {"standard": 0.176, "masked": 0.082},
    "local/0.0775": {"standard": 0.273, "masked": 0.122},
    "local/0.1": {"standard": 0.335, "masked": 0.158},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """A large dictionary, and several levels of noise."""

    seeds: int = 2
    d: int = 50
    p: int = 100
    k: int = 3
    sigmas: tuple[float, ...] = (0.02, 0.08)
    """Standard deviations of the noise."""
    n: int = 500
    atoms: int = 500
    starts: tuple[str, ...] = ("sample", "local")
    batch: int = 100
    epochs: int = 150
    lr: float | int = 1e-3
    look_every: int = 25
    precision: str = "single"
    device: str = "cpu"

    def setting(self, start: str, sigma: float | int) -> Setting:
        """A training."""
        from layerwise.studies.masked_sparse_coding.comparison import Setting

        names = ("d", "p", "k", "n", "atoms", "batch", "epochs", "lr", "precision", "device")
        return Setting(start=start, sigma=sigma, **{name: getattr(self, name) for name in names})


SMALL = Config()
LEVELS = (0.01, 0.0325, 0.055, 0.0775, 0.1)
FULL = Config(seeds=5, d=100, p=200, k=5, sigmas=LEVELS, n=1000, atoms=1000, batch=200, epochs=500)


def check(config: Config) -> None:
    """What does not go together is said before anything is trained."""
    if list(config.sigmas) != sorted(set(config.sigmas)):
        raise InputError(describe(f"sigmas={config.sigmas}", "numbers that ascend", "sort them"))
    for start in config.starts:
        if start not in STARTS:
            raise InputError(unknown("start", start, STARTS))
        config.setting(start, config.sigmas[0])


def cells(config: Config) -> list[Cell]:
    """One a start and a level of noise."""
    return cells_of(config.starts, "sigma", config.sigmas)


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """All seeds and both objectives at once."""
    return compared(config.setting(**cell.options), seeds, config.look_every)


def _same(config: Config, other: Config) -> bool:
    free = {
        "seeds": 1,
        "sigmas": (1.0,),
        "starts": ("sample",),
        "look_every": 1,
        "device": "cpu",
        "precision": "single",
    }
    return replace(config, **free) == replace(other, **free)


def claims(config: Config) -> list[Claim]:
    """Without much noise both find the truth; with much, masking is nearer to it."""
    present = {cell.key for cell in cells(config)}
    if _same(config, FULL):
        some = {c: v for c, v in PRINTED.items() if c in present}
        both = [_small_error(config, cell, 0.02) for cell in ("sample/0.01", "local/0.01") if cell in present]
        return [claim for claims in both for claim in claims] + printed_claims(some, 0.02, SOURCE, config.seeds, {})
    if _same(config, SMALL):
        return _small(config, present)
    return [
        Claim(
            name=f"{cell}/gap",
            statement=f"{cell}: the standard objective ends farther from the truth than the masked one (difference).",
            quantity=gap(cell),
            relation=">",
            target=0,
            span=(-1, 1),
            **common(config.seeds, SOURCE),
        )
        for cell in (cell_of(start, config.sigmas[-1]) for start in config.starts)
    ]


def _small_error(config: Config, cell: str, most: float) -> list[Claim]:
    return [
        bound(
            cell,
            name,
            "<=",
            most,
            f"{cell}: with little noise the {name} objective finds the truth (recovery error).",
            span=(0, 1),
            **common(config.seeds, SOURCE),
        )
        for name in OBJECTIVES
    ]


def _small(config: Config, present: set[str]) -> list[Claim]:
    """Limits of ours, from one seed of a first calculation on other draws."""
    found = []
    for cell, most in (("sample/0.02", 0.03), ("local/0.02", 0.01)):
        if cell in present:
            found += _small_error(config, cell, most)
            found.append(
                Claim(
                    name=f"{cell}/alike",
                    statement=f"{cell}: with little noise both objectives end alike (difference of their errors).",
                    quantity=combined(cell, OBJECTIVES, lambda standard, masked: abs(standard - masked)),
                    relation="<=",
                    target=0.01,
                    span=(0, 1),
                    **common(config.seeds, SOURCE, "Masking is a little slower: .0182 against .0142 before."),
                )
            )
    for cell in ("sample/0.08", "local/0.08"):
        if cell in present:
            found.append(
                Claim(
                    name=f"{cell}/ratio",
                    statement=f"{cell}: the error of the standard objective is larger than that of the masked (ratio).",
                    quantity=ratio(cell, "standard", "masked"),
                    relation=">=",
                    target=1.25,
                    span=POSITIVE,
                    **common(config.seeds, SOURCE, "A first calculation had 1.54 and 1.88."),
                )
            )
    return found


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Errors over the level of noise."""
    printed = PRINTED if _same(config, FULL) else None
    panels = [
        swept(records, {sigma: cell_of(start, sigma) for sigma in config.sigmas}, STARTS[start], "σ", printed)
        for start in config.starts
    ]
    caption = (
        f"Recovery error after {config.epochs} epochs, {config.atoms} atoms for {config.p}. "
        f"σ = 1/√d ≈ {config.d**-0.5:.2f} is as much noise as signal. Median and range over seeds."
    )
    return [Figure(name="noise", title="More noise", caption=caption, panels=panels)]


EXPERIMENT = Experiment(
    name="noise",
    title="Masked sparse coding at several levels of noise",
    paper=PAPER,
    figure=SOURCE,
    summary=(
        "As over-realised, with the largest dictionary, at levels of noise from little to as much as signal. The text "
        "says that variances are spaced equally from 1/d² to 1/d; the levels that it lists are standard deviations, "
        "spaced equally from 1/d to 1/√d, and those are taken. With little noise both objectives find the truth, the "
        "masked one a little later."
    ),
    presets={
        "smoke": Config(
            seeds=1, d=30, p=40, k=2, sigmas=(0.18,), atoms=150, starts=("sample",), epochs=60, lr=5e-3, look_every=20
        ),
        "laptop": SMALL,
        "paper": FULL,
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop half a minute, paper an hour and a half (--device cuda: minutes)",
    whole_cells=True,
    check=check,
)
