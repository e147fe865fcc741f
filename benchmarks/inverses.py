"""Inverses of K-FAC's damped factors on a GPU, three ways: time, and error against float64.

    python benchmarks/inverses.py                    # the factors of a GPT of 12 × 768, and the same with padding
    python benchmarks/inverses.py --leaf 32 64 128   # other sizes of the blocks that one program eliminates
    python benchmarks/inverses.py --tiny --device cpu

| row | what |
|---|---|
| cholesky_ex | `torch.linalg.cholesky_ex` alone: a factorization, not yet an inverse |
| cholesky + products | what came before: Cholesky, its triangular inverse by split-fp16 products, LᵀL |
| block inverse | `layerwise.optim.cuda.linalg.block_inverse`, called; and as a CUDA graph, as a training replays it |

Milliseconds by CUDA events, median; errors are relative, ‖X − M⁻¹‖_F/‖M⁻¹‖_F of the first matrix. Prints a table, and
one line of JSON.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from layerwise.optim.cuda.linalg.block_inverse import LARGE, LEAF, block_inverse
from layerwise.optim.cuda.linalg.split_fp16 import prepared, product

FACTORS = [(60, 768), (12, 2304), (24, 3072), (60, 784), (12, 2320), (24, 3088)]
TINY = [(3, 48), (2, 80)]
DAMPING = 0.1
MOST_BYTES = 3e9
"""Of matrices that are treated at once; more are treated in parts, and their times added up."""


def factor(K: int, n: int, device: str) -> Tensor:
    """Damped second moments: a spectrum over four orders, one direction that is a hundred times as large."""
    draw = torch.Generator(device).manual_seed(n)
    values = torch.logspace(0, -4, n, device=device)
    values[0] *= 100
    X = torch.randn(K, n, 2 * n, generator=draw, device=device) * values.sqrt()[:, None]
    M = torch.baddbmm(torch.zeros(K, n, n, device=device), X, X.mT, alpha=1 / (2 * n))
    M.diagonal(dim1=-2, dim2=-1).add_(DAMPING * M.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True))
    return (M + M.mT) / 2


def triangular_inverse(L: Tensor, leaf: int = 64) -> Tensor:
    """By halves: leaves by substitution, then pairs are joined, each level in two batched products."""
    n = L.shape[-1]
    levels = max(0, math.ceil(math.log2(n / leaf))) if n > leaf else 0
    size = math.ceil(n / 2**levels)
    whole = torch.eye(size * 2**levels, device=L.device).repeat(len(L), 1, 1)
    whole[:, :n, :n] = L
    D = _blocks(whole, size, 0, 0, 1)
    X = torch.linalg.solve_triangular(D, torch.eye(size, device=L.device).expand_as(D), upper=False)
    for _ in range(levels):
        A, C = X[:, 0::2], X[:, 1::2]
        B = _blocks(whole, size, 1, 0, 2)
        flat = [T.reshape(-1, size, size) for T in (A, B, C)]
        low = product(flat[2], product(flat[1], flat[0]), alpha=-1).view_as(A)
        X = torch.cat([torch.cat([A, torch.zeros_like(A)], -1), torch.cat([low, C], -1)], -2)
        size *= 2
    return X[:, 0, :n, :n]


def _blocks(L: Tensor, size: int, row: int, column: int, of: int) -> Tensor:
    count = L.shape[-1] // (of * size)
    whole = L.unflatten(-1, (count, of, size)).unflatten(-4, (count, of, size))
    return whole[..., :, row, :, :, column, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def by_cholesky(M: Tensor) -> Tensor:
    """What came before."""
    X = prepared(triangular_inverse(torch.linalg.cholesky_ex(M)[0]))
    return product(X.mT, X, symmetric=True)


def milliseconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """The median of some calls, after two."""
    for _ in range(2):
        call()
    found = []
    for _ in range(repeats):
        if device == "cpu":
            start = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - start))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def captured(call: Callable[[], object], device: str) -> Callable[[], object]:
    """The same as a CUDA graph."""
    if device == "cpu":
        return call
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        graph.capture_begin()
        call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def rows(K: int, n: int, device: str, leaves: list[int], large: int, repeats: int) -> list[dict]:
    """One size, all ways."""
    at_once = min(K, max(1, int(MOST_BYTES / (4 * n * n))))
    parts, M = K / at_once, factor(at_once, n, device)
    truth = torch.linalg.inv(M[:1].double())
    error = lambda X: float((X[:1].double() - truth).norm() / truth.norm())  # noqa: E731
    found = []

    def add(name: str, call: Callable[[], object], off: float | None) -> None:
        try:
            ms = round(parts * milliseconds(call, device, repeats), 3)
        except RuntimeError as failure:  # e.g. what cannot be captured
            print(f"  {K:3d} × {n:<6d}{name:34s} fails: {failure}")
            return
        found.append({"K": K, "n": n, "way": name, "ms": ms, "error": off})
        print(f"  {K:3d} × {n:<6d}{name:34s}{ms:10.2f}{'' if off is None else f'{off:12.1e}'}", flush=True)

    add("cholesky_ex", lambda: torch.linalg.cholesky_ex(M), None)
    add("cholesky + products", lambda: by_cholesky(M), error(by_cholesky(M)))
    for leaf in leaves:
        call = lambda leaf=leaf: block_inverse(M.clone(), leaf=leaf, large=large)  # noqa: E731
        X, good = call()
        assert bool(good.all())
        add(f"block inverse, leaves of {leaf}", call, error(X))
        add(f"block inverse, leaves of {leaf}, graph", captured(call, device), error(X))
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--leaf", type=int, nargs="+", default=[LEAF])
    parser.add_argument("--large", type=int, default=LARGE, help="rows from which blocks are multiplied in split fp16")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small matrices, to see that all runs")
    parser.add_argument("--json", type=Path, help="also write the JSON here")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    found = []
    print(f"  {'':44s}{'ms':>10s}{'error':>12s}")
    for K, n in TINY if asked.tiny else FACTORS:
        found += rows(K, n, asked.device, asked.leaf, asked.large, 2 if asked.tiny else asked.repeats)
    record = {"damping": DAMPING, "large": asked.large, "rows": found}
    if asked.device != "cpu":
        record["device"] = torch.cuda.get_device_name()
    print(json.dumps(record))
    if asked.json:
        asked.json.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
