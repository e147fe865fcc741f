"""Time to a validation loss on tiny Shakespeare, start-up included: members of `lw.optim` beside torch's own.

    LAYERWISE_DATA=… python benchmarks/shakespeare.py --json race.json   # text/tinyshakespeare.txt in that folder
    python benchmarks/shakespeare.py --json race.json --total 500        # goes on with a file; no run begins after 500
    python benchmarks/shakespeare.py --members SOAP "torch Muon" --seeds 1 2
    python benchmarks/shakespeare.py --tiny --device cpu                 # to see that all runs; times mean nothing

A character GPT of 6 × 384 with biases and dropout 0.2, batches of 64 × 256, eager, bf16 autocast on a GPU, gradients
clipped to norm 1, 100 steps of warm-up, then a cosine to a tenth over 1500. The loss over all held-out text is taken
every 50 steps, off the clock.

First each member is trained at three rates, the same for all, with one seed; several processes at once, since only
steps are counted, not seconds. The rate that needs the fewest steps is then run with three other seeds, each run in a
process of its own, alone on the device, with empty caches of compiled kernels. The clock starts with the construction
of the optimizer: compilation, first steps and first refreshes are on it (`start-up`: construction and ten steps). What
a loop with any optimizer loads is not: torch and its compiler, and the libraries of forward and backward.

A run ends when it reaches the loss, diverges, has taken as many steps as another rate of its member needed, or --limit
seconds. On an H200 all takes some 10 minutes: 2.5 for the rates, 20 s for each of the 21 runs.
"""

import argparse
import contextlib
import json
import math
import statistics
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from processes import ProcessError, Waiting, cold_caches, wait_for_turn
from shakespeare.members import MEMBERS, RATES
from shakespeare.model import TINY, Size, Text
from shakespeare.runs import Race, Run, run

AIM_SECONDS, AIM_MEMBERS = 14.0, 4
TUNING_SEED = 0
IMPORTS = 15.0
"""Seconds for all processes to import torch, before the first one takes the device."""


def print_head(target: float) -> None:
    heads = ("rate", "seed", "steps", "seconds", "start-up", "ms/step", "host", "best", "refused", "skipped")
    print(f"  {'':14s}" + "".join(f"{head:>9s}" for head in heads) + f"  to {target}")


def print_run(r: Run) -> None:
    times = f"{r.seconds:9.2f}{r.startup:9.2f}{r.steady_ms:9.2f}{r.host:9.2f}{r.best:9.4f}"
    health = "".join(f"{'–' if n is None else n!s:>9s}" for n in (r.refusals, r.skipped_steps))
    said = r.note or ("reached" if r.reached else "not reached")
    print(f"  {r.member:14s}{r.rate:9.0e}{r.seed:9d}{r.steps:9d}{times}{health}  {said}", flush=True)


def order(r: Run) -> tuple[bool, int, float]:
    """The fewest steps first; of equals, and of runs that did not reach the loss, the lower loss."""
    return not r.reached, r.steps if r.reached else 0, r.best


def to_beat(runs: list[Run], steps: int) -> int:
    """Steps of the best run that reached the loss: with more, another rate is no better."""
    return min((r.steps for r in runs if r.reached), default=steps)


def summaries(runs: list[Run]) -> list[dict]:
    """Of each member: seconds and steps over seeds."""
    found = []
    for member in dict.fromkeys(r.member for r in runs):
        own = [r for r in runs if r.member == member]
        seconds = [r.seconds for r in own]
        middle = {name: statistics.median(getattr(r, name) for r in own) for name in ("steps", "startup", "host")}
        found.append(
            {
                "member": member,
                "rate": own[0].rate,
                "seeds": len(own),
                "reached": sum(r.reached for r in own),
                "seconds": [round(s, 2) for s in seconds],
                "median": round(statistics.median(seconds), 2),
                **{name: round(value, 2) for name, value in middle.items()},
            }
        )
    return sorted(found, key=lambda s: (s["reached"] < s["seeds"], s["median"]))


