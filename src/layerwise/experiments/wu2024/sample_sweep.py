"""Figure 5.3 of Wu (2023): learned step sizes over the number of examples, and Theorem 5.4.2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.over_seeds import POSITIVE, combined, distinct
from layerwise.experiments.wu2024 import PAPER
from layerwise.experiments.wu2024.noise_sweep import WAYS
from layerwise.foundations.errors import InputError, describe

if TYPE_CHECKING:
    from layerwise.studies.learning_to_learn.least_squares import ProblemSizes

SOURCE = "Theorem 5.4.2, Figure 5.3"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Least-squares tasks, and how many examples they have."""

    seeds: int = 2
    """Sets of tasks."""
    dim: int = 200
    sizes: tuple[int, ...] = (50, 100, 200, 400, 1000, 2000)
    """Examples of a task; train-by-validation trains on half and holds out half."""
    tasks: int = 20
    tests: int = 20
    """New tasks on which the learned step sizes are tried."""
    steps: int = 40
    grid: int = 25
    """Step sizes from 10⁻⁶ to 1, evenly in their logarithm."""
    noise: float | int = 1.0

    def of(self, examples: int) -> ProblemSizes:
        """Tasks with so many examples."""
        from layerwise.studies.learning_to_learn.least_squares import ProblemSizes

        names = ("dim", "tasks", "tests", "steps", "grid")
        return ProblemSizes(examples=examples, **{name: getattr(self, name) for name in names})


def check(config: Config) -> None:
    """Sizes that ascend, each of which can be halved."""
    if list(config.sizes) != sorted(set(config.sizes)):
        raise InputError(describe(f"sizes={config.sizes}", "numbers that ascend", "sort them"))
    for examples in config.sizes:
        config.of(examples)


