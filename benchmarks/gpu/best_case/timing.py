"""Time, state and host synchronisations of one optimizer, beside the same iteration without it."""

import gc
import statistics

import torch
from measure import reason

from gpu.best_case.model import Iteration, Task, iterate, iterations
from gpu.best_case.rows import Row
from gpu.marks import Marks
from gpu.optimizers import EVERY, Made
from gpu.state import state
from gpu.training import place

WARM_UP = 101
"""Steps before the first one that counts: refreshes come often while statistics are young, and are then captured."""
BLOCK = 5
"""Iterations without optimizer between two cycles."""
SYNC_STEPS = 12


def measure(task: Task, row: Row, cycles: int) -> dict:
    """All numbers of a row; what fails is said in `note`."""
    try:
        if not row.available():
            return {"name": row.name, "note": "not installed"}
        return {"name": row.name, **_measure(task, row, cycles)}
    except Exception as error:  # a peer may fail in any way at all; the table says how
        return {"name": row.name, "note": f"fails: {reason(error)} at {place(error)}"}
    finally:
        gc.collect()
        if task.cuda:
            torch.cuda.empty_cache()


def _measure(task: Task, row: Row, cycles: int) -> dict:
    model = task.copy()
    before = torch.cuda.memory_allocated() if task.cuda else 0
    made = row.make(model)
    start = Marks(task.device)
    iterate(task, model, made, 1, start)
    iterate(task, model, made, (row.steps or WARM_UP) - 1, Marks(task.device))
    gc.collect()
    bare, ours = [Marks(task.device)], []
    iterate(task, task.model, None, BLOCK, bare[-1])
    for _ in range(cycles):
        ours.append(Marks(task.device))
        iterate(task, model, made, EVERY, ours[-1])
        bare.append(Marks(task.device))
        iterate(task, task.model, None, BLOCK, bare[-1])
    plain = [i for marks in bare for i in iterations(marks)]
    found = summary(row, plain, [iterations(marks) for marks in ours])
    found["first_ms"] = round(iterations(start)[0].whole, 1)
    for q in (*task.model.parameters(), *model.parameters()):
        q.grad = None
    made.zero_grad()
    found |= state(task.device, task.parameters, made, before)
    found["loss_before"], found["loss_now"] = (round(_loss(task, m), 3) for m in (task.model, model))
    found["refused"] = made.health("refusals") or 0
    found["synchronisations"] = synchronisations(task, model, made) if task.cuda else None
    return found


@torch.no_grad()
def _loss(task: Task, model: torch.nn.Module) -> float:
    model.eval()
    found = float(task.loss(model))
    model.train()
    return found


def summary(row: Row, plain: list[Iteration], cycles: list[list[Iteration]]) -> dict:
    """Numbers in milliseconds.

    Each of the ten steps of a cycle is taken at its median over cycles. `amortised`: their mean, less the median
    iteration without optimizer; `slowest`: of them. `label`: what the forward of a sampled member takes longer, on
    average over a cycle; at most a plain backward for each statistics step, so that factor products made there count as
    the step's. `mean` and `max` are of all iterations, stalls of the host included.
    """
    base = statistics.median(i.whole for i in plain)
    forward, backward = (statistics.median(getattr(i, part) for i in plain) for part in ("forward", "backward"))
    every = [i for cycle in cycles for i in cycle]
    longer = statistics.mean(i.forward for i in every) - forward
    label = max(0.0, min(longer, backward / row.factor_every)) if row.sampled else 0.0
    wholes = [[i.whole for i in cycle] for cycle in cycles]
    steps = [[i.step for i in cycle] for cycle in cycles]
    found = {
        "plain": base,
        "plain_forward": forward,
        "plain_backward": backward,
        "mean": statistics.mean(i.whole for i in every),
        "amortised": statistics.mean(_profile(wholes)) - base,
        "label": label,
        "median": statistics.median(i.whole for i in every),
        "max": max(i.whole for i in every),
        "slowest": max(_profile(wholes)),
        "step_mean": statistics.mean(i.step for i in every),
        "step_median": statistics.median(i.step for i in every),
        "step_max": max(i.step for i in every),
        "step_slowest": max(_profile(steps)),
        "forward_more": longer,
        "backward_more": statistics.mean(i.backward for i in every) - backward,
        "profile": [round(ms, 3) for ms in _profile(wholes)],
        "step_profile": [round(ms, 3) for ms in _profile(steps)],
    }
    found["ratio"] = found["slowest"] / found["median"]
    found["step_ratio"] = found["step_slowest"] / max(found["step_median"], 1e-9)
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in found.items()}


def _profile(cycles: list[list[float]]) -> list[float]:
    return [statistics.median(cycle[k] for cycle in cycles) for k in range(EVERY)]


# --- synchronisations --------------------------------------------------------------------------------------


def synchronisations(task: Task, model: torch.nn.Module, made: Made | None) -> str:
    """ "0", or where a steady iteration first waits for the device."""
    task.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        iterate(task, model, made, SYNC_STEPS, Marks(task.device))
    except Exception as error:
        return f"{reason(error)} at {place(error)}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        task.synchronize()
    return "0"
