"""How often `lw.doctor` names the planted fault first, and whether its ranking of optimizers is that of short runs.

    python benchmarks/doctor.py                       all three parts, on seeds that no threshold was chosen on
    python benchmarks/doctor.py zoo --seeds 10 11     planted faults and healthy networks: what is found first
    python benchmarks/doctor.py drawn --sets 1        the same on networks, faults and sizes drawn at random
    python benchmarks/doctor.py ranking               predicted decrease of nine optimizers against tuned runs
    python benchmarks/doctor.py gpt                   time and memory on a transformer of 6 × 384

Prints tables, and one JSON line at the end. The zoo takes some five minutes a seed on one core, the ranking some ten.
"""

import argparse
import copy
import json
import math
import resource
import statistics
import time
import warnings
from collections.abc import Sequence

import doctor_drawn
import doctor_zoo
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import layerwise as lw
from layerwise.foundations.errors import LayerwiseError

RANKED = ("healthy-mlp", "healthy-regression", "healthy-trained", "fresh-gelu", "fresh-conv1d")
"""Networks on which optimizers are compared."""
STEPS = (10, 40)
"""Lengths of the runs."""
RATES = {"SGD": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)}
OTHER_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
BATCH = 128


# --- zoo -------------------------------------------------------------------------------------------------------------


ZOO_HEAD = f"{'patient':32s}{'network':30s}{'seed':>5s}  {'planted':24s}{'found first':34s}{'s':>6s}"


def examined(name: str, fault: str | None, network: str, seed: int, case: doctor_zoo.Case) -> dict:
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
    for one in doctor_zoo.ZOO:
        if only not in one.name:
            continue
        for seed in seeds:
            row = examined(one.name, one.fault, one.architecture, seed, doctor_zoo.made(one, seed))
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
        for one in doctor_drawn.drawn(number):
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


# --- ranking ---------------------------------------------------------------------------------------------------------


def ranking(seeds: Sequence[int], names: Sequence[str] = RANKED) -> dict:
    """Spearman's correlation of predicted decreases with those of runs, each at the best of six rates."""
    found = []
    for name in names:
        one = next(patient for patient in doctor_zoo.ZOO if patient.name == name)
        for seed in seeds:
            case = doctor_zoo.made(one, seed)
            report = lw.doctor(case.model, case.data, case.likelihood, seconds=600)
            predicted = {step.name: step.predicted for step in report.measured.steps}
            one_step = {step.name: step.measured or 0.0 for step in report.measured.steps}
            row = {"network": name, "seed": seed, "members": len(predicted)}
            runs = {member: best_runs(case, member) for member in predicted}
            for steps in STEPS:
                ends = {member: run[steps] for member, run in runs.items()}
                decreases = {member: report.measured.loss - end for member, end in ends.items()}
                row[f"predicted_{steps}"] = spearman(predicted, decreases)
                row[f"measured_step_{steps}"] = spearman(one_step, decreases)
                row[f"best_{steps}"] = min(ends, key=lambda member: ends[member])
                chosen = max(predicted, key=lambda member: predicted[member])
                order = sorted(ends, key=lambda member: ends[member])
                row[f"place_of_choice_{steps}"] = order.index(chosen) + 1
            found.append(row)
            shown = ", ".join(
                f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
            print(shown, flush=True)
    summary = {}
    for key in [f"{what}_{steps}" for steps in STEPS for what in ("predicted", "measured_step", "place_of_choice")]:
        values = [row[key] for row in found]
        spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
        summary[key] = [round(statistics.mean(values), 3), round(spread, 3)]
        print(f"{key:24s} mean {statistics.mean(values):.2f} ± {spread:.2f} over {len(values)} networks")
    return {"summary": summary, "runs": found}


def best_runs(case: doctor_zoo.Case, member: str) -> dict[int, float]:
    """The loss after so many steps, each at the best of the rates."""
    runs = [run(case, member, rate) for rate in RATES.get(member, OTHER_RATES)]
    return {steps: min(one[steps] for one in runs) for steps in STEPS}


def run(case: doctor_zoo.Case, member: str, rate: float) -> dict[int, float]:
    """The loss on all data after some steps on batches; infinite where it is not finite."""
    model, (x, y) = copy.deepcopy(case.model).train(), case.data
    values = y.is_floating_point()
    law = {"likelihood": "gaussian" if values else "categorical"} if member in ("KFAC", "EKFAC") else {}
    found = dict.fromkeys(STEPS, math.inf)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        f = model(x)
        return 0.5 * (f - y).square().sum(-1).mean() if values else F.cross_entropy(f, y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = getattr(lw.optim, member)(model, lr=rate, weight_decay=0.0, **law)
        order = torch.Generator().manual_seed(0)
        for step in range(1, max(STEPS) + 1):
            rows = torch.randint(len(x), (BATCH,), generator=order)
            opt.zero_grad()
            value = loss(x[rows], y[rows])
            if not math.isfinite(value.item()):
                break
            value.backward()
            opt.step()
            if step in STEPS:
                with torch.no_grad():
                    end = loss(x, y).item()
                found[step] = end if math.isfinite(end) else math.inf
    return found


def spearman(first: dict[str, float], second: dict[str, float]) -> float:
    """Correlation of ranks; ties, of which there are none but among diverged runs, in any order."""
    ranks = [torch.tensor([values[key] for key in first]).argsort().argsort().double() for values in (first, second)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


# --- time ------------------------------------------------------------------------------------------------------------


def gpt(seconds: float, device: str, repeats: int) -> dict:
    """Six blocks of width 384 on 8 sequences of 128 letters; the first of some repeats loads and compiles."""
    rows = []
    for repeat in range(repeats):
        with doctor_zoo.seeded(repeat):
            model: nn.Module = doctor_zoo.GPT(letters=65, width=384, depth=6, heads=6, length=128)
            data = doctor_zoo.text(n=8, length=128, letters=65)
        model, data = model.to(device), tuple(t.to(device) for t in data)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start, cpu = time.perf_counter(), time.process_time()
        report = lw.doctor(model, data, seconds=seconds)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        on_device = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
        if repeat == 0:
            print(report)
        steps = {step.name: round(step.seconds, 2) for step in report.measured.steps}
        spent = {key: round(value, 2) for key, value in report.measured.seconds.items()}
        print(f"run {repeat + 1}: {wall:.1f} s wall, {cpu:.1f} s CPU, {torch.get_num_threads()} threads, {device}")
        print(
            f"  peak {peak:.0f} MB of the host, {on_device:.0f} MB of the device; {report.measured.examples} examples"
        )
        print(f"  by part: {spent}\n  by member: {steps}", flush=True)
        rows.append({"wall": wall, "cpu": cpu, "peak_mb": peak, "device_mb": on_device, "steps": steps, "spent": spent})
    return {"device": device, "threads": torch.get_num_threads(), "seconds": seconds, "runs": rows}


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
