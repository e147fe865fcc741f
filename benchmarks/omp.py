"""Orthogonal matching pursuit of a batch: layerwise beside scikit-learn, in float64 on both sides.

    python benchmarks/omp.py                 # one thread of a CPU, a batch of 200, d = 100, k = 5
    python benchmarks/omp.py --device cuda   # ours on a GPU; scikit-learn's stays on the CPU
    python benchmarks/omp.py --tiny          # small, to see that all runs

scikit-learn's three ways are timed by turns with ours: `orthogonal_mp`, the same with a Gram matrix, and
`sparse_encode`; the ratio is to the fastest of them. Supports must be the same for every sample, and coefficients to
1e-8. Times are medians. On a busy machine compare CPU time, which the ratio is of.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when NumPy and torch load
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import platform

import numpy as np
import torch
from measure import Row, by_turns

from layerwise.selfsup import omp, sample_sparse_data

AIMS = {200: 5.0, 1000: 10.0}
"""Times as fast as scikit-learn's fastest, by atoms."""
K = 5


def problem(q: int, n: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy samples of one dictionary, coded by another."""
    data = sample_sparse_data(d, 2 * d, K, n, d**-0.5, generator=0)
    return data.Y, sample_sparse_data(d, q, K, 1, 0.0, generator=1).A


def theirs(Y: np.ndarray, D: np.ndarray) -> dict[str, object]:
    from sklearn.decomposition import sparse_encode
    from sklearn.linear_model import orthogonal_mp

    atoms = np.ascontiguousarray(D.T)
    return {
        "orthogonal_mp": lambda: orthogonal_mp(D, Y.T, n_nonzero_coefs=K).T,
        "orthogonal_mp, Gram": lambda: orthogonal_mp(D, Y.T, n_nonzero_coefs=K, precompute=True).T,
        "sparse_encode": lambda: sparse_encode(Y, atoms, algorithm="omp", n_nonzero_coefs=K),
    }


def measured(q: int, args: argparse.Namespace) -> dict:
    n, d = (20, 20) if args.tiny else (args.batch, 100)
    Y, D = problem(q, n, d)
    calls = theirs(Y.numpy(), D.numpy())
    on = [part.to(args.device) for part in (Y, D)]
    single = [part.float() for part in on]
    code = omp(*on, K).dense(q).cpu().numpy()
    reference = calls["orthogonal_mp"]()
    agree = float(((code != 0) == (reference != 0)).all(1).mean())
    rows = [
        Row("layerwise", lambda: lambda: omp(*on, K)),
        Row("layerwise, float32", lambda: lambda: omp(*single, K)),
        *(Row(name, lambda call=call: call) for name, call in calls.items()),
    ]
    by_turns(rows, args.repeats, 60.0, args.device)
    times = {row.name: row.seconds() for row in rows}
    kind = "cpu" if args.device == "cpu" else "wall"
    fastest = min(getattr(times[name], kind) for name in calls)
    return {
        "agree": agree,
        "difference": float(np.abs(code - reference).max()),
        "ms": {name: round(1e3 * getattr(seconds, kind), 3) for name, seconds in times.items()},
        "times as fast": round(fastest / getattr(times["layerwise"], kind), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--atoms", type=int, nargs="+", default=[200, 400, 1000])
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where = torch.cuda.get_device_name() if args.device != "cpu" else platform.machine()
    print(f"on {where}, {args.threads} thread(s); milliseconds a batch of {args.batch}, k = {K}\n")
    found = {}
    for q in [40, 150] if args.tiny else args.atoms:
        found[q] = one = measured(q, args)
        print(f"{q} atoms: supports agree on {100 * one['agree']:.2f} %, coefficients to {one['difference']:.1e}")
        for name, ms in one["ms"].items():
            print(f"  {name:24s}{ms:10.2f}")
        aim = AIMS.get(q)
        verdict = "" if aim is None else f", aim ≥ {aim:g}: {'held' if one['times as fast'] >= aim else 'not held'}"
        print(f"  {one['times as fast']:.1f} times as fast as the fastest of theirs{verdict}\n")
    print(json.dumps({"benchmark": "omp", "machine": where, "torch": torch.__version__, **vars(args), "rows": found}))


if __name__ == "__main__":
    main()
