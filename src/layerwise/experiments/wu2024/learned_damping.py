"""Beyond Wu (2023): K-FAC's damping and rate, learned by validation loss. Is a learned damping better than ours?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.over_seeds import band, bars, combined, distinct
from layerwise.experiments.progress import within_cell
from layerwise.experiments.wu2024 import PAPER
from layerwise.foundations.errors import InputError, describe

if TYPE_CHECKING:
    from layerwise.studies.learning_to_learn.kfac_damping import DampedKFAC

DEFAULT = 0.1
"""The library's damping, relative to each factor's mean eigenvalue."""
LABELS = {
    "library": "damping and rate of the library",
    "default": "damping of the library, learned rate",
    "learned": "learned damping and rate",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tasks, a network, and the grid."""

    seeds: int = 2
    """Sets of tasks; each has its own choice."""
    images: str = "digits"
    """"digits" (8 × 8, with scikit-learn) or "mnist" (in the folder that LAYERWISE_DATA names)."""
    examples: int = 300
    """Of a task; half are trained on and half held out when damping and rate are learned."""
    noises: tuple[float | int, ...] = (0.0, 0.2)
    """Parts of the labels that are drawn at random."""
    tasks: int = 2
    """To learn from."""
    tests: int = 3
    """New tasks, trained on all of their examples."""
    hidden: tuple[int, ...] = (32,)
    batch: int = 32
    steps: int = 80
    dampings: tuple[float | int, ...] = (0.01, 0.1, 1.0, 10.0)
    rates: tuple[float | int, ...] = (3e-3, 1e-2, 3e-2)

    def study(self, noise: float) -> DampedKFAC:
        """How networks are trained on tasks with so much noise."""
        from layerwise.studies.learning_to_learn.image_tasks import Tasks
        from layerwise.studies.learning_to_learn.kfac_damping import DampedKFAC

        tasks = Tasks(images=self.images, examples=self.examples, noise=noise)
        return DampedKFAC(tasks=tasks, hidden=self.hidden, batch=self.batch, steps=self.steps)


def check(config: Config) -> None:
    """What is not there is said before anything is trained."""
    for noise in config.noises:
        config.study(noise)
    if DEFAULT not in config.dampings:
        given = f"dampings={config.dampings}"
        raise InputError(describe(given, f"the library's default {DEFAULT:g} among them", "add it"))


def cells(config: Config) -> list[Cell]:
    """One for each noise."""
    return [Cell(key=f"noise={noise:g}", options={"noise": noise}) for noise in config.noises]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed."""
    from layerwise.studies.learning_to_learn.kfac_damping import RATE, Pair

    study = config.study(cell.options["noise"])
    for seed in seeds:
        mine = [1000 * seed + i for i in range(config.tasks)]
        new = [1000 * seed + 500 + i for i in range(config.tests)]
        objective = study.objective(config.dampings, config.rates, mine, within_cell())
        ours = objective[config.dampings.index(DEFAULT)]
        best = divmod(int(objective.argmin()), len(config.rates))
        pairs = {
            "library": Pair(DEFAULT, RATE),
            "default": Pair(DEFAULT, config.rates[int(ours.argmin())]),
            "learned": Pair(config.dampings[best[0]], config.rates[best[1]]),
        }
        values: dict[str, float] = {"objective/default": ours.min().item(), "objective/learned": objective.min().item()}
        for name, pair in pairs.items():
            outcome = study.on_new_tasks(pair, new)
            values |= {f"{name}/damping": pair.damping, f"{name}/rate": pair.rate}
            values |= {f"{name}/test": outcome.test, f"{name}/accuracy": outcome.accuracy}
        series = {"damping": list(config.dampings), "objective": objective.min(1).values.tolist()}
        yield Row(seed=seed, values=values, series=series)


def claims(config: Config) -> list[Claim]:
    """What was found on exploration seeds, with a margin."""
    common: dict[str, Any] = {"seeds": config.seeds}
    found = []
    for noise in config.noises:
        cell = f"noise={noise:g}"
        found += [
            Claim(
                name=f"{cell}/rate",
                statement="On so few steps the library's rate is too small: with its damping and a learned rate the "
                "test loss is lower (by how much).",
                quantity=combined(cell, ["library/test", "default/test"], lambda a, b: a - b),
                relation=">",
                target=0.2,
                note="Ours. The rate is AdamW's, made for longer trainings: it is to be set, as AdamW's is.",
                **common,
            ),
            Claim(
                name=f"{cell}/learned-damping",
                statement="Beside a learned rate, a learned damping changes the test loss on new tasks little (that of "
                "the learned one over that of the default).",
                quantity=combined(cell, ["learned/test", "default/test"], lambda a, b: a / b),
                relation="within",
                target=(0.5, 1.15),
                note=NOTE,
                **common,
            ),
            distinct(cell, "objective/learned", "Seeds have tasks of their own.", seeds=1),
        ]
        if noise >= 0.2:
            found.append(
                Claim(
                    name=f"{cell}/larger",
                    statement="With random labels validation loss chooses a damping that is not smaller than the "
                    "library's.",
                    quantity=combined(cell, ["learned/damping"], lambda damping: damping),
                    relation=">=",
                    target=DEFAULT,
                    note="Ours: a larger damping is nearer to the gradient's direction, and fits random labels later.",
                    **common,
                )
            )
    return found


NOTE = (
    "Ours. Exploration with 120 steps on two tasks and 20 % random labels chose 10, with .62 against .83; final seed 0 "
    "chose the library's own damping, with and without random labels."
)


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """The meta-objective over the damping, and test losses."""
    shown = [f"noise={noise:g}" for noise in config.noises]
    over = Panel(
        title="at the best rate of each damping",
        x_label="damping",
        y_label="validation loss",
        x_scale="log",
        curves=[band(records, cell, "damping", "objective", cell.replace("=", " ")) for cell in shown],
    )
    panels = [
        Panel(
            title=f"{noise:.0%} random labels",
            x_label="",
            y_label="test loss on new tasks",
            curves=bars(records, f"noise={noise:g}", {f"{name}/test": label for name, label in LABELS.items()}),
        )
        for noise in config.noises
    ]
    caption = "Median over seeds; bands and lines span all."
    return [Figure(name="learned-damping", title="K-FAC's damping, learned", caption=caption, panels=[over, *panels])]


EXPERIMENT = Experiment(
    name="learned-damping",
    title="K-FAC's damping and rate, learned by validation loss on small tasks",
    paper=PAPER,
    figure="no figure of the thesis: its train-by-validation, for another optimizer",
    summary=(
        "Small networks on subsets of the digits, trained by `lw.optim.KFAC` for some steps. Damping and rate are "
        "chosen from a grid by the loss on a held-out half of the examples, over a few tasks, and tried on new ones "
        "beside the library's defaults. A grid and not a meta-gradient: with two numbers it costs a few dozen short "
        "trainings, shows how flat the surface is, and runs the optimizer that people have."
    ),
    presets={
        "smoke": Config(seeds=1, noises=(0.2,), tasks=1, tests=1, steps=60, dampings=(0.1, 10.0), rates=(1e-2,)),
        "laptop": Config(),
        "paper": Config(seeds=5, images="mnist", examples=1000, tasks=5, tests=5, hidden=(100, 20), steps=300),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke three seconds, laptop a minute and a half; paper an hour",
    ranges={"noises": (0, 1)},
    check=check,
)
