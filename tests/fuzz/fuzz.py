"""`make fuzz`: random models, calls in random orders, every answer compared with plain autograd.

    python tests/fuzz/fuzz.py --cases 200 --first 0            # seeds 0 … 199
    python tests/fuzz/fuzz.py --seed-of-case 17 --shrink       # one case, made as small as it still fails

A case is "right", "loud" (an error of the library, with its message), a "crash" (any other exception) or "silent" (a
wrong number). The last line is JSON; the exit code is 1 where something was silent or crashed.
"""

import argparse
import collections
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from cases import make, random_spec
from rich.console import Console
from rich.table import Table
from shrink import shrunk
from verdicts import Verdict, judge, worst

BAD = ("silent", "crash", "oracle")
CHUNK = 500
"""Cases for which processes are started together; a process spends seconds on what torch imports late."""
Task = tuple[int, bool]
"""A seed, and whether parameters are frozen."""


def judged(task: Task) -> tuple[int, list[Verdict]]:
    """The verdicts of a seed; in a process of its own if need be."""
    seed, frozen = task
    torch.set_num_threads(1)
    try:
        return seed, judge(make(random_spec(seed, frozen)))
    except Exception as problem:  # of the generator or the oracle, not of the library
        return seed, [Verdict("oracle", message=f"{type(problem).__name__}: {problem}"[:200])]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed-of-case", type=int, help="this case alone, with every call")
    parser.add_argument("--frozen", action="store_true", help="freeze random parameters in each case")
    parser.add_argument("--shrink", action="store_true", help="print the smallest case that fails in the same way")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args(arguments)
    console = Console(width=160)
    if options.seed_of_case is not None:
        return _one(options.seed_of_case, options.frozen, options.shrink, console)
    tasks = [(seed, options.frozen) for seed in range(options.first, options.first + options.cases)]
    found = dict(_progress(tasks, options.processes, options.seconds))
    bad = report(found, console)
    if options.shrink:
        for seed in bad[:10]:
            _one(seed, options.frozen, True, console)
    cases = collections.Counter(worst(v).word for v in found.values())
    line = {"cases": len(found), "first": options.first, "frozen": options.frozen, **cases}
    seeds = {word: [s for s, v in found.items() if worst(v).word == word] for word in BAD}
    print(json.dumps({**line, "seeds": seeds}))
    return 1 if bad else 0


def _progress(tasks: list[Task], processes: int, seconds: float) -> Iterable[tuple[int, list[Verdict]]]:
    started, counts = time.monotonic(), collections.Counter()
    for done, (seed, verdicts) in enumerate(_each(tasks, processes), 1):
        counts[worst(verdicts).word] += 1
        shown = ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))
        line = f"{done}/{len(tasks)} in {time.monotonic() - started:.0f} s: {shown}"
        if sys.stderr.isatty():
            print(line, end="\n" if done == len(tasks) else "\r", file=sys.stderr, flush=True)
        elif done % 50 == 0 or done == len(tasks):
            print(line, file=sys.stderr, flush=True)
        if worst(verdicts).word in BAD:
            print(f"seed {seed}: {worst(verdicts)}", file=sys.stderr, flush=True)
        yield seed, verdicts
        if time.monotonic() - started > seconds:
            return


def _each(tasks: list[Task], processes: int) -> Iterator[tuple[int, list[Verdict]]]:
    """In order, some at a time: where a process dies, which no exception tells, its cases are run again one by one."""
    for start in range(0, len(tasks), CHUNK):
        chunk, found = tasks[start : start + CHUNK], {}
        with contextlib.suppress(BrokenProcessPool), ProcessPoolExecutor(processes) as pool:
            for task, answer in zip(chunk, pool.map(judged, chunk), strict=True):
                found[task] = answer
                yield answer
        for task in chunk:
            if task not in found:
                yield _in_its_own_process(task)


def _in_its_own_process(task: Task) -> tuple[int, list[Verdict]]:
    try:
        with ProcessPoolExecutor(1) as pool:
            return pool.submit(judged, task).result()
    except BrokenProcessPool:
        return task[0], [Verdict("crash", message="the process died")]


def report(found: dict[int, list[Verdict]], console: Console) -> list[int]:
    """Tables of calls, of messages, and of what went wrong; the seeds of the latter."""
    table = Table("call", "right", "loud", "crash", "silent", title="calls")
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    messages: collections.Counter = collections.Counter()
    for verdict in (v for verdicts in found.values() for v in verdicts):
        counts[" ".join(str(s) for s in verdict.step[:2])][verdict.word] += 1
        if verdict.word == "loud":
            messages[verdict.message] += 1
    for call, of in sorted(counts.items()):
        table.add_row(call, *(str(of[word]) for word in ("right", "loud", "crash", "silent")))
    console.print(table)
    for message, n in messages.most_common(15):
        console.print(f"  loud {n:4d}  {message}", markup=False)
    bad = [seed for seed, verdicts in found.items() if worst(verdicts).word in BAD]
    for seed in bad:
        console.print(f"  seed {seed}: {worst(found[seed])}", markup=False)
    return bad


def _one(seed: int, frozen: bool, shrink: bool, console: Console) -> int:
    spec = random_spec(seed, frozen)
    console.print(spec)
    verdicts = judge(make(spec))
    for verdict in verdicts:
        console.print(f"  {verdict}", markup=False)
    bad = worst(verdicts)
    if shrink and bad.word in BAD:
        small, verdict = shrunk(spec, bad)
        console.print("shrunk to", small, f"{verdict}", markup=False)
    return 1 if bad.word in BAD else 0


if __name__ == "__main__":
    raise SystemExit(main())
