"""Losses with eigenbases followed by sweeps of products at each refresh, beside those with exact decompositions.

    LAYERWISE_DATA=… python benchmarks/bases.py                    # text/tinyshakespeare.txt in that folder
    python benchmarks/bases.py --members SOAP --seeds 5 --steps 600 --json bases.json
    python benchmarks/bases.py --small --device cpu                # 2 × 48, minutes on a CPU
    python benchmarks/bases.py --tiny --device cpu                 # seconds, to see that all runs

The character GPT of `shakespeare.py`, trained twice for every member and seed from the same weights on the same
batches: with `solver="products"` (two sweeps at every refresh) and with `solver="eigh"`
(for SOAP its own step of orthogonal iteration by QR, which is what its authors do). Without dropout, so that both see
the same noise. The table has the validation loss at the end, and the mean training loss of the last fifth. On a CPU the
code of the GPU runs, by plain torch.
"""

import json
import statistics
import time

import torch
from shakespeare.members import RATES, own
from shakespeare.model import cross_entropy
from shakespeare.runs import Race
from shakespeare.without_dropout import as_asked, parser, training
from torch import Tensor, nn

from layerwise.optim.engine import Layerwise

SOLVERS = ("products", "eigh")


def train(race: Race, member: str, solver: str, seed: int) -> dict:
    """One run: losses, what went wrong, and seconds of the first ten steps and of all."""
    model = race.model(seed)
    (opt,) = own(member, solver=solver)(model, RATES[0])
    losses, begin, first = list[Tensor](), time.perf_counter(), 0.0
    for step, loss in training(race, model, opt, seed, race.autocast()):
        losses.append(loss)
        if step == 9:
            loss.item()  # wait for the device
            first = time.perf_counter() - begin
    lately = float(torch.stack(losses[-max(1, len(losses) // 5) :]).mean())
    seconds = time.perf_counter() - begin
    assert isinstance(opt, Layerwise)
    health = opt.health()
    return {
        "member": member, "solver": solver, "seed": seed, "training": lately, "validation": validation(race, model),
        "first_ten_s": round(first, 3), "seconds": round(seconds, 2), "fallbacks": health.fallbacks,
        "skipped_steps": health.skipped_steps,
    }  # fmt: skip


@torch.no_grad()
def validation(race: Race, model: nn.Module) -> float:
    """A mean over all that is held out."""
    model.eval()
    batches = race.text.validation_batches()
    with race.autocast():
        losses = [y.numel() * cross_entropy(model(x), y) for x, y in batches]
    return float(torch.stack(losses).sum()) / sum(y.numel() for _, y in batches)


def summary(runs: list[dict], member: str) -> dict:
    """Of one member: means over seeds, and the difference by pairs, with its standard error."""
    found: dict = {"member": member}
    by = {(run["solver"], run["seed"]): run for run in runs if run["member"] == member}
    seeds = sorted({seed for _, seed in by})
    for what in ("validation", "training"):
        pairs = [[by[solver, seed][what] for solver in SOLVERS] for seed in seeds]
        found[what] = {solver: statistics.mean(pair[i] for pair in pairs) for i, solver in enumerate(SOLVERS)}
        apart = [a - b for a, b in pairs]
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None
        found[what] |= {"difference": statistics.mean(apart), "standard_error": error}
    return found


def main() -> None:
    asking = parser(__doc__)
    asking.add_argument(
        "--members", nargs="+", default=["SOAP", "EKFAC", "Shampoo"], choices=["EKFAC", "KFAC", "SOAP", "Shampoo"]
    )
    asking.add_argument("--seeds", type=int, default=3)
    asked = asking.parse_args()
    race = as_asked(asked)
    runs = []
    print(f"  {'':10s}{'solver':>10s}{'seed':>6s}{'validation':>12s}{'training':>10s}{'first ten, s':>14s}  fallbacks")
    for member in asked.members:
        for seed in range(asked.seeds):
            for solver in SOLVERS:
                runs.append(run := train(race, member, solver, seed))
                losses = f"{run['validation']:12.4f}{run['training']:10.4f}{run['first_ten_s']:14.2f}"
                print(f"  {member:10s}{solver:>10s}{seed:6d}{losses}{run['fallbacks']:11d}", flush=True)
    found = [summary(runs, member) for member in asked.members]
    for line in found:
        of, error = line["validation"], line["validation"]["standard_error"]
        said = "" if error is None else f" ± {error:.4f}"
        both = f"{of['products']:.4f} by products, {of['eigh']:.4f} exact"
        print(f"  {line['member']}: {both}, {of['difference']:+.4f}{said}")
    record = json.dumps({"device": asked.device, "steps": race.size.steps, "runs": runs, "summary": found})
    print(record)
    if asked.json:
        asked.json.write_text(record, encoding="utf-8")


if __name__ == "__main__":
    main()
