"""The first ten steps of a run with a cold and with a warm cache of compiled kernels, each in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = Path(__file__).parents[1] / "gpu.py"
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_KERNEL_CACHE_PATH", "CUDA_CACHE_PATH")
WARM_STEPS = 20
"""That a process takes which finds the kernels of another one."""


def startup(options: list[str], model: str, member: str, steps: int) -> dict:
    """Of one row: seconds of construction and ten iterations, cold and warm; kernels compiled cold, late ones apart.

    The process has loaded torch with its compiler (which the first optimizer of any kind imports), the device's
    libraries and a model, and run forward and backward before the clock starts. The one with the cold cache goes on for
    `steps`, to see what is compiled later.
    """
    with tempfile.TemporaryDirectory() as folder:
        cold = _child(options, model, member, steps, Path(folder))
        warm = _child(options, model, member, WARM_STEPS, Path(folder)) if "note" not in cold else {}
    if "note" in cold or "note" in warm:
        return {"name": member, "note": cold.get("note") or warm["note"]}
    names = ("compiled", "compiled_late", "late", "slowest", "slowest_at", "whole_s", "construction_s")
    found = {"name": member, "cold_s": cold["first_ten_s"], "warm_s": warm["first_ten_s"]}
    return found | {name: cold.get(name) for name in names} | {"warm_compiled": warm.get("compiled")}


def _child(options: list[str], model: str, member: str, steps: int, folder: Path) -> dict:
    """The row as the command gives it, with caches in a folder."""
    caches = {name: str(folder / name.lower()) for name in CACHES}
    for path in caches.values():
        Path(path).mkdir(exist_ok=True)
    result = folder / "result.json"
    command = [sys.executable, str(COMMAND), *options, "--models", model, "--members", member, "--steps", str(steps)]
    done = subprocess.run(
        [*command, "--json", str(result)], env=os.environ | caches, capture_output=True, text=True, check=False
    )
    if done.returncode or not result.is_file():
        return {"note": f"fails: {(done.stderr.strip().splitlines() or ['no output'])[-1][:120]}"}
    found = json.loads(result.read_text(encoding="utf-8"))["models"][model]["rows"][0]
    result.unlink()
    return found
