"""Time and memory of an examination of a transformer."""

import resource
import time

import torch

import layerwise as lw
from doctor.case import seeded
from doctor.data import text
from doctor.zoo.networks import GPT


def gpt(seconds: float, device: str, repeats: int) -> dict:
    """Six blocks of width 384 on 8 sequences of 128 letters; the first of some repeats loads and compiles."""
    rows = []
    for repeat in range(repeats):
        with seeded(repeat):
            model: nn.Module = GPT(letters=65, width=384, depth=6, heads=6, length=128)
            data = text(n=8, length=128, letters=65)
        model, data = model.to(device), tuple(t.to(device) for t in data)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start, cpu = time.perf_counter(), time.process_time()
        report = lw.doctor(model, data, seconds=seconds)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        on_device = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
        if repeat == 0:
            print(report)
        steps = {step.name: round(step.seconds, 2) for step in report.measured.steps}
        spent = {key: round(value, 2) for key, value in report.measured.seconds.items()}
        print(f"run {repeat + 1}: {wall:.1f} s wall, {cpu:.1f} s CPU, {torch.get_num_threads()} threads, {device}")
        print(
            f"  peak {peak:.0f} MB of the host, {on_device:.0f} MB of the device; {report.measured.examples} examples"
        )
        print(f"  by part: {spent}\n  by member: {steps}", flush=True)
        rows.append({"wall": wall, "cpu": cpu, "peak_mb": peak, "device_mb": on_device, "steps": steps, "spent": spent})
    return {"device": device, "threads": torch.get_num_threads(), "seconds": seconds, "runs": rows}
