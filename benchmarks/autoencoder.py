"""Training a deep sigmoid autoencoder: every optimizer, a grid each, the same budget.

    python benchmarks/autoencoder.py --preset smoke                  # digits, two epochs: does it run?
    python benchmarks/autoencoder.py --preset digits                 # digits, 30 epochs, minutes
    python benchmarks/autoencoder.py --preset cpu                    # 10,000 images of MNIST, 3 epochs
    python benchmarks/autoencoder.py --preset gpu --out results      # all of MNIST, 10 epochs
    python benchmarks/autoencoder.py --report results                # table and figure of what is in a folder

MNIST comes from the folder that LAYERWISE_DATA names, or from --images; otherwise digits are used. Learning rates are
constant, the best cell of each grid is the one with the lowest final training loss, and every method has the same
number of cells, epochs and seconds. Each method's record is written as it ends, so that several calls with other
--methods and the same --out make one report. Losses are cross-entropies summed over pixels, averaged over examples.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: idle threads must not burn a core

import argparse
import json
import math
import sys
import warnings
from dataclasses import asdict, dataclass
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
    cells: int | None = None
    seconds: float = math.inf


PRESETS = {
    "smoke": Preset("digits", None, epochs=2, batch=200, cells=2),
    "digits": Preset("digits", None, epochs=30, batch=200),
    "cpu": Preset("mnist", 10_000, epochs=3, batch=200),
    "gpu": Preset("mnist", None, epochs=10, batch=500, seconds=120),
}


def train_grid(name: str, task: Task, cells: int | None, seconds: float) -> Record:
    """All cells of a method, each with an equal share of its seconds."""
    method = METHODS[name]
    settings = method.cells(task.data)
    settings = settings if cells is None else spread(settings, cells)
    runs = []
    for number, setting in enumerate(settings, start=1):
        runs.append(run(method, setting, task, seconds / len(settings)))
        report_cell(method, number, len(settings), runs[-1])
    finals = [r.final for r in runs]
    chosen = finals.index(min(finals)) if math.isfinite(min(finals)) else None
    edges = [] if chosen is None else method.edges(task.data, runs[chosen].setting)
    named = {"method": name, "title": method.title, "data": task.data}
    return named | {"best": chosen, "edges": edges, "runs": [asdict(r) for r in runs]}


def spread(settings: list[dict], cells: int) -> list[dict]:
    """So many settings, the middle ones of equal parts of the list."""
    count = min(cells, len(settings))
    return [settings[(2 * k + 1) * len(settings) // (2 * count)] for k in range(count)]


def report_cell(method: Method, number: int, total: int, found: Run) -> None:
    setting = ", ".join(f"{k} {v:g}" for k, v in found.setting.items())
    end = found.note if found.note.startswith("fails") else f"{found.losses[-1]:.2f}  {found.note}"
    took = f"{found.seconds[-1]:.1f} s, {len(found.losses) - 1} epochs"
    print(f"  {method.title:20s}{number:3d}/{total}  {setting:28s}{took:22s}{end}", flush=True)


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
        records[name] = train_grid(name, task, args.cells or preset.cells, args.seconds or preset.seconds)
        write_record(args.out, records[name])
    conclude({name: records[name] for name in METHODS if name in records}, args.out, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
