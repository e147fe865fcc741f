"""Run tests as other processors would round: one line for each variant, and a failure if one fails.

    python tests/variants.py             all variants that this machine has
    python tests/variants.py --short     two of them, of the tests that depend most on rounding: for CI
    python tests/variants.py --list      what there is
    python tests/variants.py -- -k SOAP  whatever follows is pytest's

| variant | where | changes |
|---|---|---|
| `LAYERWISE_ROUNDING=<seed>` | everywhere | orders of sums, and which of many decompositions (`rounding.py`) |
| `LAYERWISE_THREADS=1`, 2, 4 | everywhere | how sums are split |
| `ATEN_CPU_CAPABILITY=default` | x86 with MKL | torch's own kernels, without wide vectors |
| `MKL_CBWR=COMPATIBLE`, AVX2, AVX512 | x86 with MKL | BLAS and LAPACK |
| `OPENBLAS_CORETYPE=...` | ARM with OpenBLAS | BLAS and LAPACK |

It runs with the torch of its own interpreter; for another version of torch, call it with another environment's Python.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
FILES = [
    "optim/test_other_rounding.py",
    "optim/test_shampoo_formulas.py",
    "optim/cuda/test_padding.py",
    "optim/cuda/test_asynchronous_executor.py",
    "optim/test_ekfac_formulas.py",
    "optim/cuda/test_deferred_statistics.py",
]
"""That compare trainings, or a step with a formula, where factors have null spaces."""
SHORT = ["-k", "machines or null_space or no_step or authors_loop or (training_is_the_same and (SOAP or Shampoo))"]
CORES = ("ARMV8", "NEOVERSEN1", "THUNDERX2T99")
LEVELS = {"AVX2": "avx2", "AVX512": "avx512f", "COMPATIBLE": ""}
"""Of MKL, and what /proc/cpuinfo must say for it."""


def variants() -> list[dict[str, str]]:
    """Environments; those that differ most from the usual one come first."""
    found = [{"LAYERWISE_ROUNDING": "1"}, *_libraries(), {}]
    found += [{"LAYERWISE_ROUNDING": seed} for seed in ("2", "3")]
    return [*found, *({"LAYERWISE_THREADS": count} for count in ("2", "4"))]


def _libraries() -> list[dict[str, str]]:
    if torch.backends.mkl.is_available():
        flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        levels = [{"MKL_CBWR": level} for level, flag in LEVELS.items() if flag in flags]
        return [*levels, {"ATEN_CPU_CAPABILITY": "default"}]
    if platform.machine() in ("aarch64", "arm64") and "BLAS_INFO=open" in torch.__config__.show():
        return [{"OPENBLAS_CORETYPE": core} for core in CORES]
    return []


def named(variant: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variant.items()) or "as it is"


def run(variant: dict[str, str], arguments: list[str]) -> bool:
    """Whether the tests pass; what pytest says is printed if not."""
    threads = variant.get("LAYERWISE_THREADS", "1")
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **variant}
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", *arguments]
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    last = lines[-1] if lines else f"pytest ended with {done.returncode}"
    verdict = "FAILED" if done.returncode else "ok    "
    print(f"{named(variant):35} {verdict} {time.monotonic() - start:5.0f} s  {last}")
    if done.returncode:
        print(done.stdout + done.stderr)
    sys.stdout.flush()
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests as other processors would round.")
    parser.add_argument("--short", action="store_true", help="two variants, the tests that depend most on rounding")
    parser.add_argument("--list", action="store_true", help="print the variants of this machine")
    parser.add_argument("rest", nargs="*", help="for pytest: other files, or options after --")
    asked = parser.parse_args()
    if asked.list:
        print("\n".join(named(variant) for variant in variants()))
        return 0
    files = [str(HERE / file) for file in FILES] if not any(x.startswith("tests") for x in asked.rest) else []
    chosen = variants()[:2] if asked.short else variants()
    arguments = [*files, *(SHORT if asked.short else []), *asked.rest]
    passed = [run(variant, arguments) for variant in chosen]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
