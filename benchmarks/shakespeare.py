"""Time to a validation loss on tiny Shakespeare: members of `lw.optim` beside torch's own, the same grid each.

    LAYERWISE_DATA=… python benchmarks/shakespeare.py              # text/tinyshakespeare.txt in that folder
    python benchmarks/shakespeare.py --members KFAC SOAP "torch AdamW" --rates 1 --budget 60
    python benchmarks/shakespeare.py --total 400 --json race.json  # no run begins after 400 seconds
    python benchmarks/shakespeare.py --tiny --device cpu           # seconds, to see that all runs

A character GPT of 6 × 384 with biases and dropout 0.2, batches of 64 × 256, bf16 autocast on a GPU, gradients clipped
to norm 1, 100 steps of warm-up, then a cosine to a tenth over 1500. The mean loss of 40 batches, the same for all, is
taken every 100 steps, in eval mode, off the clock. Batches are made on the device and nothing is waited for between two
evaluations, but for the first step, whose time is a column (`first`) and part of the seconds.

Before the clock starts a few steps are taken so that kernels are loaded: by another copy of model and optimizer; with
--compile, which is for all alike, by the same ones, and then taken back (weights, optimizer state, batches), so that
compilation is not timed; nor is then the look that K-FAC takes at a model once.
`--rates` are multiples of each member's own rate; embeddings, norm layers and the head have AdamW's rate under all
members. Members take turns, the own rate first, so that all have had it before any has another. A run ends as soon as
it reaches the loss, when it diverges, after as many steps as another run of its member needed, or beyond its budget: it
is then evaluated once more, but a loss that is seen only there does not count as reached.
"""

import argparse
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from shakespeare_members import MEMBERS
from shakespeare_model import TINY, Size, Text
from shakespeare_runs import Race, Run, run

AIM_SECONDS, AIM_MEMBERS = 14.0, 2
SAMPLE = "Shall I compare thee to a summer's day? Thou art more lovely and more temperate. " * 40
"""For --tiny, where no data is at hand."""


def print_head(target: float) -> None:
    print(f"\n  {'':14s}{'rate':>10s}{'steps':>8s}{'seconds':>10s}{'first':>8s}{'ms/step':>9s}{'best':>8s}", end="")
    print(f"{'fallbacks':>11s}{'skipped':>9s}  to {target}")


def print_run(r: Run) -> None:
    health = "".join(f"{'–' if n is None else n!s:>{w}s}" for n, w in ((r.fallbacks, 11), (r.skipped_steps, 9)))
    ms = 1e3 * r.seconds / max(r.steps, 1)
    times = f"{r.steps:8d}{r.seconds:10.2f}{r.startup:8.2f}{ms:9.2f}{r.best:8.4f}"
    said = r.note or ("reached" if r.reached else "not reached")
    print(f"  {r.member:14s}{r.rate:10.2e}{times}{health}  {said}", flush=True)


def best(runs: list[Run]) -> list[Run]:
    """Of each member: the fastest run that reached the loss, else the one that came nearest."""
    members = dict.fromkeys(r.member for r in runs)
    return [min((r for r in runs if r.member == m), key=_order) for m in members]


def _order(r: Run) -> tuple[bool, float]:
    return not r.reached, r.seconds if r.reached else r.best


def turns(members: list[str], rates: list[float]) -> list[tuple[str, float]]:
    """Every member at its own rate first, then every member at the next."""
    return [(member, rate) for rate in sorted(rates, key=lambda rate: rate != 1.0) for member in members]


def to_beat(runs: list[Run], member: str, steps: int) -> int:
    """Steps of the member's best run that reached the loss: with more, a run tells nothing new of the member."""
    return min((r.steps for r in runs if r.member == member and r.reached), default=steps)


def aim(chosen: list[Run]) -> dict:
    fast = [r.member for r in chosen if r.reached and r.seconds <= AIM_SECONDS]
    bound = {"seconds": AIM_SECONDS, "members": AIM_MEMBERS}
    return {"aim": "seconds to the loss", **bound, "by": fast, "held": len(fast) >= AIM_MEMBERS}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", nargs="+", choices=list(MEMBERS), default=list(MEMBERS))
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 2.0, 0.5], help="multiples of the own rate")
    parser.add_argument("--target", type=float, default=1.5, help="validation loss")
    parser.add_argument("--steps", type=int, help="at most; the schedule is stretched to it")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds of training for each run")
    parser.add_argument("--total", type=float, default=math.inf, help="seconds after which no further run begins")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small model: a check, not a measurement")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="PATH", help="write the JSON line to a file too")
    return parser.parse_args()


def load(size: Size, device: str, tiny: bool) -> Text:
    path = Path(os.environ.get("LAYERWISE_DATA", "")) / "text" / "tinyshakespeare.txt"
    if not path.is_file() and tiny:
        return Text(SAMPLE, size, device)
    if not path.is_file():
        sys.exit("no text/tinyshakespeare.txt in the folder that LAYERWISE_DATA names; set it: export LAYERWISE_DATA=…")
    return Text.read(path, size, device)


def results(args: argparse.Namespace, where: str, runs: list[Run], left_out: list[tuple[str, float]]) -> str:
    """The JSON line."""
    settings = {"machine": where, "torch": torch.__version__, **{k: v for k, v in vars(args).items() if k != "json"}}
    for name in ("budget", "total"):
        settings[name] = None if math.isinf(settings[name]) else settings[name]
    chosen = best(runs)
    found = {"runs": [r.record() for r in runs], "best": [r.record() for r in chosen], "aim": aim(chosen)}
    return json.dumps({"benchmark": "shakespeare", **settings, **found, "left_out": left_out})


def hold(race: Race, args: argparse.Namespace, where: str) -> tuple[list[Run], str]:
    """All runs, each printed as it ends; a file, if one is asked for, holds those so far."""
    runs: list[Run] = []
    start, due = time.perf_counter(), turns(args.members, args.rates)
    line = results(args, where, runs, due)
    while due and time.perf_counter() - start < args.total:
        member, rate = due.pop(0)
        runs.append(run(race, member, MEMBERS[member].rate * rate, to_beat(runs, member, race.size.steps)))
        print_run(runs[-1])
        line = results(args, where, runs, due)
        if args.json:
            Path(args.json).write_text(line + "\n", encoding="utf-8")
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
    if due:
        print(f"  no time left for: {', '.join(f'{member} × {rate:g}' for member, rate in due)}")
    return runs, line


def main() -> int:
    args = arguments()
    warnings.simplefilter("ignore")  # of the compiler
    size = TINY if args.tiny else Size()
    if args.steps:
        size = Size(**{**vars(size), "steps": args.steps})
    race = Race(load(size, args.device, args.tiny), size, args.target, args.budget, args.compile, args.seed)
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    print(f"{where}, torch {torch.__version__}, {'compiled' if args.compile else 'eager'}")
    print_head(args.target)
    runs, line = hold(race, args, where)
    chosen = best(runs)
    print("\nbest of each member")
    for r in chosen:
        print_run(r)
    found = aim(chosen)
    if not args.tiny:
        held = "held" if found["held"] else "NOT HELD"
        print(f"\naim: {args.target} in ≤ {AIM_SECONDS:g} s by {AIM_MEMBERS} members: {', '.join(found['by'])}  {held}")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