def aims(found: list[dict]) -> list[dict]:
    """Members that are fast in every seed; and all of ours below all of torch's."""
    ours = [s for s in found if not s["member"].startswith("torch")]
    theirs = [s["median"] if s["reached"] == s["seeds"] else math.inf for s in found if s["member"].startswith("torch")]
    fast = [s["member"] for s in ours if s["reached"] == s["seeds"] and max(s["seconds"]) <= AIM_SECONDS]
    behind = [s["member"] for s in ours if theirs and (s["reached"] < s["seeds"] or s["median"] >= min(theirs))]
    return [
        {"aim": f"≥ {AIM_MEMBERS} members below {AIM_SECONDS:g} s", "by": fast, "held": len(fast) >= AIM_MEMBERS},
        {"aim": "all below torch's", "behind": behind, "held": bool(theirs) and not behind},
    ]


def print_summary(found: list[dict]) -> None:
    print(f"\n  {'':14s}{'rate':>9s}{'reached':>9s}{'steps':>9s}{'seconds':>9s}{'start-up':>9s}{'host':>9s}  by seed")
    for s in found:
        reached = f"{s['reached']}/{s['seeds']}"
        numbers = f"{s['steps']:9.0f}{s['median']:9.2f}{s['startup']:9.2f}{s['host']:9.2f}"
        print(f"  {s['member']:14s}{s['rate']:9.0e}{reached:>9s}{numbers}  {s['seconds']}")


class Book:
    """All runs so far, in a file where one is asked for; what is there is not run again."""

    def __init__(self, args: argparse.Namespace, where: str) -> None:
        self.args, self.where, self._lock = args, where, threading.Lock()
        self.tuning: list[Run] = []
        self.final: list[Run] = []
        if args.json and Path(args.json).is_file():
            before = json.loads(Path(args.json).read_text(encoding="utf-8"))
            self.tuning, self.final = ([Run.read(r) for r in before[name]] for name in ("tuning", "final"))

    def record(self) -> dict:
        settings = {name: value for name, value in vars(self.args).items() if name not in ("json", "run", "most")}
        settings |= {"total": None if math.isinf(self.args.total) else self.args.total}
        found = summaries(self.final)
        runs = {"tuning": [r.record() for r in self.tuning], "final": [r.record() for r in self.final]}
        about = {"benchmark": "shakespeare", "machine": self.where, "torch": torch.__version__}
        return {**about, **settings, **runs, "summary": found, "aims": aims(found)}

    def add(self, runs: list[Run], r: Run) -> None:
        with self._lock:
            runs.append(r)
            print_run(r)
            if self.args.json:
                Path(self.args.json).write_text(json.dumps(self.record()) + "\n", encoding="utf-8")

    def rates_left(self, member: str) -> list[float]:
        done = {r.rate for r in self.tuning if r.member == member}
        return [rate for rate in self.args.rates if rate not in done]

    def chosen(self, member: str) -> float:
        own = [r for r in self.tuning if r.member == member and r.rate in self.args.rates]
        return min(own, key=order).rate if own else self.args.rates[0]

    def has(self, member: str, rate: float, seed: int) -> bool:
        return any((r.member, r.rate, r.seed) == (member, rate, seed) for r in self.final)


def begin(
    args: argparse.Namespace, member: str, rate: float, seed: int, most: int | None, caches: dict | None
) -> Waiting:
    """A run in another process, with its own caches, or with those of this machine and without a clock that counts."""
    own = ["--run", member, "--rates", str(rate), "--seeds", str(seed), "--target", str(args.target)]
    limit = args.limit if caches else args.limit * args.processes
    own += ["--limit", str(limit), "--device", args.device, *(["--tiny"] if args.tiny else [])]
    own += [*(["--steps", str(args.steps)] if args.steps else []), *(["--most", str(most)] if most else [])]
    return Waiting(Path(__file__), own, caches or {})


