"""Training on a GPU with members of `lw.optim`, torch's optimizers and other packages': what a step really costs.

    python benchmarks/gpu.py                                     # three models, 250 steps of every optimizer
    python benchmarks/gpu.py --models fused --members Muon SOAP "KFAC sampled 10"
    python benchmarks/gpu.py --models fused --data text          # tiny Shakespeare, from the folder LAYERWISE_DATA
    python benchmarks/gpu.py --models fused --startup            # first ten steps, cold and warm cache, new processes
    python benchmarks/gpu.py --best-case                         # one batch that is hardly learnt, and the limits
    python benchmarks/gpu.py --tiny --device cpu                 # seconds, to see that all runs; times mean nothing

Models: GPTs of 12 × 768 with queries, keys and values in one matrix (`fused`) or three (`split`), 8 × 1024 tokens of a
random walk that can be learnt; a ResNet-18 on 512 images of 32 × 32, textures under noise. A new batch comes at every
step, under bfloat16 autocast. Members have their defaults, among them AdamW's rate of 1e-3, after a warm-up of 25
steps; embeddings and head of a GPT are AdamW's. "KFAC sampled 10" takes statistics every ten steps, "KFAC" at
every step.

Milliseconds by CUDA events around whole iterations, from the construction of the optimizer on, in one uninterrupted run
that nothing waits for; the same iteration without optimizer is taken just before and after. Columns:
  adds       mean iteration of steps 50 to 250, less the median one without optimizer; `in step` is its part in step()
  slowest    iteration of steps 10 to 250, and over the median one
  host       median of step() on the host as it comes, and the longest of steps 10 to 250; `alone`: median when step()
             begins on an idle device, where no launch waits for a place in the queue: what the host itself takes
  first 10   seconds of construction and the first ten iterations, with what this process has already compiled
  compiled   kernels compiled in this run, and those after step 10 (of kernels that earlier rows share, the first row
             counts them: --startup gives each row a process)
  sync       operations after step 10 at which the host waited for the device (torch.cuda.set_sync_debug_mode)
  refused    `health().refusals`; rounds where `health()` has them; state over that of AdamW; loss: the last ten steps
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from gpu.best_case.table import best_case, print_aims
from gpu.rows import OURS, rows
from gpu.startup import startup
from gpu.tasks import MODELS, Task, task
from gpu.training import measure

from layerwise.optim.cuda.triton import compile_processes

SLOWEST_AIM, HOST_AIM, STATE_AIM, COLD_AIM, WARM_AIM = 1.5, 2.0, 2.0, 5.0, 1.5
COLUMNS = (
    ("adds", "adds", 2),
    ("in step", "in_step", 2),
    ("median", "median", 2),
    ("slowest", "slowest", 1),
    ("/median", "ratio", 2),
    ("at", "slowest_at", 0),
    ("host", "host", 2),
    ("max", "host_max", 1),
    ("alone", "host_alone", 2),
    ("first 10", "first_ten_s", 2),
    ("compiled", "compiled", 0),
    ("late", "compiled_late", 0),
    ("sync", "synchronisations", 0),
    ("refused", "refusals", 0),
    ("rounds", "rounds", 0),
    ("×AdamW", "state_of_adamw", 2),
    ("loss", "loss", 3),
)
STARTUP_COLUMNS = (
    ("cold, s", "cold_s", 2),
    ("warm, s", "warm_s", 2),
    ("made in", "construction_s", 2),
    ("compiled", "compiled", 0),
    ("late", "compiled_late", 0),
    ("warm", "warm_compiled", 0),
    ("slowest", "slowest", 1),
    ("at", "slowest_at", 0),
    ("whole, s", "whole_s", 2),
)
Columns = tuple[tuple[str, str, int], ...]


def print_head(columns: Columns) -> None:
    print(f"  {'':24s}" + "".join(f"{head:>9s}" for head, _, _ in columns))


def print_row(r: dict, columns: Columns) -> None:
    if "note" in r:
        print(f"  {r['name']:24s}{r['note']}", flush=True)
        return
    cells = ((r.get(key), digits) for _, key, digits in columns)
    shown = "".join(f"{'–' if value is None else format(value, f'.{digits}f'):>9s}" for value, digits in cells)
    print(f"  {r['name']:24s}{shown}", flush=True)
    for line in r.get("synchronised_at", ()):
        print(f"  {'':26s}waits at {line}")


def aims(model: str, found: list[dict]) -> list[dict]:
    """What was asked for, and whether it is so."""
    checks: list[dict] = []
    own = {row.name: row for row in OURS}
    for r in (r for r in found if r["name"] in own):

        def at_most(what: str, key: str, bound: float | None, r: dict = r) -> None:
            if bound is not None and r.get(key) is not None:
                held = r[key] <= bound
                checks.append({"aim": f"{model}, {r['name']}: {what}", "value": r[key], "bound": bound, "held": held})

        at_most("adds, ms", "adds", None if model == "resnet" else own[r["name"]].aim)
        at_most("slowest / median", "ratio", SLOWEST_AIM)
        at_most("host, ms", "host_alone", HOST_AIM)
        at_most("synchronisations", "synchronisations", 0)
        at_most("kernels compiled after ten steps", "compiled_late", 0)
        at_most("state, × AdamW's", "state_of_adamw", STATE_AIM)
        at_most("first ten steps, cold, s", "cold_s", COLD_AIM)
        at_most("first ten steps, warm, s", "warm_s", WARM_AIM)
    return checks


def training(args: argparse.Namespace, name: str) -> dict:
    """The table of one model."""
    made: Task = task(name, args.device, args.tiny, args.data, args.steps + 1)
    plain, found = made.model(), []
    parameters = sum(p.numel() for p in plain.parameters())
    for row in rows(args.members, not args.no_peers):
        found.append(measure(made, plain, row, args.steps))
        if len(found) == 1:
            base = found[0].get("plain", float("nan"))
            print(
                f"\n{name}: {parameters / 1e6:.1f} M parameters, forward and backward {base:.2f} ms, {args.steps} steps"
            )
            print_head(COLUMNS)
        print_row(found[-1], COLUMNS)
    return {"parameters": parameters, "rows": found, "aims": [] if args.tiny else aims(name, found)}


def start_ups(args: argparse.Namespace, name: str) -> dict:
    """The table of one model's first steps."""
    print(
        f"\n{name}: construction (`made in`, cold) and first ten iterations; "
        f"`late`: kernels compiled after them, in {args.steps} steps"
    )
    print_head(STARTUP_COLUMNS)
    options = ["--device", args.device, "--data", args.data, *(["--tiny"] if args.tiny else [])]
    options += ["--threads"] if args.threads else []
    found = []
    for row in rows(args.members, not args.no_peers):
        found.append(startup(options, name, row.name, args.steps))
        print_row(found[-1], STARTUP_COLUMNS)
    return {"rows": found, "aims": [] if args.tiny else aims(name, found)}


