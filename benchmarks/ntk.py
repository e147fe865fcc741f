"""Time and memory of empirical tangent kernels: layerwise, its peers and what it costs at least, in one run.

    python benchmarks/ntk.py                                    # MLP, ResNet and transformer, all systems
    python benchmarks/ntk.py --slow                             # also the peers that take minutes
    python benchmarks/ntk.py --models mlp --systems layerwise neural-tangents-structured
    python benchmarks/ntk.py --models vgg19 --device cuda       # with errors against float64, TF32 on and off
    python benchmarks/ntk.py --tiny                             # everything small, in seconds

Times are medians of calls made by turns; a call longer than --patience is made once. × is relative to one
forward+backward of the same examples, × limit to all outputs pulled back and the counted multiply-adds at the
speed of a matrix product (the rows marked · are bare operations). Peak memory is that of one more call in a
process of its own. The difference is relative to the kernel of layerwise, in the Frobenius norm. Peers that are
not installed are skipped. On a busy machine use --threads 1 and the ratios of CPU time.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: idle threads must not burn a core

import argparse
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Callable

import torch
from limits import TRAINING, Bare
from measure import Row, by_turns, peak_bytes, reason
from models import Problem
from ntk_jax import NeuralTangentsJacobian, NeuralTangentsProducts, NeuralTangentsStructured
from ntk_limits import bare_rows, float64_rows, limit, reference, relative_difference
from ntk_models import DEFAULT_MODELS, ON_REQUEST, kernel_problem
from ntk_report import OURS, Group, Measured, aims, print_aims, print_group, record
from ntk_systems import (
    KernelSystem,
    LayerwiseKernel,
    LayerwiseTiled,
    NNGeometryGram,
    NNGeometryJacobian,
    TorchFuncChunked,
    TorchFuncJacobian,
    TorchFuncProducts,
)

SYSTEMS: dict[str, type[KernelSystem]] = {
    "layerwise": LayerwiseKernel,
    "layerwise-tiled": LayerwiseTiled,
    "nngeometry-gram": NNGeometryGram,
    "nngeometry-jacobian": NNGeometryJacobian,
    "torch-func": TorchFuncJacobian,
    "torch-func-chunked": TorchFuncChunked,
    "torch-func-products": TorchFuncProducts,
    "neural-tangents-structured": NeuralTangentsStructured,
    "neural-tangents-jacobian": NeuralTangentsJacobian,
    "neural-tangents-products": NeuralTangentsProducts,
}


def measured_on(cls: type[KernelSystem], p: Problem) -> Problem:
    """All examples, or the few that a slow system is given."""
    return p.first(min(cls.few.get(p.name, p.examples()), p.examples()), p.name)


def system_row(name: str, p: Problem, args: argparse.Namespace) -> Measured:
    cls, some = SYSTEMS[name], measured_on(SYSTEMS[name], p)

    def prepare() -> Callable[[], object]:
        system = cls(some)
        call = system.prepare()

        def call_and_keep() -> object:
            found = call()
            if m.kernel is None:  # in the first call, which is not timed or takes very long
                m.kernel = system.as_tensor(found).cpu()
            return found

        return call_and_keep

    m = Measured(cls, Row(cls.name, prepare), some.examples(), p.examples())
    m.row.note = why_not(cls, p, args)
    return m


def why_not(cls: type[KernelSystem], p: Problem, args: argparse.Namespace) -> str:
    if not cls.available():
        return f"skipped: no usable {cls.package} is installed"
    why = cls.why_not(p)
    if args.tiny and cls.compiles_for_long and p.name != "mlp":
        return "not with --tiny: compiling takes longer than all the rest"
    if not why or (why.startswith("slow") and (args.slow or args.tiny)):
        return ""
    return f"not measured: {why}"


def time_rows(rows: list[Row], args: argparse.Namespace) -> None:
    """A first call of each; those that end within the patience are then timed by turns."""
    quick = []
    for row in rows:
        if row.note:
            continue
        try:
            seconds = row.once(args.device)
        except Exception as error:  # a peer may fail in any way at all; the table says how
            row.note = f"fails: {reason(error)}"
            continue
        if seconds.wall > args.patience:
            row.samples.append(seconds)
            row.release()
        else:
            quick.append(row)
    by_turns(quick, args.repeats, args.patience, args.device)


def measure_group(p: Problem, args: argparse.Namespace) -> Group:
    bound = limit(p, args.tiny)
    bare = bare_rows(p, bound.side)
    systems = [system_row(name, p, args) for name in args.systems]
    time_rows(bare + [m.row for m in systems], args)
    for m in systems:
        m.extrapolate()
    named = {row.name: row for row in bare}
    rows = p.examples() * p.model(p.x[:1]).numel()
    group = Group(p.name, rows, args.device, named, bound.seconds(named), systems)
    compare(group, p)
    if args.memory:
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()  # the other processes need it
        for name, row in [(TRAINING, bare[0]), *zip(args.systems, (m.row for m in systems), strict=True)]:
            row.peak_mb = peak_in_fresh_process(p.name, name, args) if row.samples else None
    return group


def compare(group: Group, p: Problem) -> None:
    """Every kernel with ours, and ours with float64."""
    ours = group.measured().get(OURS)
    if ours is None or ours.kernel is None:
        return
    for m in group.systems:
        if m.kernel is not None:
            m.difference = relative_difference(m.kernel, ours.kernel)
    few = min(5, p.examples())
    exact = reference(p.first(few, p.name)).cpu()
    group.errors[f"float32 against plain autograd in float64, {few} examples"] = relative_difference(ours.kernel, exact)
    if p.name.startswith("vgg19"):
        K = float64_rows(p).cpu()
        group.errors["float32 against layerwise in float64, all examples"] = relative_difference(ours.kernel, K)
        group.errors[f"layerwise in float64 against plain autograd, {few} examples"] = relative_difference(K, exact)


def peak_in_fresh_process(model: str, system: str, args: argparse.Namespace) -> float | None:
    """Megabytes; a process of its own, so that no earlier call has left memory to reuse."""
    command = [sys.executable, __file__, "--peak-of", model, system, "--device", args.device]
    if args.threads:
        command += ["--threads", str(args.threads)]
    if args.tiny:
        command.append("--tiny")
    if not torch.backends.cudnn.allow_tf32:
        command += ["--tf32", "off"]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) / 1e6 if done.returncode == 0 else None


def print_peak(model: str, system: str, args: argparse.Namespace) -> None:
    """The body of that process; the same call on the tiny model first loads what is loaded once."""

    def call_on(p: Problem) -> Callable[[], object]:
        if system == TRAINING:
            return Bare(p).forward_backward
        return SYSTEMS[system](measured_on(SYSTEMS[system], p)).prepare()

    call_on(kernel_problem(model, args.device, tiny=True))()
    print(peak_bytes(call_on(kernel_problem(model, args.device, args.tiny)), args.device))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=DEFAULT_MODELS + ON_REQUEST, default=list(DEFAULT_MODELS))
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=float, default=30, help="seconds a row may take in all; longer: one call")
    parser.add_argument("--slow", action="store_true", help="also what takes minutes a call")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tf32", choices=("on", "off", "both"), help="convolutions on a GPU; default on, vgg19: both")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="no peak memory, half the time")
    parser.add_argument("--tiny", action="store_true", help="small models, one call, no peak memory")
    parser.add_argument("--json", metavar="PATH", help="write the JSON line to a file too")
    parser.add_argument("--peak-of", nargs=2, metavar=("MODEL", "SYSTEM"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.repeats, args.memory = 1, False
    return args


def planned(args: argparse.Namespace) -> list[tuple[str, bool]]:
    """(model, TF32 in convolutions); it is torch's default, and means nothing on a CPU."""
    plan = []
    for model in args.models:
        asked = args.tf32 or ("both" if model.startswith("vgg19") else "on")
        settings = {"on": [True], "off": [False], "both": [True, False]}[asked]
        plan += [(model, tf32) for tf32 in (settings if args.device.startswith("cuda") else [True])]
    return plan


