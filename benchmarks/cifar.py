"""Epochs and seconds to an accuracy on CIFAR-10: members of `lw.optim` beside AdamW and SGD, the same trials each.

    LAYERWISE_DATA=… python benchmarks/cifar.py --json cifar.json     # cifar10/ in that folder; all, some 10 minutes
    python benchmarks/cifar.py --json cifar.json --total 500          # goes on with a file; no run begins after 500 s
    python benchmarks/cifar.py --members SOAP "torch AdamW" --seeds 5
    python benchmarks/cifar.py --tiny --device cpu                    # to see that all runs; times mean nothing

The network of `cifar/network.py` (2 M parameters), batches of 1000, random crops and mirror images, label smoothing
0.2, a rate that rises over a fifth of the run and falls to zero, bf16 autocast, channels last; images stay on the
device and are cropped there. Accuracies are those of images seen with their mirror images, after each epoch.

First every member has eight trials with one seed, four rates at two weight decays, trained on nine tenths of the
training images and judged by the rest. The setting with the best accuracy at the end is run with --seeds other seeds on
all training images, and judged by the test images. Members take turns. Seconds begin with the construction of the
optimizer (first refreshes and captures are in them) and leave out evaluations; kernels that are compiled once a process
have been compiled by then, and what they took is what the first trial took longer than the others (`first`).
`epochs, seconds to` an accuracy: medians over the seeds that reached it, and how many did. JPEG copies of the images
give lower accuracies than the originals.

An H200 takes, by estimate, 2 to 4 s a run of 8 epochs: 2.5 minutes for the trials of six members, 6 for twenty seeds.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
from cifar.images import Data
from cifar.members import MEMBERS
from cifar.network import WIDTHS
from cifar.runs import Race, Run, run

TUNING_SEED = 0


def print_run(r: Run) -> None:
    accuracies = " ".join(f"{100 * a:5.2f}" for a in r.accuracies)
    seconds = r.seconds[-1] if r.seconds else math.nan
    setting = f"{r.member:22s}{r.rate:9.2g}{r.decay:9.2g}{r.seed:6d}"
    print(f"  {setting}{seconds:9.2f}{r.host:8.2f}  {accuracies}  {r.note}", flush=True)


class Book:
    """All runs so far, in a file where one is asked for; what is there is not run again."""

    def __init__(self, args: argparse.Namespace, where: str) -> None:
        self.args, self.where = args, where
        self.trials: list[Run] = []
        self.final: list[Run] = []
        if args.json and Path(args.json).is_file():
            before = json.loads(Path(args.json).read_text(encoding="utf-8"))
            self.trials, self.final = ([Run(**r) for r in before[name]] for name in ("trials", "final"))

    def record(self) -> dict:
        settings = {name: value for name, value in vars(self.args).items() if name != "json"}
        settings |= {"total": None if math.isinf(self.args.total) else self.args.total}
        about = {"benchmark": "cifar", "machine": self.where, "torch": torch.__version__}
        runs = {"trials": [r.record() for r in self.trials], "final": [r.record() for r in self.final]}
        return {**about, **settings, **runs, "summary": self.summaries()}

    def add(self, runs: list[Run], r: Run) -> None:
        runs.append(r)
        print_run(r)
        if self.args.json:
            Path(self.args.json).write_text(json.dumps(self.record()) + "\n", encoding="utf-8")

    def chosen(self, member: str) -> tuple[float, float] | None:
        """Of all trials, or None while some are to come."""
        settings = MEMBERS[member].settings()
        trials = [r for r in self.trials if r.member == member]
        own = {(r.rate, r.decay): r for r in trials if (r.rate, r.decay) in settings}
        if len(own) < len(settings):
            return None
        best = max(own.values(), key=lambda r: r.last)
        return best.rate, best.decay

    def summaries(self) -> list[dict]:
        """Of each member, over seeds."""
        members = dict.fromkeys(r.member for r in self.final)
        return [self._summary(member, [r for r in self.final if r.member == member]) for member in members]

    def _summary(self, member: str, own: list[Run]) -> dict:
        lasts, seconds = [r.last for r in own], [r.seconds[-1] for r in own if r.seconds]
        trials = [r for r in self.trials if r.member == member and r.seconds]
        first = trials[0].seconds[-1] - statistics.median(r.seconds[-1] for r in trials) if trials else None
        found = {
            "member": member,
            "rate": own[0].rate,
            "decay": own[0].decay,
            "edge": MEMBERS[member].is_edge(own[0].rate),
            "seeds": len(own),
            "accuracy": round(statistics.mean(lasts), 5),
            "deviation": round(statistics.stdev(lasts), 5) if len(lasts) > 1 else None,
            "seconds": round(statistics.median(seconds), 3) if seconds else None,
            "first": None if first is None else round(first, 3),
            "host": round(statistics.median(r.host for r in own), 3),
            "failed": sum(bool(r.note) for r in own),
        }
        return found | {"to": {f"{target:g}": to_accuracy(own, target) for target in self.args.targets}}


def to_accuracy(runs: list[Run], target: float) -> dict:
    """Median epochs and seconds over seeds that reached it, and how many did."""
    epochs = [r.epochs_to(target) for r in runs]
    reached = [(n, r.seconds[n - 1]) for n, r in zip(epochs, runs, strict=True) if n is not None]
    if not reached:
        return {"seeds": 0, "epochs": None, "seconds": None}
    middle = (statistics.median(values) for values in zip(*reached, strict=True))
    return {"seeds": len(reached)} | dict(zip(("epochs", "seconds"), (round(m, 2) for m in middle), strict=True))


def print_summary(found: list[dict], targets: list[float]) -> None:
    heads = "".join(f"{f'to {100 * t:g} %':>22s}" for t in targets)
    print(f"\n  {'':22s}{'rate':>8s}{'decay':>8s}{'accuracy, %':>15s}{'seconds':>9s}{'first':>8s}{'host':>8s}{heads}")
    for s in found:
        accuracy = f"{100 * s['accuracy']:.2f}" + (f" ± {100 * s['deviation']:.2f}" if s["deviation"] else "")
        numbers = "".join(f"{_shown(s[key]):>{width}s}" for key, width in (("seconds", 9), ("first", 8), ("host", 8)))
        cells = "".join(f"{_reached(s['to'][f'{t:g}'], s['seeds']):>22s}" for t in targets)
        edge = "  the rate is an edge of the grid" if s["edge"] else ""
        print(f"  {s['member']:22s}{s['rate']:8.2g}{s['decay']:8.2g}{accuracy:>15s}{numbers}{cells}{edge}")


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _reached(to: dict, seeds: int) -> str:
    """Epochs, seconds, and in how many seeds."""
    return f"{to['epochs']:g}, {to['seconds']:.2f} s ({to['seeds']}/{seeds})" if to["seeds"] else "–"


def tune(race: Race, book: Book, start: float) -> None:
    args = book.args
    print(f"\ntrials, seed {TUNING_SEED}: rate, decay, seed, seconds, host ms, accuracy after each epoch")
    settings = [MEMBERS[member].settings() for member in args.members]
    done = {(r.member, r.rate, r.decay) for r in book.trials}
    for trial in range(max(map(len, settings))):
        for member, own in zip(args.members, settings, strict=True):
            if trial < len(own) and (member, *own[trial]) not in done and time.perf_counter() - start < args.total:
                book.add(book.trials, run(race, member, *own[trial], TUNING_SEED))


def report(race: Race, book: Book, start: float) -> None:
    args = book.args
    print("\nother seeds at the best setting of each")
    chosen = {member: book.chosen(member) for member in args.members}
    done = {(r.member, r.rate, r.decay, r.seed) for r in book.final}
    for seed in range(TUNING_SEED + 1, TUNING_SEED + 1 + args.seeds):
        for member, setting in chosen.items():
            if setting is None or (member, *setting, seed) in done:
                continue
            if time.perf_counter() - start > args.total:
                print("  no time left")
                return
            book.add(book.final, run(race, member, *setting, seed))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", nargs="+", choices=list(MEMBERS), default=list(MEMBERS))
    parser.add_argument("--seeds", type=int, default=20, help="of the runs at the best setting")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--targets", nargs="+", type=float, default=[0.9, 0.92, 0.94], help="accuracies")
    parser.add_argument("--total", type=float, default=math.inf, help="seconds after which no further run begins")
    parser.add_argument("--tiny", action="store_true", help="a small network: a check, not a measurement")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="PATH", help="write the JSON line to a file, or go on with it")
    return parser.parse_args()


def races(args: argparse.Namespace) -> tuple[Race, Race]:
    """Of the trials, and of the final runs."""
    if args.tiny:
        data = Data.read(args.device, 256) if os.environ.get("LAYERWISE_DATA") else Data.made_up(args.device)
        epochs, batch, widths = min(args.epochs, 2), 64, (8, 16, 16)
    else:
        data, epochs, batch, widths = Data.read(args.device, None), args.epochs, args.batch, WIDTHS
    return Race(data.trials, epochs, batch, widths), Race(data.final, epochs, batch, widths)


def main() -> int:
    args, start = arguments(), time.perf_counter()
    warnings.simplefilter("ignore")  # of torch's own deprecations
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    print(f"{where}, torch {torch.__version__}, eager")
    (trials, final), book = races(args), Book(args, where)
    tune(trials, book, start)
    report(final, book, start)
    found = book.summaries()
    print_summary(found, args.targets)
    print(f"{time.perf_counter() - start:.0f} s in all")
    if not args.json:
        print(json.dumps(book.record()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
