"""The first ten steps of a run with a cold and with a warm cache of compiled kernels, each in a process of its own."""

import json
import tempfile
from pathlib import Path

from processes import ProcessError, cold_caches, output_of

COMMAND = Path(__file__).parents[1] / "gpu.py"
WARM_STEPS = 20
"""That a process takes which finds the kernels of another one."""


def startup(options: list[str], model: str, member: str, steps: int) -> dict:
    """Of one row: seconds of construction and ten iterations, cold and warm; kernels compiled cold, late ones apart.

    The process has loaded torch with its compiler (which the first optimizer of any kind imports), the device's
    libraries and a model, and run forward and backward before the clock starts. The one with the cold cache goes on for
    `steps`, to see what is compiled later.
    """
    with cold_caches() as caches:
        cold = _child(options, model, member, steps, caches)
        warm = _child(options, model, member, WARM_STEPS, caches) if "note" not in cold else {}
    if "note" in cold or "note" in warm:
        return {"name": member, "note": cold.get("note") or warm["note"]}
    names = ("compiled", "compiled_late", "late", "slowest", "slowest_at", "whole_s", "construction_s")
    found = {"name": member, "cold_s": cold["first_ten_s"], "warm_s": warm["first_ten_s"]}
    return found | {name: cold.get(name) for name in names} | {"warm_compiled": warm.get("compiled")}


def _child(options: list[str], model: str, member: str, steps: int, caches: dict[str, str]) -> dict:
    """The row as the command itself gives it."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        asked = ["--models", model, "--members", member, "--steps", str(steps), "--json", str(result)]
        try:
            output_of(COMMAND, [*options, *asked], caches)
        except ProcessError as error:
            return {"note": f"fails: {error}"}
        return json.loads(result.read_text(encoding="utf-8"))["models"][model]["rows"][0]
