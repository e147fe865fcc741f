"""The figure of the README: what an exchange of the optimizer does, and what it does to features.

    LAYERWISE_DATA=… python benchmarks/front_page.py            # some ten minutes; writes docs/figures/front_page.svg

Left, the character GPT of `defaults.py` with members at AdamW's best rate there and nothing else set: validation loss.
Right, the paper's linear representation learning on anisotropic inputs (`layerwise run head-to-head --preset laptop`):
the distance between learned and true features, 1 where nothing was learned.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from defaults import optimizer
from defaults_tasks import Data, make
from matplotlib.figure import Figure

from layerwise.experiments.catalog import find

MEMBERS = ("AdamW", "KFAC", "EKFAC", "Shampoo", "SOAP", "Muon")
RATE = 3e-3
"""AdamW's best of 3e-4, 1e-3 and 3e-3."""
POINTS = 15
ALGORITHMS = {"sgd": "SGD", "adam": "Adam", "amgd-bn": "batch norm", "ngd": "NGD", "kfac": "K-FAC"}
COLOURS = {"AdamW": "0.45", "Adam": "0.45", "SGD": "0.65", "batch norm": "#b5894a", "NGD": "#7d6bb0"}
OUTPUT = Path(__file__).parent.parent / "docs" / "figures" / "front_page.svg"


def train(member: str, seed: int, keep: Path | None) -> list[tuple[int, float]]:
    """Validation loss along a run."""
    task = make("gpt", Data(keep), "cpu", False)
    torch.manual_seed(seed)
    model = task.model()
    opt = optimizer(member, model, RATE, {})
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, task.rate)
    generator, curve = torch.Generator().manual_seed(1000 + seed), []
    for step in range(1, task.steps + 1):
        model.train()
        x, y = task.batch(generator)
        opt.zero_grad()
        task.loss(model, x, y).backward()
        opt.step()
        schedule.step()
        if step % (task.steps // POINTS) == 0:
            curve.append((step, task.final(model)))
    print(f"{member}, seed {seed}: {curve[-1][1]:.4f}", flush=True)
    return curve


def features(seeds: range) -> dict[str, list[tuple[int, float]]]:
    """Distance to the true features along the paper's runs, by the median over seeds."""
    experiment = find("head-to-head")
    config = experiment.preset("laptop")
    outcomes = [outcome for cell in experiment.cells_of(config) for outcome in experiment.run(config, cell, seeds)]
    found = {}
    for name, label in ALGORITHMS.items():
        curves = [outcome.series[f"{name}/dist"] for outcome in outcomes]
        middle = [statistics.median(values) for values in zip(*curves, strict=True)]
        found[label] = [(int(at), value) for at, value in zip(outcomes[0].series["iteration"], middle, strict=True)]
    return found


def draw(losses: dict[str, list[tuple[int, float]]], distances: dict[str, list[tuple[int, float]]]) -> Figure:
    """Two panels."""
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, curves in ((left, losses), (right, distances)):
        for label, curve in curves.items():
            wide = 2.4 if label in ("K-FAC", "KFAC", "AdamW") else 1.5
            axes.plot(*zip(*curve, strict=True), label=label, color=COLOURS.get(label), linewidth=wide)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    left.set(title="character GPT, AdamW's rate for all", xlabel="step", ylabel="validation loss")
    right.set(title="anisotropic inputs: are features learned?", xlabel="step", ylabel="distance to true features")
    right.set_ylim(0, 1.02)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a file that images and text are kept in, or read from")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    losses = {member: train(member, args.seed, args.keep) for member in MEMBERS}
    distances = features(range(2))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure = draw(losses, distances)
    figure.savefig(args.output, metadata={"Date": None})
    print(json.dumps({"benchmark": "front_page", "rate": RATE, "losses": losses, "features": distances}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
