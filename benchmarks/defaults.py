"""The defaults race: every member in place of AdamW, at AdamW's rate, with nothing else set.

    LAYERWISE_DATA=… python benchmarks/defaults.py                     # CPU sizes, all tasks and members, one seed
    python benchmarks/defaults.py --tasks gpt digits --members KFAC Muon --seeds 0 1 2 --processes 2
    python benchmarks/defaults.py --full --device cuda --tf32          # the sizes of the papers
    python benchmarks/defaults.py --members KFAC KFAC/damped --options more.json   # {"KFAC/damped": {"damping": 0.3}}

`torch.optim.AdamW` runs first, at 3e-4, 1e-3 and 3e-3. Every member then gets the best of the three, and a third and
three times of it: ``lw.optim.X(model, lr, weight_decay=0.01)``. A run diverges when its loss stops being finite or ends
above that of the untrained model. `worse` is the final loss over AdamW's own best, minus one, by the median over seeds.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from defaults_tasks import TASKS, Data, TaskError, make

import layerwise as lw

MEMBERS = ("KFAC", "EKFAC", "FOOF", "Shampoo", "SOAP", "Muon", "MahalanobisSpectral")
LEADING = ("KFAC", "EKFAC", "SOAP", "Muon")
"""Members that are to be ahead of AdamW on most tasks."""
ADAMW_RATES = (3e-4, 1e-3, 3e-3)
TIMES = (1.0, 1 / 3, 3.0)
WEIGHT_DECAY = 0.01
"""AdamW's own default."""
MOST_WORSE, MOST_AHEAD = 0.02, 6


@dataclass(frozen=True)
class Order:
    """One run, as it is asked for."""

    task: str
    member: str
    rate: float
    times: float
    """Of AdamW's best rate."""
    seed: int


@dataclass
class Run:
    """And as it went."""

    task: str
    member: str
    rate: float
    times: float
    seed: int
    loss: float
    diverged: bool
    seconds: float
    note: str = ""


