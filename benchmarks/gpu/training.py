"""One optimizer in an ordinary loop: what it adds to an iteration, how long the host is busy, what stalls."""

import gc
import statistics
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from measure import reason
from torch import Tensor, nn

from gpu.compilations import Compilations, compilations
from gpu.marks import Marks, synchronize
from gpu.optimizers import Made
from gpu.rows import Row
from gpu.state import state
from gpu.tasks import Task

START_UP = 10
"""Steps of the start-up; what comes later may neither stall nor compile."""
SETTLED = 50
"""Steps before those whose mean counts."""
WARM_UP = 25
"""Steps in which the rate grows to its value, as in most loops."""
PLAIN = 14
"""Iterations without optimizer before and after a run; the first two of each do not count."""
ALONE = 20
"""Steps at the end that begin on an idle device: no launch then waits in a full queue, and the time is the host's."""
SYNCHRONIZED = "synchronizing CUDA operation"


@dataclass
class Run:
    """What was seen while training; nothing of it is read from the device before the end."""

    marks: Marks
    """At the start, after construction, and after each backward and step."""
    host: list[float] = field(default_factory=list)
    """Milliseconds of each `step()`, as the host sees it."""
    losses: list[Tensor] = field(default_factory=list)
    synchronisations: list[str] = field(default_factory=list)
    """Lines that waited for the device after the start-up."""
    warned: list[str] = field(default_factory=list)
    kernels: Compilations | None = None


def measure(task: Task, plain: nn.Module, row: Row, steps: int) -> dict:
    """All numbers of a row; what fails is said in `note`."""
    try:
        if not row.available():
            return {"name": row.name, "note": "not installed"}
        return {"name": row.name, **_measure(task, plain, row, min(steps, row.steps or steps))}
    except Exception as error:  # an optimizer may fail in any way at all; the table says how
        return {"name": row.name, "note": f"fails: {reason(error)} at {place(error)}"}
    finally:
        gc.collect()
        if task.cuda:
            torch.cuda.empty_cache()


def _measure(task: Task, plain: nn.Module, row: Row, steps: int) -> dict:
    torch.optim.SGD(
        [torch.zeros(1, requires_grad=True)]
    )  # torch imports its compiler at the first optimizer of any kind
    base = plain_iterations(task, plain)
    model = task.model()
    before = torch.cuda.memory_allocated() if task.cuda else 0
    synchronize(task.device)
    run, made = train(task, model, row, steps)
    synchronize(task.device)
    base += plain_iterations(task, plain)
    found = summary(run, base)
    found["host_alone"] = host_alone(task, model, made)
    for p in model.parameters():
        p.grad = None
    made.zero_grad()
    found |= state(task.device, sum(p.numel() for p in model.parameters()), made, before)
    counts = ("refreshes", "refusals", "rounds", "fallbacks", "restarts", "skipped_steps")
    return found | {name: made.health(name) for name in counts}


def plain_iterations(task: Task, model: nn.Module) -> list[float]:
    """Milliseconds of zero_grad, forward and backward."""
    stream, marks = task.source.stream(), Marks(task.device)
    marks.mark()
    for _ in range(PLAIN):
        batch = next(stream)
        model.zero_grad()
        task.loss(model, batch).backward()
        marks.mark()
    found = marks.milliseconds()[2:]
    model.zero_grad()
    return found


def train(task: Task, model: nn.Module, row: Row, steps: int) -> tuple[Run, Made]:
    """From the construction of the optimizer on; the host waits for nothing that it would not wait for anyway."""
    run, stream = Run(Marks(task.device)), task.source.stream()
    with compilations() as run.kernels, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run.marks.mark()
        made = row.make(task, model)
        rates = [(group, float(group["lr"])) for opt in made.optimizers for group in opt.param_groups]
        run.marks.mark()
        try:
            for step in range(steps):
                if step == START_UP and task.cuda:
                    torch.cuda.set_sync_debug_mode("warn")
                if run.kernels is not None:
                    run.kernels.step = step
                for group, rate in rates if step <= WARM_UP else ():
                    group["lr"] = rate * min(1.0, (step + 1) / WARM_UP)
                iterate(task, model, made, next(stream), run)
        finally:
            if task.cuda:
                torch.cuda.set_sync_debug_mode("default")
    for w in warned:
        where = f"{Path(w.filename).name}:{w.lineno}"
        (run.synchronisations if SYNCHRONIZED in str(w.message) else run.warned).append(f"{where} {w.message}"[:160])
    return run, made


def iterate(task: Task, model: nn.Module, made: Made, batch: tuple[Tensor, Tensor], run: Run) -> None:
    made.zero_grad()
    loss = task.loss(model, batch)
    loss.backward()
    run.marks.mark()
    start = time.perf_counter()
    made.step()
    run.host.append(1e3 * (time.perf_counter() - start))
    run.marks.mark()
    run.losses.append(loss.detach())


def host_alone(task: Task, model: nn.Module, made: Made) -> float:
    """Median milliseconds of `step()` on the host, where it need not wait for a place in the device's queue."""
    stream, found = task.source.stream(), []
    for _ in range(ALONE):
        made.zero_grad()
        task.loss(model, next(stream)).backward()
        synchronize(task.device)
        start = time.perf_counter()
        made.step()
        found.append(1e3 * (time.perf_counter() - start))
    synchronize(task.device)
    return round(statistics.median(found), 3)


def summary(run: Run, base: list[float]) -> dict:
    """Numbers in milliseconds, but for the start-up, which is in seconds.

    `adds`: the mean iteration from step 50 on, less the median one without optimizer; `in_step` is the part of it that
    lies in `step()`, the rest being statistics in forward and backward. `slowest`: of all iterations after the
    start-up.
    """
    construction, *parts = run.marks.milliseconds()
    passes, steps = parts[0::2], parts[1::2]
    whole = [a + b for a, b in zip(passes, steps, strict=True)]
    settled, late = min(SETTLED, len(whole) // 2), min(START_UP, len(whole) // 2)
    plain, median = statistics.median(base), statistics.median(whole[late:])
    losses = torch.stack(run.losses).float().tolist()
    found = {
        "steps": len(whole),
        "plain": plain,
        "adds": statistics.mean(whole[settled:]) - plain,
        "in_step": statistics.mean(steps[settled:]),
        "median": median,
        "slowest": max(whole[late:]),
        "slowest_at": late + max(range(len(whole) - late), key=lambda k: whole[late + k]),
        "ratio": max(whole[late:]) / median,
        "host": statistics.median(run.host[settled:]),
        "host_max": max(run.host[late:]),
        "construction_s": construction / 1e3,
        "first_ten_s": (construction + sum(whole[:START_UP])) / 1e3,
        "whole_s": (construction + sum(whole)) / 1e3,
        "loss_first": losses[0],
        "loss": statistics.mean(losses[-10:]),
    }
    found = {name: round(v, 4) if isinstance(v, float) else v for name, v in found.items()}
    found["synchronisations"] = len(run.synchronisations) if run.marks.device.startswith("cuda") else None
    found["synchronised_at"] = sorted(set(run.synchronisations))[:8]
    found["warned"] = sorted(set(run.warned))[:8]
    found["iterations"] = [round(ms, 2) for ms in whole]
    return found | ({} if run.kernels is None else run.kernels.summary(START_UP))


def place(error: BaseException) -> str:
    """The line of the library, else of any file, in which an exception came up."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "layerwise" in Path(frame.filename).parts] or list(frames)
    last = ours[-1]
    return f"{Path(last.filename).name}:{last.lineno} ({last.line})"
