"""Time and memory of Kronecker-factored Fishers: layerwise, its peers and the physical limit, in one run.

    python benchmarks/curvature.py                                   # all models, tasks and systems
    python benchmarks/curvature.py --models gpt --tasks kfac-sampled ekfac-sampled --repeats 9
    python benchmarks/curvature.py --memory                          # peak memory too, one process a row
    python benchmarks/curvature.py --check                           # do the systems compute the same matrix?

Times are medians of calls made by turns; × is relative to one forward+backward of the same group, × limit to
the sum of bare operations no method can avoid (the rows marked ·). Peers that are not installed are skipped.
On a busy machine use --threads 1 and the ratios of CPU time: threads that wait for each other burn time in both.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: idle threads must not burn a core

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable

import torch
from agreement import check
from limits import TRAINING, Bare, unavoidable
from measure import Row, Seconds, by_turns, peak_bytes
from models import MODELS, SMALL_BATCH, Problem, problem
from peers import SYSTEMS
from systems import System
from tables import aims, print_aims, print_group, record

TASKS = (
    "kfac-sampled",
    "kfac-empirical",
    "kfac-exact",
    "ekfac-sampled",
    "ekfac-empirical",
    "product",
    "solve",
    "solve-first",
)
DEFAULT_TASKS = tuple(task for task in TASKS if task != "ekfac-empirical")  # same work as sampled


def prepare(system_of: Callable[[], System], task: str) -> Callable[[], object]:
    """Untimed: a system of its own and what the task starts from. Returns the call to time.

    solve-first starts from the factors, solve from whatever a first solve leaves prepared.
    """
    system = system_of()
    if "-" in task and task != "solve-first":
        structure, estimator = task.split("-")
        return lambda: system.fisher(structure, estimator)
    F = system.fisher("kfac", "sampled")
    v = system.vector({name: torch.randn_like(p) for name, p in system.parameters().items()})
    if task == "product":
        return lambda: system.product(F, v)
    if task == "solve-first":
        return lambda: system.solve(system.inverse(F), v)
    inverse = system.inverse(F)
    system.solve(inverse, v)
    return lambda: system.solve(inverse, v)


def system_row(name: str, p: Problem, task: str, slow: bool) -> Row:
    cls = SYSTEMS[name]
    fresh = task == "solve-first" and cls.remembers_inverse
    row = Row(cls.name, lambda: prepare(lambda: cls(p), task), fresh)
    why = cls.supports(p.name, task)
    if not cls.available():
        row.note = f"skipped: no usable {cls.package} is installed"
    elif why and not (slow and why.startswith("slow")):
        row.note = f"not measured: {why}"
    return row


def outputs(p: Problem) -> int:
    """Backward passes of an exact Fisher: the rank of the loss's Hessian in the outputs of one example."""
    with torch.no_grad():
        C = p.model(p.x[:1]).shape[-1]
    return C if p.likelihood == "gaussian" else C - 1


def measure_group(p: Problem, task: str, args: argparse.Namespace) -> dict:
    """One task on one model: yardstick, limits and all systems by turns."""
    bare = Bare(p)
    limit = unavoidable(task, outputs(p))
    operations = bare.operations()
    bare_rows = [Row(name, operations[name]) for name in dict.fromkeys((TRAINING, *limit))]
    rows = [system_row(name, p, task, args.slow) for name in args.systems]
    by_turns(bare_rows + rows, args.repeats, args.patience, args.device)
    bare_named = {row.name: row for row in bare_rows}
    total = Seconds.weighted([(bare_named[name].seconds(), count) for name, count in limit.items()])
    if args.memory:
        for name, row in [(TRAINING, bare_rows[0]), *zip(args.systems, rows, strict=True)]:
            row.peak_mb = peak_in_fresh_process(p.name, task, name, args) if not row.note else None
    return {"model": p.name, "task": task, "limit": total, "bare": bare_rows, "rows": rows}


def peak_in_fresh_process(model: str, task: str, system: str, args: argparse.Namespace) -> float | None:
    """Megabytes; a process of its own, so that no earlier call has left memory to reuse."""
    command = [sys.executable, __file__, "--peak-of", model, task, system, "--device", args.device]
    if args.threads:
        command += ["--threads", str(args.threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) / 1e6 if done.returncode == 0 else None


def print_peak(model: str, task: str, system: str, device: str) -> None:
    """The body of that process; the same call on the tiny model first loads what is loaded once."""

    def call_on(p: Problem):
        if system == TRAINING:
            return Bare(p).forward_backward
        return prepare(lambda: SYSTEMS[system](p), task)

    call_on(problem(model, device, tiny=True))()
    print(peak_bytes(call_on(problem(model, device)), device))


def planned(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(model, task); the exact Fisher only where the number of outputs allows it."""
    plan = [(m, t) for m in args.models for t in args.tasks if t != "kfac-exact" or m == "resnet"]
    if "kfac-exact" in args.tasks and args.exact_large and "autoencoder" in args.models:
        plan.append((SMALL_BATCH, "kfac-exact"))
    return plan


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(DEFAULT_TASKS))
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=float, default=5, help="seconds a row may take in all")
    parser.add_argument("--slow", action="store_true", help="also what takes minutes a call")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--exact-large", action="store_true", help="exact Fisher of the autoencoder, at batch 16")
    parser.add_argument("--memory", action="store_true", help="peak memory of each call, in a process of its own")
    parser.add_argument("--check", action="store_true", help="compare results on tiny models instead of timing")
    parser.add_argument("--json", metavar="PATH", help="write the JSON line to a file too")
    parser.add_argument("--peak-of", nargs=3, metavar=("MODEL", "TASK", "SYSTEM"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    warnings.simplefilter("ignore")  # the peers' own deprecations
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.peak_of:
        print_peak(*args.peak_of, args.device)
        return 0
    if args.check:
        return 0 if check(args.systems, args.device) else 1
    groups = []
    for name, task in planned(args):
        groups.append(measure_group(problem(name, args.device), task, args))
        print_group(groups[-1])
    if "kfac-exact" in args.tasks:
        print("\nkfac-exact: not for autoencoder (784 outputs; see --exact-large) and gpt (128 × 1024)")
    found = aims(groups)
    print_aims(found)
    settings = {"device": args.device, "threads": torch.get_num_threads(), "repeats": args.repeats}
    settings["load"] = round(os.getloadavg()[1], 2)  # five minutes, our own threads among them
    print(f"\nload {settings['load']}, {settings['threads']} threads, {os.cpu_count()} cores")
    line = json.dumps(record(groups, found, settings))
    print(line)
    if args.json:
        with open(args.json, "w") as file:
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