def optimizer(member: str, model: torch.nn.Module, rate: float, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Torch's AdamW, or a member with what a user of AdamW would give it."""
    if member == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
    kind, _, _ = member.partition("/")  # "KFAC/damping" names a variant of KFAC, for --options
    return getattr(lw.optim, kind)(model, lr=rate, weight_decay=WEIGHT_DECAY, **options.get(member, {}))


def run(order: Order, args: argparse.Namespace) -> Run:
    """Train, and measure the loss at the end."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1 if args.processes > 1 else torch.get_num_threads())
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    task = make(order.task, Data(args.keep), args.device, args.full, args.steps)
    torch.manual_seed(order.seed)
    model = task.model().to(args.device)
    start, before = time.perf_counter(), task.final(model)
    model.train()
    note, loss = "", math.nan
    try:
        options = json.loads(args.options.read_text(encoding="utf-8")) if args.options else {}
        opt = optimizer(order.member, model, order.rate, options)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, task.rate)
        generator = torch.Generator().manual_seed(1000 + order.seed)
        for _ in range(task.steps):
            x, y = task.batch(generator)
            opt.zero_grad()
            task.loss(model, x, y).backward()
            opt.step()
            schedule.step()
        loss = task.final(model)
    except Exception as error:  # a member that cannot train a model is a row of the table
        note = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    diverged = not (math.isfinite(loss) and loss <= before)
    return Run(**asdict(order), loss=loss, diverged=diverged, seconds=time.perf_counter() - start, note=note)


def hold(orders: list[Order], args: argparse.Namespace) -> list[Run]:
    """All of these runs, as many at a time as there are processes."""
    if args.processes == 1:
        return [_said(run(order, args)) for order in orders]
    with ProcessPoolExecutor(args.processes) as pool:
        return [_said(done.result()) for done in as_completed([pool.submit(run, order, args) for order in orders])]


def _said(r: Run) -> Run:
    end = r.note or ("DIVERGED" if r.diverged else "")
    print(
        f"  {r.task:12s}{r.member:22s}{r.rate:9.1e}  seed {r.seed}{r.loss:12.5f}{r.seconds:8.1f} s  {end}", flush=True
    )
    return r


def best_rate(runs: list[Run], task: str) -> float:
    """AdamW's, by the median over seeds."""
    rates = sorted({r.rate for r in runs if r.task == task and r.member == "AdamW"})
    return min(rates, key=lambda rate: median(runs, task, "AdamW", rate))


def median(runs: list[Run], task: str, member: str, rate: float) -> float:
    """Of the final loss over seeds; infinite where most runs diverged."""
    losses = [math.inf if r.diverged else r.loss for r in runs if (r.task, r.member, r.rate) == (task, member, rate)]
    return statistics.median(losses) if losses else math.inf


@dataclass
class Row:
    """A member on a task, beside AdamW at its best rate."""

    task: str
    member: str
    rate: float
    adamw: float
    loss: float
    worse: float
    diverged: list[float]
    """Multiples of the rate at which a run diverged."""
    seconds: float
    note: str = ""


def rows(runs: list[Run], members: list[str]) -> list[Row]:
    """One a task and member."""
    found = []
    for task in dict.fromkeys(r.task for r in runs):
        rate = best_rate(runs, task)
        adamw = median(runs, task, "AdamW", rate)
        for member in members:
            own = [r for r in runs if (r.task, r.member) == (task, member)]
            if not own:
                continue
            loss = median(runs, task, member, rate)
            diverged = sorted({round(r.times, 2) for r in own if r.diverged})
            seconds = statistics.median(r.seconds for r in own)
            note = next((r.note for r in own if r.note), "")
            found.append(Row(task, member, rate, adamw, loss, loss / adamw - 1, diverged, seconds, note))
    return found


def print_table(found: list[Row]) -> None:
    """Members by columns, tasks by rows: the final loss, and how much worse than AdamW's."""
    members = list(dict.fromkeys(row.member for row in found))
    print(f"\n{'':12s}{'rate':>8s}{'AdamW':>10s}" + "".join(f"{member[:18]:>20s}" for member in members))
    for task in dict.fromkeys(row.task for row in found):
        of_task = {row.member: row for row in found if row.task == task}
        first = next(iter(of_task.values()))
        cells = [_cell(of_task.get(member)) for member in members]
        print(f"{task:12s}{first.rate:8.0e}{first.adamw:10.4f}" + "".join(f"{cell:>20s}" for cell in cells))


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    if row.note:
        return "error"
    times = "".join(f" ×{t:g}!" for t in row.diverged)
    return f"{row.loss:.4f} {100 * row.worse:+.1f}%{times}"


def aims(found: list[Row]) -> list[dict[str, Any]]:
    """Never worse than AdamW by more than 2 %, no divergence, and four members ahead on most tasks."""
    worse = [f"{row.member} on {row.task}" for row in found if not row.worse <= MOST_WORSE]
    diverged = [f"{row.member} on {row.task} at ×{t:g}" for row in found for t in row.diverged]
    held = [
        {"aim": f"at most {MOST_WORSE:.0%} worse than AdamW", "not": worse, "held": not worse},
        {"aim": "no divergence at a third and three times", "not": diverged, "held": not diverged},
    ]
    tasks = len({row.task for row in found})
    for member in (m for m in LEADING if any(row.member == m for row in found)):
        ahead = [row.task for row in found if row.member == member and row.worse < 0]
        aim = f"{member} ahead of AdamW on {MOST_AHEAD} of {len(TASKS)} tasks"
        held.append({"aim": aim, "ahead": ahead, "of": tasks, "held": len(ahead) >= MOST_AHEAD})
    return held


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--members", nargs="+", default=list(MEMBERS), help="or KFAC/name, for a variant in --options")
    parser.add_argument("--rates", nargs="+", type=float, default=list(ADAMW_RATES), help="of AdamW, to choose from")
    parser.add_argument("--times", nargs="+", type=float, default=list(TIMES), help="multiples of AdamW's best rate")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--other-seeds", type=int, help="how many of them run at other multiples than 1; all of them")
    parser.add_argument("--steps", type=int, help="of every run, in place of each task's own number")
    parser.add_argument("--full", action="store_true", help="sizes for a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tf32", action="store_true", help="float32 products in TF32, as most loops set it")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--options", type=Path, help="a JSON file: more options of a member, by its name")
    parser.add_argument("--keep", type=Path, help="a file that images and text are kept in, or read from")
    parser.add_argument("--json", type=Path, help="write the JSON line to a file too")
    return parser.parse_args()


def possible(args: argparse.Namespace) -> list[str]:
    """Tasks that can be run here; a word about the others."""
    found = []
    for task in args.tasks:
        try:
            make(task, Data(args.keep), "cpu", args.full)
            found.append(task)
        except TaskError as why:
            print(f"{task} is left out: {why}")
    return found


def main() -> int:
    args = arguments()
    tasks = possible(args)
    runs = hold([Order(t, "AdamW", r, 0.0, s) for t in tasks for r in args.rates for s in args.seeds], args)
    orders = [
        Order(task, member, best_rate(runs, task) * times, times, seed)
        for times in args.times
        for seed in (args.seeds if times == 1 else args.seeds[: args.other_seeds])
        for task in tasks
        for member in args.members
    ]
    runs += hold(orders, args)
    found = rows(runs, args.members)
    print_table(found)
    held = aims(found)
    for aim in held:
        said, named = "held" if aim["held"] else "NOT HELD", ", ".join(aim.get("not") or aim.get("ahead") or ())
        print(f"aim: {aim['aim']}: {said}  {named}")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    record = {"benchmark": "defaults", "torch": torch.__version__, "cores": os.cpu_count(), **settings}
    line = json.dumps({**record, "runs": [asdict(r) for r in runs], "rows": [asdict(r) for r in found], "aims": held})
    if args.json:
        args.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
