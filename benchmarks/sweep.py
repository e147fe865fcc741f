"""Figure 5's sweep, 13 rates × 7 algorithms × 10 seeds × 1000 iterations: batched, against plain loops over runs.

    python benchmarks/sweep.py                         # two CPU cores; the loops are measured on a sample
    python benchmarks/sweep.py --device cuda
    python benchmarks/sweep.py --seeds 1 --steps 50    # to see that all runs

"batched" is measured in full. The loops would take hours, so a few iterations of every algorithm at three rates are
measured and multiplied, set-up and iterations apart; the table says so. "plain loop" draws samples and computes from
them run by run; "loop with statistics" is the library itself, called once for every run. Times are wall and CPU; on a
busy machine compare CPU.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: idle threads must not burn a core

import argparse
import json
import platform
import time
from collections.abc import Callable

import sweep_plain
import torch

from layerwise import feature_learning as fl
from layerwise.experiments.zhang2025.learning_rates import EXPONENTS, algorithms

RATES = [10.0**e for e in EXPONENTS]
SAMPLE_RATES = [RATES[4], RATES[8], RATES[12]]
AIM = 10.0


def clock(work: Callable[[], object], device: str) -> tuple[float, float, object]:
    """Wall and CPU seconds (of all threads), and what came out."""
    if device != "cpu":
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def batched(args: argparse.Namespace) -> dict:
    def work() -> dict[str, fl.Result]:
        return fl.compare(
            algorithms(RATES),
            setting=fl.Setting(scale=args.scale),
            steps=args.steps,
            every=args.steps,
            seeds=args.seeds,
            device=args.device,
            together=args.together,
        )

    fl.compare(algorithms(RATES), setting=fl.Setting(scale=args.scale), steps=2, seeds=args.seeds, device=args.device)
    wall, cpu, results = clock(work, args.device)
    best = {name: round(float(r.dist[..., -1].median(0).values.min()), 5) for name, r in results.items()}
    return {"wall": wall, "cpu": cpu, "measured": "in full", "best_median_dist": best}


def sampled(one: Callable[[str, float, int], object], args: argparse.Namespace) -> dict:
    """Seconds of the whole sweep from a sample: a run is its first iteration and the others, timed apart."""
    total = [0.0, 0.0]
    for algorithm in algorithms(RATES):
        one(algorithm, SAMPLE_RATES[0], 1)  # warm
        for rate in SAMPLE_RATES:
            first = clock(lambda a=algorithm, r=rate: one(a, r, 1), args.device)
            more = clock(lambda a=algorithm, r=rate: one(a, r, 1 + args.sample), args.device)
            for kind in (0, 1):  # wall, CPU
                total[kind] += first[kind] + (args.steps - 1) * max(more[kind] - first[kind], 0.0) / args.sample
    factor = len(RATES) / len(SAMPLE_RATES) * args.seeds
    measured = f"{args.sample} of {args.steps} iterations, 3 of {len(RATES)} rates, 1 of {args.seeds} seeds, multiplied"
    return {"wall": total[0] * factor, "cpu": total[1] * factor, "measured": measured}


def plain(args: argparse.Namespace) -> dict:
    setting = fl.Setting(scale=args.scale)
    return sampled(lambda name, lr, steps: sweep_plain.run(name, lr, 0, steps, setting, args.device), args)


def with_statistics(args: argparse.Namespace) -> dict:
    setting = fl.Setting(scale=args.scale)

    def one(name: str, lr: float, steps: int) -> object:
        algorithm = {name: algorithms([lr])[name]}
        return fl.compare(algorithm, setting=setting, steps=steps, every=steps, device=args.device)

    return sampled(one, args)


def agreement(args: argparse.Namespace) -> float:
    """Largest difference in FG, relative, between the plain loop and the batched program at rates where both live."""
    worst, setting = 0.0, fl.Setting(scale="trace")
    found = fl.compare(algorithms([1e-2, 1e-3]), setting=setting, steps=args.sample, device=args.device)
    for name, result in found.items():
        F, G = sweep_plain.run(name, 1e-2, 0, args.sample, setting, args.device)
        A, B = (F @ G).cpu(), result.F[0, 0] @ result.G[0, 0]
        worst = max(worst, float((A - B).norm() / A.norm()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sample", type=int, default=20, help="iterations of the loops that are measured")
    parser.add_argument("--scale", default="none", choices=["none", "trace", "max"])
    parser.add_argument("--together", type=int, help="seeds in one tensor program (CPU: 1, else all)")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in the loops")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where = torch.cuda.get_device_name() if args.device != "cpu" else platform.machine()
    print(f"{len(RATES)} rates × {len(algorithms(RATES))} algorithms × {args.seeds} seeds × {args.steps} iterations")
    print(f"on {where}, {os.cpu_count()} cores, scale {args.scale}")
    difference = agreement(args)
    print(f"plain loop and batched program agree to {difference:.1e} after {args.sample} iterations\n")
    rows = {"batched": batched(args), "loop with statistics": with_statistics(args), "plain loop": plain(args)}
    base = rows["batched"]
    print(f"{'':22s}{'wall s':>10s}{'CPU s':>10s}{'× wall':>9s}{'× CPU':>9s}   measured")
    for name, row in rows.items():
        ratios = f"{row['wall'] / base['wall']:9.1f}{row['cpu'] / base['cpu']:9.1f}"
        print(f"{name:22s}{row['wall']:10.1f}{row['cpu']:10.1f}{ratios}   {row['measured']}")
    speedup = rows["plain loop"]["wall"] / base["wall"]
    print(f"\naim ≥ {AIM:g}×: {'held' if speedup >= AIM else 'not held'} ({speedup:.1f}×)")
    record = {
        "benchmark": "sweep",
        "machine": where,
        "torch": torch.__version__,
        **vars(args),
        "agreement": difference,
        "rows": rows,
        "speedup_wall": round(speedup, 2),
        "speedup_cpu": round(rows["plain loop"]["cpu"] / base["cpu"], 2),
        "aim": AIM,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