def measure(args: argparse.Namespace) -> list[Group]:
    groups = []
    for model, tf32 in planned(args):
        gc.collect()
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()  # or what the last group has used is not free for this one
        gc.freeze()  # what is loaded by now need not be searched before every call
        torch.backends.cudnn.allow_tf32 = tf32
        groups.append(measure_group(kernel_problem(model, args.device, args.tiny), args))
        if args.device.startswith("cuda"):
            groups[-1].setting = f"TF32 {'on' if tf32 else 'off'}"
        print_group(groups[-1])
    return groups


def main() -> int:
    args = arguments()
    sys.stdout.reconfigure(line_buffering=True)  # each group as it is done, also into a file
    warnings.simplefilter("ignore")  # the peers' own deprecations
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.peak_of:
        torch.backends.cudnn.allow_tf32 = args.tf32 != "off"
        print_peak(*args.peak_of, args)
        return 0
    groups = measure(args)
    found = [] if args.tiny else aims(groups)  # they are about the full sizes
    print_aims(found)
    settings = {"device": args.device, "threads": torch.get_num_threads(), "repeats": args.repeats, "tiny": args.tiny}
    settings["load"] = round(os.getloadavg()[1], 2)  # five minutes, our own threads among them
    print(f"\nload {settings['load']}, {settings['threads']} threads, {os.cpu_count()} cores")
    line = json.dumps(record(groups, found, settings, [SYSTEMS[name] for name in args.systems]))
    print(line)
    if args.json:
        with open(args.json, "w") as file:
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
