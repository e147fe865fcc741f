"""
An experiment of your own
=========================

Cells, a figure and *claims*, declared before anything runs. The command line runs, resumes, judges and reports it
(``layerwise run my_package.trace:EXPERIMENT``); here the same from Python. The question: how fast does the trace of a
sampled Fisher matrix come near the exact one, as labels are drawn?
"""

import tempfile
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch

import layerwise as lw
from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.experiment import Cell, Experiment, Row
from layerwise.experiments.results import judge_all
from layerwise.experiments.runner import run as run_experiment


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: int = 12
    examples: int = 64
    samples: tuple[int, ...] = (1, 4, 16, 64)


def cells(config):
    return [Cell(key=f"{n} samples", options={"samples": n}) for n in config.samples]


def run(config, cell, seeds):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(config.examples, 5, generator=draw, dtype=torch.float64)
    y = torch.randint(3, (config.examples,), generator=draw)
    model = torch.nn.Linear(5, 3, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 5, generator=draw, dtype=torch.float64))
        model.bias.zero_()
    exact = lw.fisher(model, (x, y), structure="diag", estimator="exact").trace()
    for seed in seeds:
        F = lw.fisher(model, (x, y), structure="diag", samples=cell.options["samples"], seed=seed)
        yield Row(seed=seed, values={"error": float(F.trace() / exact - 1)})


def claims(config):
    last = config.samples[-1]
    return [
        Claim(
            name="unbiased",
            statement="Sampled traces are right on average, to two per cent.",
            quantity=lambda records: by_seed(records, f"{last} samples", "error"),
            relation="within",
            target=(-0.02, 0.02),
            test="mean",
            seeds=5,
        )
    ]


EXPERIMENT = Experiment(
    name="sampled-trace",
    title="The trace of a sampled Fisher matrix",
    paper="This example",
    figure="its figure",
    summary="The error falls like 1/√samples.",
    presets={"smoke": Config(seeds=2), "laptop": Config(), "paper": Config(seeds=30)},
    cells=cells,
    run=run,
    claims=claims,
    figures=lambda config, records: [],
)

# %%
# Every result is on the disk the moment it is there; the same call again would run nothing.

with tempfile.TemporaryDirectory() as folder:
    done = run_experiment(EXPERIMENT, preset="laptop", out=folder)
verdicts = judge_all(EXPERIMENT, EXPERIMENT.presets["laptop"], "laptop", done.recorded).verdicts
for verdict in verdicts:
    print(f"{verdict.claim}: {verdict.status}, {verdict.n} seeds")

# %%
# Errors by the number of labels drawn for an example, one dot a seed, and 1/√samples through the first.

config = EXPERIMENT.presets["laptop"]
errors = {n: list(by_seed(done.recorded.records, f"{n} samples", "error").values()) for n in config.samples}
spread = {n: torch.tensor(values).square().mean().sqrt() for n, values in errors.items()}
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
for n, values in errors.items():
    axes.loglog([n] * len(values), [abs(value) for value in values], "o", color="0.7", markersize=4)
axes.loglog(spread.keys(), spread.values(), "k-", label="root mean square")
axes.loglog(spread.keys(), [spread[1] / n**0.5 for n in spread], "r--", label="1/√samples")
axes.set(xlabel="labels drawn an example", ylabel="relative error of the trace")
axes.legend(frameon=False)
plt.show()