def cells(config: Config) -> list[Cell]:
    """One for each number of examples."""
    return [Cell(key=f"n={examples}", options={"examples": examples}) for examples in config.sizes]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed; all tasks and step sizes of one at once."""
    from layerwise import theory
    from layerwise.studies.learning_to_learn import least_squares as study

    sizes = config.of(cell.options["examples"])
    for seed in seeds:
        found = study.objectives(sizes, seed, [config.noise], [config.steps])[config.noise, config.steps]
        both = study.compared(sizes, seed, config.noise, config.steps, found)
        values = {f"{w}/{name}": x for w, result in both._asdict().items() for name, x in result._asdict().items()}
        values["converged"] = theory.converged_error(sizes.examples, config.dim, config.noise)
        yield Row(seed=seed, values=values)


def claims(config: Config) -> list[Claim]:
    """Limits come from an earlier run of ours, for noise 1."""
    common: dict[str, Any] = {"seeds": config.seeds}
    both = ["train/test_rmse", "validation/test_rmse", "retrained/test_rmse"]
    found = []
    for n in config.sizes:
        cell = f"n={n}"
        if config.dim / 2 <= n <= config.dim:
            found.append(
                Claim(
                    name=f"{cell}/validation-better",
                    statement=f"With {n} examples in {config.dim} dimensions the step size learned by validation loss "
                    "is better on new examples (difference of root mean squares).",
                    quantity=combined(cell, both, lambda train, valid, _: train - valid),
                    relation=">=",
                    target=0.1,
                    origin="paper",
                    source=SOURCE,
                    note="An earlier run of ours, at 100 and 200: .218 and .401.",
                    **common,
                )
            )
        if n >= 5 * config.dim:
            found += [
                Claim(
                    name=f"{cell}/alike",
                    statement=f"With {n} examples both are alike (absolute difference of root mean squares).",
                    quantity=combined(cell, both, lambda train, valid, _: abs(train - valid)),
                    relation="<=",
                    target=0.06,
                    origin="paper",
                    source=SOURCE,
                    span=POSITIVE,
                    note="An earlier run of ours, at 1000 and 2000: .034 and .035.",
                    **common,
                ),
                Claim(
                    name=f"{cell}/closed-form",
                    statement=f"With {n} examples train-by-train comes to the error σ²d/(n − d − 1) of least squares "
                    "(relative difference).",
                    quantity=combined(cell, ["train/error", "converged"], lambda error, full: abs(error / full - 1)),
                    relation="<=",
                    target=0.15,
                    origin="paper",
                    source="Theorem 5.4.2",
                    span=POSITIVE,
                    note="Printed: at most (1 + ε) dσ²/n. Judged by the error and not by the step size: for n ≫ d "
                    "several step sizes tie to rounding.",
                    **common,
                ),
                Claim(
                    name=f"{cell}/retrained",
                    statement=f"With {n} examples train-by-validation's step size, trained on all, is not worse than "
                    "train-by-train's (difference of root mean squares).",
                    quantity=combined(cell, both, lambda train, _, again: again - train),
                    relation="<=",
                    target=0.01,
                    note="Ours. What it lost for large n in an earlier run is the price of holding out half.",
                    **common,
                ),
            ]
    if config.dim in config.sizes and config.sizes[0] < config.dim:
        first, peak = f"n={config.sizes[0]}", f"n={config.dim}"
        found.append(
            Claim(
                name="gap-falls",
                statement=f"The gap falls with more data: it is smaller with {config.dim} examples than with "
                f"{config.sizes[0]} (by how much).",
                quantity=lambda records: {
                    seed: gap - _gap(records, peak)[seed]
                    for seed, gap in _gap(records, first).items()
                    if seed in _gap(records, peak)
                },
                relation=">",
                target=0.0,
                expected="fails",
                why="It is largest at n = d, where least squares is worst (double descent), and falls from there on.",
                origin="paper",
                source="Section 5.5, Figure 5.3",
                **common,
            )
        )
    return [*found, distinct(f"n={config.sizes[0]}", "train/error", "Seeds have tasks of their own.", seeds=1)]


def _gap(records: Sequence[Record], cell: str) -> dict[int, float]:
    train, valid = (by_seed(records, cell, f"{way}/test_rmse") for way in ("train", "validation"))
    return {seed: train[seed] - valid[seed] for seed in train if seed in valid}


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Errors over the number of examples."""
    import statistics

    def curve(way: str, name: str, label: str) -> Curve:
        columns = {n: list(by_seed(records, f"n={n}", f"{way}/{name}").values()) for n in config.sizes}
        kept = {n: column for n, column in columns.items() if column}
        low, high = ([edge(c) for c in kept.values()] for edge in (min, max))
        return Curve(label=label, x=list(kept), y=[statistics.median(c) for c in kept.values()], low=low, high=high)

    panels = [
        Panel(
            title=title,
            x_label="examples of a task",
            y_label=title,
            x_scale="log",
            curves=[curve(way, name, label) for way, label in WAYS.items()],
        )
        for name, title in (("test_rmse", "test error (RMSE)"), ("train_rmse", "training error (RMSE)"))
    ]
    caption = f"Median over seeds; the band spans all. {config.dim} dimensions, noise {config.noise:g}."
    return [Figure(name="sample-sweep", title="Learned step sizes over examples", caption=caption, panels=panels)]


EXPERIMENT = Experiment(
    name="sample-sweep",
    title="With many examples training loss teaches a step size as well as validation loss",
    paper=PAPER,
    figure=SOURCE,
    summary=(
        "Least squares as in noise-sweep, with noise 1 and from few to many examples. Training loss and validation "
        "loss choose step sizes that are alike only when examples outnumber dimensions several times."
    ),
    presets={
        "smoke": Config(seeds=1, dim=50, sizes=(25, 50, 300), tasks=60, tests=60),
        "laptop": Config(),
        "paper": Config(seeds=1, dim=1000, sizes=(250, 500, 1000, 2000, 5000, 10000), tasks=100, tests=10),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop half a minute; paper an hour",
    check=check,
)
