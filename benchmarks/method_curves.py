"""The curves on the method cards: every member beside torch's AdamW, on two small tasks.

    LAYERWISE_DATA=… python benchmarks/method_curves.py            # some ten minutes on one core; resumes
    python benchmarks/method_curves.py --draw                      # figures again, from docs/methods/curves.json

The tasks are `autoencoder` and `digits` of `defaults.py`, at sizes for a CPU. Members of AdamW's size run at AdamW's
best of 3e-4, 1e-3 and 3e-3, which is 3e-3 on both, with its weight decay and nothing else set: curves are medians over
three seeds. The others have a rate of their own, the best of `GRIDS` by the loss at the end: curves are of one seed.
"""

import argparse
import json
import math
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import torch
from defaults_tasks import Data, make
from matplotlib.figure import Figure

import layerwise as lw

TASKS = {"autoencoder": "MNIST auto-encoder, training loss", "digits": "digits, MLP, training loss"}
ADAMW_SIZE = ("KFAC", "EKFAC", "FOOF", "Shampoo", "SOAP", "Muon", "MahalanobisSpectral")
RATE, WEIGHT_DECAY, POINTS = 3e-3, 0.01, 15
GRIDS: dict[str, tuple[float, ...]] = {
    "SGD": (1e-4, 1e-3, 1e-2, 1e-1),
    "Sign": (3e-4, 1e-3, 3e-3),
    "LocoProp": (1e-3, 1e-2, 1e-1, 1.0),
    "NGD": (0.03, 0.1, 0.3),
}
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}}
NGD: dict[str, dict[str, Any]] = {
    "autoencoder": {"likelihood": "bernoulli", "clip": None},
    "digits": {"likelihood": "categorical"},
}
"""Drawn labels, since with those of the data no step lowers the loss by more than η, whatever the loss's unit; and no
clip where that unit is hundreds."""
MEMBERS = ("AdamW", "Adam", *ADAMW_SIZE, *GRIDS)
DOCS = Path(__file__).parent.parent / "docs"
Curve = list[tuple[int, float]]


def optimizer(task: str, member: str, model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    """Torch's AdamW, or a member as its card has it."""
    if member == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
    decay = {"weight_decay": WEIGHT_DECAY} if member in (*ADAMW_SIZE, "Adam") else {}
    own = NGD[task] if member == "NGD" else OPTIONS.get(member, {})
    return getattr(lw.optim, member)(model, lr=rate, **decay, **own)


def train(name: str, member: str, rate: float, seed: int, keep: Path | None) -> Curve:
    """The loss along a run; the curve ends where it stops being finite."""
    task = make(name, Data(keep), "cpu", False)
    torch.manual_seed(seed)
    model = task.model()
    curve = [(0, task.final(model))]
    opt = optimizer(name, member, model, rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, task.rate)
    generator = torch.Generator().manual_seed(1000 + seed)
    for step in range(1, task.steps + 1):
        model.train()
        x, y = task.batch(generator)
        opt.zero_grad()
        task.loss(model, x, y).backward()
        opt.step()
        schedule.step()
        if step % (task.steps // POINTS) == 0:
            loss = task.final(model)
            if not math.isfinite(loss):
                break
            curve.append((step, loss))
    print(f"{name} {member} lr {rate:g} seed {seed}: step {curve[-1][0]}, {curve[-1][1]:.4f}", flush=True)
    return curve


class Runs:
    """Curves by task, member, rate and seed, written down as they come."""

    def __init__(self, path: Path, keep: Path | None) -> None:
        self.path, self.keep = path, keep
        self.curves: dict[str, Curve] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def get(self, task: str, member: str, rate: float, seed: int) -> Curve:
        """A curve, run if it is not there."""
        key = f"{task}/{member}/{rate:g}/{seed}"
        if key not in self.curves:
            self.curves[key] = train(task, member, rate, seed, self.keep)
            self.path.write_text(json.dumps(self.curves), encoding="utf-8")
        return self.curves[key]

    def rate(self, task: str, member: str) -> float:
        """AdamW's, or the best of the member's own grid."""
        if member not in GRIDS:
            return RATE

        def end(rate: float) -> float:
            curve = self.get(task, member, rate, 0)
            whole = curve[-1][0] == self.get(task, "AdamW", RATE, 0)[-1][0]
            return curve[-1][1] if whole else math.inf

        return min(GRIDS[member], key=end)


def median(curves: list[Curve]) -> Curve:
    """Point by point."""
    shortest = min(len(curve) for curve in curves)
    return [(curves[0][k][0], statistics.median(curve[k][1] for curve in curves)) for k in range(shortest)]


def draw(found: dict[str, Any], shown: str) -> Figure:
    """One member beside AdamW, with the others in grey."""
    figure = Figure(figsize=(8.4, 3.0), layout="constrained")
    for axes, (task, title) in zip(figure.subplots(1, 2), TASKS.items(), strict=True):
        for member, one in found[task].items():
            x, y = zip(*one["curve"], strict=True)
            if member == shown:
                axes.plot(x, y, color="#1b5e8c", linewidth=2.4, zorder=3, label=f"{member}, lr {one['rate']:g}")
            elif member == "AdamW":
                axes.plot(x, y, color="#c05a1c", linewidth=1.8, zorder=2, label=f"AdamW, lr {one['rate']:g}")
            else:
                axes.plot(x, y, color="0.82", linewidth=0.9, zorder=1)
        ends = [one["curve"][-1][1] for one in found[task].values()]
        first = found[task]["AdamW"]["curve"][1][1]
        scale = "log" if task == "digits" else "linear"
        axes.set(title=title, xlabel="step", yscale=scale, ylim=(0.9 * min(ends), 1.3 * first))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="a file that images and text are kept in, or read from")
    parser.add_argument(
        "--runs", type=Path, default=Path("method_curves.json"), help="what has been run, to go on from"
    )
    parser.add_argument("--draw", action="store_true", help="draw the curves that are stored, run nothing")
    args = parser.parse_args()
    stored = DOCS / "methods" / "curves.json"
    if not args.draw:
        warnings.simplefilter("ignore")
        runs, found = Runs(args.runs, args.keep), {}
        for task in TASKS:
            found[task] = {}
            for member in MEMBERS:
                rate = runs.rate(task, member)
                seeds = 1 if member in GRIDS else 3
                curves = [runs.get(task, member, rate, seed) for seed in range(seeds)]
                curve = [(step, round(loss, 5)) for step, loss in median(curves)]
                found[task][member] = {"rate": rate, "seeds": seeds, "curve": curve}
        stored.write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    found = json.loads(stored.read_text(encoding="utf-8"))
    folder = DOCS / "figures" / "methods"
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "method_curves",
    }  # text as text; the same bytes again
    for member in (m for m in MEMBERS if m != "AdamW"):
        draw(found, member).savefig(folder / f"{member}.svg", metadata={"Date": None})
    ends = {task: {m: one["curve"][-1][1] for m, one in members.items()} for task, members in found.items()}
    print(json.dumps({"benchmark": "method_curves", "ends": ends}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
