"""Training a deep sigmoid autoencoder: every optimizer, a grid each, the same budget.

    python benchmarks/autoencoder.py --preset smoke                  # digits, two epochs: does it run?
    python benchmarks/autoencoder.py --preset digits                 # digits, 30 epochs, minutes
    python benchmarks/autoencoder.py --preset cpu                    # 10,000 images of MNIST, 3 epochs
    python benchmarks/autoencoder.py --preset gpu --out results      # all of MNIST, 10 epochs
    python benchmarks/autoencoder.py --report results                # table and figure of what is in a folder

MNIST comes from the folder that LAYERWISE_DATA names, or from --images; otherwise digits are used. Learning rates are
constant. Every method has a grid of fifteen cells, each tried for a few epochs; the best few are then trained for all
epochs, from the start, and the best of those is the one with the lowest final training loss. Each method's record is
written as it ends, so that several calls with other --methods and the same --out make one report. Losses are
cross-entropies summed over pixels, averaged over examples.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: idle threads must not burn a core

import argparse
import json
import math
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from autoencoder_methods import DEFAULT, METHODS, Method
from autoencoder_report import Record, draw, orderings, print_epochs, print_orderings, print_table
from autoencoder_runs import Run, Task, load, run


@dataclass(frozen=True)
class Preset:
    data: str
    limit: int | None
    epochs: int
    batch: int
    trial: int
    """Epochs that every cell is tried for."""
    finalists: int = 3
    cells: int | None = None
    seconds: float = math.inf


PRESETS = {
    "smoke": Preset("digits", None, epochs=2, batch=200, trial=1, finalists=1, cells=2),
    "digits": Preset("digits", None, epochs=30, batch=200, trial=10),
    "cpu": Preset("mnist", 10_000, epochs=3, batch=200, trial=1),
    "gpu": Preset("mnist", None, epochs=10, batch=500, trial=2, seconds=180),
}


def train_grid(name: str, task: Task, preset: Preset) -> Record:
    """All cells for a few epochs, then the best of them for all; each run has an equal share of the seconds."""
    method = METHODS[name]
    settings = method.cells(task.data)
    settings = settings if preset.cells is None else spread(settings, preset.cells)
    epochs = len(settings) * preset.trial + preset.finalists * task.epochs
    share = preset.seconds / epochs
    trials = []
    for number, setting in enumerate(settings, start=1):
        trials.append(run(method, setting, replace(task, epochs=preset.trial), share * preset.trial))
        report_cell(method, f"{number}/{len(settings)}", trials[-1])
    chosen = sorted((t for t in trials if math.isfinite(t.final)), key=lambda t: t.final)[: preset.finalists]
    runs = []
    for finalist in chosen:
        runs.append(run(method, finalist.setting, task, share * task.epochs))
        report_cell(method, "final", runs[-1])
    finals = [r.final for r in runs]
    best = finals.index(min(finals)) if finals and math.isfinite(min(finals)) else None
    edges = [] if best is None else method.edges(task.data, runs[best].setting)
    named = {"method": name, "title": method.title, "data": task.data}
    trial_losses = [{"setting": t.setting, "loss": t.losses[-1], "note": t.note} for t in trials]
    return named | {"best": best, "edges": edges, "runs": [asdict(r) for r in runs], "trials": trial_losses}


def spread(settings: list[dict], cells: int) -> list[dict]:
    """So many settings, the middle ones of equal parts of the list."""
    count = min(cells, len(settings))
    return [settings[(2 * k + 1) * len(settings) // (2 * count)] for k in range(count)]


def report_cell(method: Method, place: str, found: Run) -> None:
    setting = ", ".join(f"{k} {v:g}" for k, v in found.setting.items())
    end = found.note if found.note.startswith("fails") else f"{found.losses[-1]:.2f}  {found.note}"
    took = f"{found.seconds[-1]:.1f} s, {len(found.losses) - 1} epochs"
    print(f"  {method.title:20s}{place:>6s}  {setting:28s}{took:22s}{end}", flush=True)


def read_records(folder: Path) -> dict[str, Record]:
    """The records of a folder, in the order of the methods."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    by_name = {record["method"]: record for record in found if record.get("method") in METHODS}
    return {name: by_name[name] for name in METHODS if name in by_name}


def write_record(folder: Path | None, record: Record) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{record['method']}.json").write_text(json.dumps(record) + "\n")


def conclude(records: dict[str, Record], folder: Path | None, settings: dict) -> None:
    """Table, orderings, JSON line and figure."""
    print_table(records)
    print_epochs(records)
    found = orderings(records)
    print_orderings(found)
    if folder is not None:
        path = folder / "autoencoder.png"
        print(f"\nfigure: {path}" if draw(records, path) else "\nno figure: that needs matplotlib")
    print(json.dumps({"benchmark": "autoencoder", **settings, "expected": found, "records": list(records.values())}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(DEFAULT))
    parser.add_argument("--device", help="by default cuda for the preset gpu, else cpu")
    parser.add_argument("--epochs", type=int, help="in place of the preset's")
    parser.add_argument("--batch", type=int, help="in place of the preset's")
    parser.add_argument("--cells", type=int, help="only so many cells of each grid")
    parser.add_argument("--seconds", type=float, help="training time a method may take, all its cells together")
    parser.add_argument(
        "--estimator", choices=("empirical", "sampled"), default="empirical", help="labels of KFAC and EKFAC's factors"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the batches")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--images", metavar="FILE", help=".npz with MNIST as the arrays train and test, of bytes")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for records and figure")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="train nothing: report the records of a folder")
    return parser.parse_args()


def make_task(args: argparse.Namespace, preset: Preset) -> Task:
    device = args.device or ("cuda" if args.preset == "gpu" else "cpu")
    data, train, test = load(preset.data, args.images if preset.data == "mnist" else None, preset.limit)
    epochs, batch = args.epochs or preset.epochs, args.batch or preset.batch
    return Task(data, train.to(device), test.to(device), epochs, batch, args.seed, device, args.estimator)


def main() -> int:
    args = arguments()
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a CPU without bfloat16: slower, no less right
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.report:
        conclude(read_records(args.report), args.report, {})
        return 0
    preset = PRESETS[args.preset]
    preset = replace(preset, cells=args.cells or preset.cells, seconds=args.seconds or preset.seconds)
    task = make_task(args, preset)
    settings = {"preset": args.preset, "data": task.data, "device": task.device, "examples": len(task.train)}
    settings |= {
        "epochs": task.epochs,
        "batch": task.batch,
        "seed": task.seed,
        "estimator": task.estimator,
        "torch": version("torch"),
    }
    print(", ".join(f"{name} {value}" for name, value in settings.items()), flush=True)
    records = {} if args.out is None else read_records(args.out)
    for name in args.methods:
        records[name] = train_grid(name, task, preset)
        write_record(args.out, records[name])
    conclude({name: records[name] for name in METHODS if name in records}, args.out, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
