"""What tracking a training costs: snapshots of the tangent kernel, and a tracked run against an untracked one.

    python benchmarks/tracker.py                        # a small network, on one CPU core
    python benchmarks/tracker.py --network vgg19 --device cuda
    python benchmarks/tracker.py --network vgg19        # on a CPU: minutes

A snapshot has a hundred examples of ten outputs. The small network's runs are measured in full, tracked and untracked
by turns. A run of VGG19 is 50,000 steps, so that a block of its steps and a snapshot are measured by turns and
multiplied; the table says so. All numbers are medians; on a busy machine compare CPU.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: idle threads must not burn a core

import argparse
import json
import platform
from collections.abc import Callable

import torch
from measure import Seconds, clock
from torch import nn

from layerwise.regimes import Snapshots, Tracker
from layerwise.studies.tangent_alignment.classification import Task

AIM_RATIO, AIM_SNAPSHOT = 1.15, 0.5
"""Of a tracked run over an untracked one, and seconds of a snapshot of VGG19, both on a GPU."""
STEPS = {"mlp": 1000, "vgg19": 50_000}
"""Of a run: for VGG19 a hundred epochs of CIFAR-10."""
BLOCK = 50
"""Steps that are timed together."""


class Training:
    """A network on random images, so that no data are needed."""

    def __init__(self, network: str, device: str) -> None:
        task = Task(images="digits" if network == "mlp" else "cifar10", network=network)
        shape = (1, 8, 8) if network == "mlp" else (3, 32, 32)
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(1000, *shape, generator=generator).to(device)
        self.y = torch.randint(10, (1000,), generator=generator).to(device)
        self.model = task.model(0).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def step(self, number: int) -> None:
        start = 100 * (number % 10)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x[start : start + 100]), self.y[start : start + 100]).backward()
        self.optimizer.step()

    def tracker(self) -> Tracker:
        return Tracker(self.model, {"test": (self.x[:100], self.y[:100])})

    def run(self, steps: int, tracked: bool) -> list[int]:
        tracker = self.tracker()
        for number in range(steps):
            if tracked:
                tracker(number)
            self.step(number)
        return tracker.series()["step"]


def by_turns(calls: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, Seconds]:
    """The median of each, after one call that is not counted."""
    samples: dict[str, list[Seconds]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(clock(call, device))
    return {name: Seconds.median(found) for name, found in samples.items()}


def snapshots(steps: int) -> int:
    grid = Snapshots()
    return sum(grid.due(step) for step in range(steps))


def measured(args: argparse.Namespace) -> dict:
    """Snapshot and steps alone, then (a small network) whole runs."""
    training = Training(args.network, args.device)
    tracker, taken = training.tracker(), iter(range(10**6))
    steps, count = args.steps or STEPS[args.network], snapshots(args.steps or STEPS[args.network])

    def block() -> None:
        for number in range(BLOCK):
            training.step(number)

    found = by_turns({"snapshot": lambda: tracker.record(next(taken)), "block": block}, args.repeats, args.device)
    snapshot, block_of = found["snapshot"], found["block"]
    result = {"snapshot": snapshot, "step": Seconds(block_of.wall / BLOCK, block_of.cpu / BLOCK)}
    if args.network == "mlp":
        runs = by_turns(
            {"tracked": lambda: training.run(steps, True), "untracked": lambda: training.run(steps, False)},
            args.repeats,
            args.device,
        )
        return result | runs | {"how": "measured in full"}
    plain = Seconds.weighted([(result["step"], steps)])
    tracked = Seconds.weighted([(result["step"], steps), (snapshot, count)])
    return result | {"tracked": tracked, "untracked": plain, "how": f"{count} snapshots and {steps} steps, multiplied"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="mlp", choices=list(STEPS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, help="of a run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where = torch.cuda.get_device_name() if args.device != "cpu" else platform.machine()
    found = measured(args)
    steps = args.steps or STEPS[args.network]
    print(f"{args.network} on {where}: {steps} steps, {snapshots(steps)} snapshots of 100 examples × 10 outputs\n")
    print(f"{'':12s}{'wall s':>10s}{'CPU s':>10s}")
    for name in ("snapshot", "step", "untracked", "tracked"):
        print(f"{name:12s}{found[name].wall:10.4f}{found[name].cpu:10.4f}")
    ratio = found["tracked"].over(found["untracked"])
    aims = {"tracked / untracked": (ratio.wall, AIM_RATIO), "snapshot, s": (found["snapshot"].wall, AIM_SNAPSHOT)}
    print(f"\ntracked / untracked: {ratio.wall:.2f} wall, {ratio.cpu:.2f} CPU ({found['how']})")
    if args.network == "vgg19" and args.device != "cpu":
        for name, (value, aim) in aims.items():
            print(f"aim {name} ≤ {aim:g}: {'held' if value <= aim else 'not held'} ({value:.3f})")
    record = {
        "benchmark": "tracker",
        "machine": where,
        "torch": torch.__version__,
        **vars(args),
        "seconds": {name: vars(value) for name, value in found.items() if isinstance(value, Seconds)},
        "ratio_wall": round(ratio.wall, 3),
        "ratio_cpu": round(ratio.cpu, 3),
        "how": found["how"],
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
