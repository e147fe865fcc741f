"""A small experiment: gradient descent ``x ← x − η h x`` on a random quadratic; fast, but real numbers come out."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.progress import within_cell
from layerwise.experiments.scratch import scratch
from layerwise.foundations.random import stream


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the descent."""

    seeds: int = 2
    """How many random quadratics."""
    rates: tuple[float, ...] = (0.1, 0.5)
    """Learning rates that are swept."""
    steps: int = 5
    pause: float = 0.0
    """Seconds that every seed takes at least."""
    fail_at: int | None = None
    """A seed that fails."""


def cells(config: Config) -> list[Cell]:
    return [Cell(key=f"rate/{rate:g}", options={"rate": rate}) for rate in config.rates]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    for seed in seeds:
        if seed == config.fail_at:
            raise ArithmeticError("this seed fails")
        generator = stream(seed, "quadratic")
        h = torch.rand(20, generator=generator, dtype=torch.float64)
        x = torch.randn(20, generator=generator, dtype=torch.float64)
        losses = []
        for _ in within_cell().track(range(config.steps + 1), "descent", config.steps + 1):
            time.sleep(config.pause / (config.steps + 1))
            losses.append(0.5 * float(h @ x.square()))
            x = x - cell.options["rate"] * h * x
        yield Row(
            seed=seed,
            values={"loss": losses[-1], "diverged": False, "word": "naïve ≤"},
            series={"iteration": list(range(config.steps + 1)), "loss": losses},
        )


def claims(config: Config) -> list[Claim]:
    slow, fast = (f"rate/{rate:g}" for rate in (config.rates[0], config.rates[-1]))

    def ratio(records: Sequence[Record]) -> dict[int, float]:
        a, b = by_seed(records, slow, "loss"), by_seed(records, fast, "loss")
        return {seed: b[seed] / a[seed] for seed in a.keys() & b.keys()}

    return [
        Claim(
            name="faster",
            statement="A larger rate goes down faster.",
            quantity=ratio,
            relation="<",
            target=1.0,
            seeds=2,
            source="Section 1",
        ),
        Claim(
            name="slower",
            statement="A larger rate goes down more slowly.",
            quantity=ratio,
            relation=">",
            target=1.0,
            seeds=2,
            origin="misprint",
            expected="fails",
            why="The sign was printed wrongly.",
            source="Section 1",
        ),
    ]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    curves = [
        Curve(label=r["cell"], x=r["series"]["iteration"], y=r["series"]["loss"]) for r in records if r["seed"] == 0
    ]
    panel = Panel(title="Loss", x_label="iteration", y_label="loss", curves=curves, y_scale="log")
    return [Figure(name="loss", title="Descent", caption="Loss of a quadratic.", panels=[panel])]


EXPERIMENT = Experiment(
    name="toy-descent",
    title="Gradient descent on a quadratic",
    paper="Nobody 2025",
    figure="Figure 0",
    summary="A quadratic of 20 dimensions.",
    presets={
        "smoke": Config(),
        "laptop": Config(seeds=3),
        "paper": Config(seeds=5, rates=(0.05, 0.1, 0.2, 0.5), steps=20),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="less than a second",
)


def run_and_keep(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Writes down what it was asked for, each time."""
    folder = scratch()
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "notes").open("a") as file:
        file.write(f"{list(seeds)}\n")
    yield from run(config, cell, seeds)


SHARING = replace(EXPERIMENT, name="sharing", run=run_and_keep, whole_cells=True)