def end(process: Waiting, member: str, rate: float, seed: int) -> Run:
    """What a run gave, once it may take the device."""
    try:
        return Run.read(json.loads(process.output().splitlines()[-1]))
    except ProcessError as error:
        return Run(member, rate, seed, note=f"fails: {error}")


def tune(book: Book, start: float) -> None:
    """All rates of each member one after the other, several members at a time."""
    args = book.args
    print(f"\nrates, seed {TUNING_SEED}, {args.processes} processes at once: steps count, seconds do not")
    print_head(args.target)

    def one(member: str) -> None:
        for rate in book.rates_left(member):
            if time.perf_counter() - start > args.total:
                return
            done = [r for r in book.tuning if r.member == member]
            most = to_beat(done, args.steps or 0) or None
            process = begin(args, member, rate, TUNING_SEED, most, None)
            book.add(book.tuning, end(process, member, rate, TUNING_SEED))

    with ThreadPoolExecutor(args.processes) as pool:
        list(pool.map(one, args.members))


def report(book: Book, start: float) -> None:
    """The chosen rates with other seeds, one run at a time; members take turns, so that drift is everybody's."""
    args = book.args
    print("\nat the chosen rates, each in a process of its own with empty caches")
    print_head(args.target)
    wanted = [(member, book.chosen(member), seed) for seed in args.seeds for member in args.members]
    wanted = [run for run in wanted if not book.has(*run)]
    with contextlib.ExitStack() as folders:
        waiting = [begin(args, *run, None, folders.enter_context(cold_caches())) for run in wanted]
        for process in waiting:
            folders.callback(process.stop)
        time.sleep(IMPORTS if waiting and not args.tiny else 0)
        for run, process in zip(wanted, waiting, strict=True):
            if time.perf_counter() - start > args.total:
                print("  no time left")
                return
            book.add(book.final, end(process, *run))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", nargs="+", choices=list(MEMBERS), default=list(MEMBERS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="one: it is taken without tuning")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3], help="of the runs at the chosen rates")
    parser.add_argument("--target", type=float, default=1.5, help="validation loss")
    parser.add_argument("--steps", type=int, help="at most; the schedule is stretched to it")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds of training for each run")
    parser.add_argument("--total", type=float, default=math.inf, help="seconds after which no further run begins")
    parser.add_argument("--processes", type=int, default=4, help="at once, while rates are chosen")
    parser.add_argument("--tiny", action="store_true", help="a small model: a check, not a measurement")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="PATH", help="write the JSON line to a file, or go on with it")
    parser.add_argument("--run", choices=list(MEMBERS), help=argparse.SUPPRESS)  # one run, of a process of its own
    parser.add_argument("--most", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def one_run(args: argparse.Namespace) -> None:
    size = TINY if args.tiny else Size()
    if args.steps:
        size = Size(**{**vars(size), "steps": args.steps})
    race = Race(Text.load(size, args.device, args.tiny), size, args.target, args.limit)
    print(json.dumps(run(race, args.run, args.rates[0], args.seeds[0], args.most).record()))


def main() -> int:
    args, start = arguments(), time.perf_counter()
    warnings.simplefilter("ignore")  # of torch's own deprecations
    if args.run:
        wait_for_turn()
        one_run(args)
        return 0
    Text.load(TINY if args.tiny else Size(), "cpu", args.tiny)  # says at once what is missing
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    print(f"{where}, torch {torch.__version__}, eager")
    book = Book(args, where)
    if len(args.rates) > 1:
        tune(book, start)
    report(book, start)
    found = summaries(book.final)
    print_summary(found)
    for aim in () if args.tiny else aims(found):
        who = ", ".join(aim.get("by") or aim.get("behind") or ("–",))
        print(f"aim: {aim['aim']}: {who}  {'held' if aim['held'] else 'NOT HELD'}")
    print(f"{time.perf_counter() - start:.0f} s in all")
    if not args.json:
        print(json.dumps(book.record()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
