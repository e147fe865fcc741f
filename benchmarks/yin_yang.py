"""Twelve seeds and two α of the yin-yang study: one tensor program, against plain loops of lw.linearized.

    python benchmarks/yin_yang.py                     # two CPU cores
    python benchmarks/yin_yang.py --seeds 2 --steps 20 --turns 1    # to see that all runs

Both run so many steps of gradient descent from the same start, by turns; the median of the turns counts. "loop" is the
plain loop of a user, seed after seed and α after α: lw.linearized with the outputs of the start given, autograd and
torch.optim.SGD. That is its cheapest form. Both end with the same weights to rounding, which is printed.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: idle threads must not burn a core

import argparse
import json
import platform

import torch
from measure import Row, by_turns
from torch.nn import functional

import layerwise as lw
from layerwise.regimes.yin_yang import yin_yang
from layerwise.studies.training_regimes.stack import Stack, drawn
from layerwise.studies.training_regimes.yin_yang import Runs, YinYangRuns

AIM = 5.0
SIZES = (2, 60, 60, 60, 1)


def start_of(seeds: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    points = [yin_yang(100, seed) for seed in range(seeds)]
    x, y = torch.stack([p.x for p in points]).float(), torch.stack([p.y for p in points]).float()
    return drawn(SIZES, range(seeds)), x, y


def stacked(seeds: int, steps: int, config: YinYangRuns) -> torch.Tensor:
    """All at once; final weights, run by run."""
    flat, x, y = start_of(seeds)
    alpha = torch.tensor(config.alphas, dtype=torch.float32).repeat_interleave(seeds)
    start = flat.repeat(2, 1)
    runs = Runs(Stack(SIZES, start), Stack(SIZES, start), x.repeat(2, 1, 1), y.repeat(2, 1), alpha, config)
    for _ in range(steps):
        runs.step()
    return runs.stack.flat


def loop(seeds: int, steps: int, config: YinYangRuns) -> torch.Tensor:
    """One after the other."""
    flat, x, y = start_of(seeds)
    found = []
    for alpha in config.alphas:
        for seed in range(seeds):
            model = Stack(SIZES, flat[seed : seed + 1]).network(0)
            net = lw.linearized(model, alpha, keep_initial=False)
            opt = lw.regimes.rescaled(torch.optim.SGD(net.parameters(), lr=config.lr), alpha)
            known = net.at_start(x[seed])
            for _ in range(steps):
                opt.zero_grad()
                functional.softplus(-y[seed] * net(x[seed], at_start=known).squeeze(1)).mean().backward()
                opt.step()
            parts = [p.detach().mT.flatten() if p.ndim == 2 else p.detach() for p in model.parameters()]
            found.append(torch.cat(parts))
    return torch.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = YinYangRuns()
    a, b = (run(args.seeds, args.steps, config) for run in (stacked, loop))
    agreement = float((a - b).norm() / b.norm())
    print(f"{args.seeds} seeds × 2 α × {args.steps} steps on {platform.machine()}, {args.threads} threads")
    print(f"weights agree to {agreement:.1e}\n")
    rows = [
        Row("one program", lambda: lambda: stacked(args.seeds, args.steps, config)),
        Row("loop", lambda: lambda: loop(args.seeds, args.steps, config)),
    ]
    by_turns(rows, args.turns, 600.0, "cpu")
    base = rows[0].seconds()
    print(f"{'':14s}{'wall s':>10s}{'CPU s':>10s}{'× wall':>9s}{'× CPU':>9s}")
    for row in rows:
        ratio = row.seconds().over(base)
        print(f"{row.name:14s}{row.seconds().wall:10.2f}{row.seconds().cpu:10.2f}{ratio.wall:9.1f}{ratio.cpu:9.1f}")
    speedup = rows[1].seconds().over(base)
    print(f"\naim ≥ {AIM:g}× (wall): {'held' if speedup.wall >= AIM else 'not held'} ({speedup.wall:.1f}×)")
    record = {
        "benchmark": "yin_yang",
        "machine": platform.machine(),
        "torch": torch.__version__,
        **vars(args),
        "agreement": agreement,
        "speedup_wall": round(speedup.wall, 2),
        "speedup_cpu": round(speedup.cpu, 2),
        "aim": AIM,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
