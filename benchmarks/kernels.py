"""What each group of Triton kernels saves: steps of a training with it, and with torch's operations in its place.

    python benchmarks/kernels.py                                       # a GPU with Triton; minutes
    python benchmarks/kernels.py --members "SOAP 10" --groups sweeps "all of them"
    python benchmarks/kernels.py --tiny --device cpu                   # seconds, to see that it runs; no kernels there

The models, loops and optimizers are those of `gpu.py`. A group of kernels is switched off before the optimizer is
constructed, so that all that depends on it (which factors are packed, which steps are captured) is as it would be
without these kernels. Groups overlap and do not add up: "products of halves" are needed by "sweeps".

The first row of a member has all kernels. `adds`: milliseconds that the optimizer adds to an iteration, mean of the
steps from 50 on; `more`: than the first row. `host`: of `step()`; `first 10`:
seconds of construction and ten steps, where kernels of earlier rows are compiled already; `state`: over AdamW's.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from gpu.rows import rows
from gpu.tasks import MODELS, task
from gpu.training import measure

from layerwise.optim.cuda import elementwise, factor, pieces, scalings, spectral_cap, storage
from layerwise.optim.cuda import rows as kept_rows
from layerwise.optim.cuda.linalg import (
    block_inverse,
    jacobi,
    moments_in_new_basis,
    orthogonal,
    split_fp16,
    two_sided_product,
)
from layerwise.optim.cuda.triton import device, products

MEMBERS = ["KFAC empirical 10", "EKFAC running 10", "SOAP 10"]
ALL = "all of them"
STEADY = 50
"""A step from which refreshes have been captured, and statistics are as far apart as they will be."""


def _never(*_: Any, **__: Any) -> bool:
    return False


GROUPS: dict[str, list[tuple[Any, str, Any]]] = {
    "tables of addresses": [(pieces, "available", _never)],
    "elementwise passes": [(elementwise, "available", _never)],
    "statistics of rows": [(kept_rows, "triton_products", SimpleNamespace(available=_never))],
    "packed triangles": [(factor, "available", _never)],
    "rounding to halves": [
        (split_fp16, "on_kernels", _never),
        (orthogonal, "_on_kernels", _never),
        (storage, "_by_kernels", _never),
        (moments_in_new_basis, "_by_kernels", _never),
        (two_sided_product, "available", _never),
    ],
    "products of halves": [(products, "takes", _never)],
    "sweeps": [(jacobi, "_takes", _never)],
    "leaves of inverses": [(block_inverse, "available", _never)],
    "averages in bfloat16": [(scalings, "available", _never)],
    "bound on singular values": [(spectral_cap, "available", _never)],
}
"""Names that ask whether kernels are used, module by module."""
TOUCHES = {
    "Muon": {"tables of addresses", "elementwise passes", "rounding to halves"},
    "KFAC": set(GROUPS) - {"sweeps", "averages in bfloat16"},
    "EKFAC": set(GROUPS) - {"leaves of inverses"},
    "Shampoo": set(GROUPS) - {"leaves of inverses", "averages in bfloat16", "statistics of rows"},
    "SOAP": set(GROUPS) - {"leaves of inverses", "statistics of rows"},
}
"""Groups that a member has kernels of."""


@contextmanager
def without(group: str | None) -> Iterator[None]:
    """Steps of optimizers that are constructed here do without these kernels."""
    if group == ALL:  # every module that has imported the question; all are imported once a first row has run
        modules = [m for name, m in sys.modules.items() if name.startswith("layerwise.optim") and m is not None]
        replaced = [(m, "available", _never) for m in modules if getattr(m, "available", None) is device.available]
    else:
        replaced = GROUPS[group] if group is not None else []
    with ExitStack() as patches:
        for module, name, other in replaced:
            patches.enter_context(mock.patch.object(module, name, other))
        yield


def added(result: dict) -> float:
    """Milliseconds, of the steps from `STEADY` on where there are some."""
    iterations = result["iterations"]
    return statistics.mean(iterations[min(STEADY, len(iterations) // 2) :]) - result["plain"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", nargs="+", default=MEMBERS, help="rows of gpu.py")
    parser.add_argument("--groups", nargs="+", default=[*GROUPS, ALL], help=f"of {', '.join([*GROUPS, ALL])}")
    parser.add_argument("--model", default="fused", choices=MODELS)
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model and ten steps")
    parser.add_argument("--json", type=Path, help="where to write the numbers as well")
    args = parser.parse_args()
    if unknown := sorted(set(args.groups) - {*GROUPS, ALL}):
        raise SystemExit(f"Unknown --groups {', '.join(unknown)}. Available: {', '.join([*GROUPS, ALL])}.")
    if not device.available(torch.device(args.device)):
        print(f"There are no kernels on {args.device}: all rows are the same but for noise.")
    steps = 10 if args.tiny else args.steps
    made = task(args.model, args.device, args.tiny, "markov", steps + 1)
    plain, found = made.model(), []
    head = f"{torch.cuda.get_device_name()}, " if args.device.startswith("cuda") else ""
    print(f"{head}torch {torch.__version__}, model {args.model}, {steps} steps")
    print(f"  {'':22s}{'without':24s}{'adds, ms':>10s}{'more':>8s}{'host':>8s}{'first 10':>10s}{'state':>8s}")
    for row in rows(args.members):
        known, whole = TOUCHES.get(row.name.split()[0], set()) | {ALL}, None
        for group in [None, *args.groups]:
            if group is not None and group not in known:
                print(f"  {row.name:22s}{group:24s}has none of these", flush=True)
                continue
            with without(group):
                result = measure(made, plain, row, steps)
            found.append({"member": row.name, "without": group, **result})
            if "note" in result:
                print(f"  {row.name:22s}{group or '–':24s}{result['note']}", flush=True)
                continue
            adds = found[-1]["adds_steady"] = added(result)
            whole = adds if group is None else whole
            more = "" if group is None or whole is None else f"{adds - whole:+.2f}"
            numbers = f"{result['host_alone']:8.2f}{result['first_ten_s']:10.2f}{result['state_of_adamw']:8.2f}"
            print(f"  {row.name:22s}{group or '–':24s}{adds:10.2f}{more:>8s}{numbers}", flush=True)
    kept = [{name: value for name, value in r.items() if name != "iterations"} for r in found]
    line = json.dumps({"benchmark": "kernels", "model": args.model, "steps": steps, "rows": kept})
    if args.json:
        args.json.write_text(line, encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
