"""Cost of an optimizer's step as a fraction of forward+backward: layerwise, torch and other packages.

    python benchmarks/step_cost.py                                        # all models and systems
    python benchmarks/step_cost.py --models gpt --systems KFAC SOAP "torch AdamW" --threads 1
    python benchmarks/step_cost.py --tiny                                 # small models, to see that all runs

A plain forward+backward and the step are timed by turns, over a whole cycle of refreshes after a burn-in. The fraction
is the mean of the cycle over the median of forward+backward, and "largest" is the dearest step of the cycle. "hooks" is
what an optimizer adds to forward and backward: theirs with its hooks less a plain one, a mean over the cycle; near zero
this is noise. Members have their defaults but for what their name says, and refreshes (and, of those with hooks,
statistics) every 10 steps. Peers that are not installed are skipped. On a busy machine use --threads 1 and CPU time.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: idle threads must not burn a core

import argparse
import functools
import json
import statistics
import sys
import warnings
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from measure import Seconds, clock, reason
from models import MODELS, Problem, problem
from step_cost_peers import EVERY, SYSTEMS, System
from torch import nn

BURN_IN = 2
BATCHES = 4
"""Whose gradients come by turns: those of one alone would leave the factors of gradients singular."""
REPEATS = 3
"""Steps that are timed at least, of optimizers that have no cycle."""
PROBE_SECONDS = 1.0


def forward_backward(p: Problem, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    p.loss(model(p.x)).backward()


def batches(p: Problem) -> list[Problem]:
    """The same data in other orders: inputs and labels shifted against one another."""
    return [replace(p, x=p.x.roll(shift, -1)) for shift in range(BATCHES)]


def training_copy(p: Problem) -> nn.Module:
    """In train mode, which hooks wait for; batch norm keeps to its running statistics."""
    model = p.copy().train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


@functools.cache
def probe(system: System) -> str:
    """Why it is not timed, or nothing: a step on one 256 × 256 layer that takes seconds would take hours on a model.

    Products in bfloat16 are some hundred times slower than in float32 on a CPU that has no instructions for them.
    """
    if system.hooks:
        return ""
    layer = nn.Linear(256, 256)
    batch = Problem("probe", layer, torch.randn(8, 256), torch.randn(8, 256), "gaussian")
    opt = system.make(batch, layer)
    forward_backward(batch, layer)
    seconds = clock(opt.step, "cpu").cpu
    if seconds < PROBE_SECONDS:
        return ""
    return f"not measured: {seconds:.1f} s for one 256 × 256 layer (no bfloat16 on this CPU?); --slow measures it"


def past_the_start(opt: torch.optim.Optimizer) -> None:
    """Go on with the last step of a cycle: refreshes come often while statistics are young."""
    if hasattr(opt, "steps_taken"):
        opt.steps_taken = max(opt.steps_taken, 2 * EVERY - 1)


def measure(p: Problem, system: System, cycles: int, device: str) -> dict:
    """Seconds of a plain forward+backward, of one with hooks and of every step of some cycles, by turns."""
    bare, model = training_copy(p), training_copy(p)
    opt = system.make(p, model)
    of_batch = batches(p)
    for number in range(BURN_IN):
        forward_backward(of_batch[number], model)
        opt.step()
        past_the_start(opt)
    gradients = []
    for batch in of_batch:
        forward_backward(batch, bare)
        gradients.append([None if q.grad is None else q.grad.clone() for q in bare.parameters()])
    plain: list[Seconds] = []
    hooked: list[Seconds] = []
    steps: list[Seconds] = []
    for number in range(max(cycles * system.cycle, REPEATS)):
        if system.hooks or number % 3 == 0:
            plain.append(clock(lambda: forward_backward(p, bare), device))
        for q, g in zip(model.parameters(), gradients[number % BATCHES], strict=True):
            q.grad = None if g is None else g.clone()  # some optimizers take the gradient away
        if system.hooks:
            hooked.append(clock(partial(forward_backward, of_batch[number % BATCHES], model), device))
        before = [q.detach().clone() for q in model.parameters()]
        steps.append(clock(opt.step, device))
        if all(torch.equal(q, old) for q, old in zip(model.parameters(), before, strict=True)):
            raise RuntimeError("a step that changed nothing was timed")
    return summary(plain, hooked, steps)


def summary(plain: list[Seconds], hooked: list[Seconds], steps: list[Seconds]) -> dict:
    found: dict = {"n": len(steps)}
    for kind in ("wall", "cpu"):
        base = statistics.median(getattr(s, kind) for s in plain)
        taken = [getattr(s, kind) for s in steps]
        extra = statistics.mean(getattr(s, kind) for s in hooked) - base if hooked else 0.0
        found[kind] = {
            "forward_backward_ms": round(1e3 * base, 3),
            "step_ms": round(1e3 * statistics.mean(taken), 3),
            "fraction": round(statistics.mean(taken) / base, 4),
            "largest": round(max(taken) / base, 4),
            "hooks": round(extra / base, 4),
        }
    return found


def row(name: str, p: Problem, args: argparse.Namespace) -> dict:
    system = SYSTEMS[name]
    where = {"model": p.name, "system": name}
    if not system.available():
        return where | {"note": "not installed"}
    try:
        why = "" if args.slow else probe(system)
        return where | ({"note": why} if why else measure(p, system, args.cycles, args.device))
    except Exception as error:  # a peer may fail in any way at all; the table says how
        return where | {"note": f"fails: {reason(error)}"}


def print_row(r: dict) -> None:
    if "note" in r:
        print(f"  {r['system']:36s}{r['note']}", flush=True)
        return
    wall, cpu = r["wall"], r["cpu"]
    times = f"{wall['forward_backward_ms']:10.1f}{wall['step_ms']:10.1f}"
    fractions = f"{wall['fraction']:9.2f}{cpu['fraction']:8.2f}{wall['largest']:9.2f}{cpu['largest']:8.2f}"
    fractions += f"{wall['hooks']:9.2f}{cpu['hooks']:8.2f}" if SYSTEMS[r["system"]].hooks else " " * 17
    print(f"  {r['system']:36s}{times}{fractions}{r['n']:5d}", flush=True)


def print_head(name: str) -> None:
    print(f"\n{name}, refresh every {EVERY}")
    print(f"  {'':36s}{'fwd+bwd':>10s}{'step':>10s}{'× fwd+bwd':>17s}{'largest':>17s}{'hooks':>17s}")
    print(f"  {'':36s}{'ms':>10s}{'ms':>10s}" + 3 * f"{'wall':>9s}{'CPU':>8s}" + f"{'n':>5s}")


def aims(rows: list[dict]) -> list[dict]:
    """On the GPT, by CPU time on a CPU and by wall time elsewhere."""
    found = []
    for r in rows:
        system = SYSTEMS[r["system"]]
        for part, bound in (("fraction", system.aim), ("hooks", system.hooks_aim)):
            if r["model"] == "gpt" and bound is not None and "note" not in r:
                value, cpu = r["wall"][part], r["cpu"][part]
                held = {"value": value, "cpu_value": cpu, "bound": bound, "held": value <= bound}
                name = r["system"] if part == "fraction" else f"{r['system']}, hooks"
                found.append({"model": "gpt", "system": name} | held)
    return found


def print_aims(found: list[dict]) -> None:
    if found:
        print("\naims, by wall time (CPU time in brackets; differences of 10 % are noise on a shared machine)")
    for a in found:
        held = "held" if a["held"] else "NOT HELD"
        print(f"  {a['model']:6s}{a['system']:20s}{a['value']:8.2f} [{a['cpu_value']:.2f}] ≤ {a['bound']:.2f}  {held}")


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("torch", *dict.fromkeys(s.distribution for s in SYSTEMS.values() if s.distribution)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", "--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--cycles", type=int, default=1, help="cycles of refreshes that are timed")
    parser.add_argument("--tiny", action="store_true", help="small models: a check, not a measurement")
    parser.add_argument("--slow", action="store_true", help="also what takes minutes a step")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", metavar="PATH", help="write the JSON line to a file too")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    warnings.simplefilter("ignore")  # the peers' own deprecations
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = []
    for name in args.models:
        p = problem(name, args.device, tiny=args.tiny)
        print_head(name)
        for system in args.systems:
            rows.append(row(system, p, args))
            print_row(rows[-1])
    found = [] if args.tiny else aims(rows)
    print_aims(found)
    settings = {"device": args.device, "threads": torch.get_num_threads(), "cycles": args.cycles, "tiny": args.tiny}
    settings["load"] = round(os.getloadavg()[1], 2)  # five minutes, our own threads among them
    print(f"\nload {settings['load']}, {settings['threads']} threads, {os.cpu_count()} cores")
    line = json.dumps({"benchmark": "step_cost", **settings, "versions": versions(), "rows": rows, "aims": found})
    print(line)
    if args.json:
        with open(args.json, "w") as file:
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
