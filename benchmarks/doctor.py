"""How often `lw.doctor` names the planted fault first, and whether its ranking of optimizers is that of short runs.

    python benchmarks/doctor.py                       all three parts, on seeds that no threshold was chosen on
    python benchmarks/doctor.py zoo --seeds 10 11     planted faults and healthy networks: what is found first
    python benchmarks/doctor.py drawn --sets 1        the same on networks, faults and sizes drawn at random
    python benchmarks/doctor.py ranking               predicted decrease of nine optimizers against tuned runs
    python benchmarks/doctor.py gpt                   time and memory on a transformer of 6 × 384

Prints tables, and one JSON line at the end. The zoo takes some five minutes a seed on one core, the ranking some ten.
"""

import argparse
import json
import time
from collections.abc import Sequence

import torch
from doctor.case import Case
from doctor.cost import gpt
from doctor.drawn import drawn as drawn_set
from doctor.ranking import ranking
from doctor.zoo import ZOO, made

import layerwise as lw
from layerwise.foundations.errors import LayerwiseError

ZOO_HEAD = f"{'patient':32s}{'network':30s}{'seed':>5s}  {'planted':24s}{'found first':34s}{'s':>6s}"


def examined(name: str, fault: str | None, network: str, seed: int, case: Case) -> dict:
    """One patient, printed as a line. Right: the fault is named first, or nothing is severe where there is none."""
    start, findings, severe = time.process_time(), [], False
    try:
        report = lw.doctor(
            case.model,
            case.data,
            case.likelihood,
            optimizer=case.optimizer,
            members=("SGD", "Adam", "KFAC"),
            seconds=600,
        )
        findings, severe = report.findings, bool(report.severe())
        found = f"{findings[0].kind} ({findings[0].severity})" if findings else "nothing"
    except LayerwiseError as error:  # wrong, whatever was planted: the doctor is for models that do not work
        found, severe = f"error: {error}", True
    right = not severe if fault is None else bool(findings) and findings[0].kind == fault
    kinds = [finding.kind for finding in findings]
    place = kinds.index(fault) + 1 if fault in kinds else None
    cpu, mark = time.process_time() - start, " " if right else "✗"
    print(f"{name:32s}{network:30s}{seed:5d}  {fault or '–':24s}{found:34s}{cpu:6.1f} {mark}", flush=True)
    return {"name": name, "fault": fault, "seed": seed, "found": found, "place": place, "right": right}


def zoo(seeds: Sequence[int], only: str = "") -> dict:
    """Every patient with every seed; what is found first."""
    rows = []
    print(ZOO_HEAD)
    for one in ZOO:
        if only not in one.name:
            continue
        for seed in seeds:
            row = examined(one.name, one.fault, one.architecture, seed, made(one, seed))
            rows.append({**row, "tuned": one.tuned})
    summary = {}
    for part, tuned in (("networks that thresholds were chosen on", True), ("networks written down afterwards", False)):
        for what, healthy in (("fault named first", False), ("healthy: nothing severe", True)):
            some = [row for row in rows if row["tuned"] == tuned and (row["fault"] is None) == healthy]
            if some:
                right = sum(row["right"] for row in some)
                print(f"{part}, {what}: {right} of {len(some)} ({100 * right / len(some):.0f} %)")
                summary[f"{part}: {what}"] = [right, len(some)]
    return {"seeds": list(seeds), "summary": summary, "wrong": [row for row in rows if not row["right"]]}


def drawn(sets: Sequence[int], only: str = "") -> dict:
    """Networks, faults and their sizes drawn at random."""
    rows = []
    print(ZOO_HEAD)
    for number in sets:
        for one in drawn_set(number):
            if only in one.name:  # drawn all the same, so that the others are what they are
                rows.append(examined(one.name, one.fault, one.family, number, one.case))
    summary = {}
    for what, healthy in (("fault named first", False), ("healthy: nothing severe", True)):
        some = [row for row in rows if (row["fault"] is None) == healthy]
        right = sum(row["right"] for row in some)
        if some:
            print(f"sets {', '.join(map(str, sets))}, {what}: {right} of {len(some)} ({100 * right / len(some):.0f} %)")
        summary[what] = [right, len(some)]
    return {"sets": list(sets), "summary": summary, "wrong": [row for row in rows if not row["right"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("all", "zoo", "drawn", "ranking", "gpt"), default="all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10])
    parser.add_argument("--sets", type=int, nargs="+", default=[1], help="numbers of drawn sets")
    parser.add_argument("--only", default="", help="patients whose name has this in it")
    parser.add_argument("--seconds", type=float, default=60.0, help="budget of the part gpt")
    parser.add_argument("--device", default="cpu", help="of the part gpt")
    parser.add_argument("--repeats", type=int, default=1, help="of the part gpt; the first one loads and compiles")
    options = parser.parse_args()
    results: dict = {"benchmark": "doctor", "torch": torch.__version__}
    if options.part in ("all", "zoo"):
        results["zoo"] = zoo(options.seeds, options.only)
    if options.part in ("all", "drawn"):
        results["drawn"] = drawn(options.sets, options.only)
    if options.part in ("all", "ranking"):
        results["ranking"] = ranking(options.seeds)
    if options.part in ("all", "gpt"):
        results["gpt"] = gpt(options.seconds, options.device, options.repeats)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