def without_iterations(record: Any) -> Any:
    """The record without long lists of times."""
    if isinstance(record, dict):
        return {key: without_iterations(value) for key, value in record.items() if key != "iterations"}
    return [without_iterations(value) for value in record] if isinstance(record, list) else record


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--members", nargs="+", metavar="ROW", help="by default all")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--data", choices=("markov", "text"), default="markov", help="of GPTs")
    parser.add_argument("--startup", action="store_true", help="first ten steps only, cold and warm cache")
    parser.add_argument("--threads", action="store_true", help="compile kernels ahead without processes of their own")
    parser.add_argument("--no-peers", action="store_true", help="without other packages")
    parser.add_argument("--best-case", action="store_true", help="one batch that is hardly learnt; and limits")
    parser.add_argument("--no-limits", action="store_true", help="of --best-case")
    parser.add_argument("--cycles", type=int, default=3, help="of --best-case: cycles of ten steps that are timed")
    parser.add_argument("--tiny", action="store_true", help="small models: a check, not a measurement")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--json", metavar="PATH", help="write the JSON line to a file, with every iteration's time, and do not print it"
    )
    return parser.parse_args()


def main() -> int:
    args, start = arguments(), time.perf_counter()
    warnings.simplefilter("ignore")  # the peers' own deprecations; a row records what was said while it ran
    if args.threads:
        compile_processes.may_begin = lambda: False
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    print(f"{where}, torch {torch.__version__}")
    if args.best_case:
        limits = not args.no_limits
        found = best_case(args.device, args.tiny, args.members, not args.no_peers, limits, args.cycles)
    else:
        tables = {name: (start_ups if args.startup else training)(args, name) for name in args.models}
        print_aims([check for table in tables.values() for check in table["aims"]])
        found = {"models": tables}
    seconds = round(time.perf_counter() - start, 1)
    print(f"\n{seconds} s in all")
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "no_limits", "cycles")}
    record = {"benchmark": "gpu", "machine": where, "torch": torch.__version__, "seconds": seconds, **settings, **found}
    if args.json:
        Path(args.json).write_text(json.dumps(record) + "\n", encoding="utf-8")
    else:
        print(json.dumps(without_iterations(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
