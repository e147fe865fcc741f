"""Networks trained to one cross-entropy: their generalization gap, and measures of their complexity."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from layerwise import bounds
from layerwise.foundations.random import stream
from layerwise.studies.tangent_alignment.classification import Split, Task

PROBE = 100
"""Training examples of the kernel."""
LOOKED_AT = 500
"""Training examples that other measures need."""
EVALUATED = 2000
"""Examples at once."""


def snapshots(most: int, ratio: float = 1.15, unit: int = 5) -> frozenset[int]:
    """5⌊1.15^k⌋, the steps after which the thesis looks at kernels, up to `most`.

    >>> sorted(snapshots(30))
    [5, 10, 15, 20, 25, 30]
    """
    last = math.ceil(math.log(max(most / unit, 1) + 1, ratio))
    return frozenset(step for k in range(last + 1) if (step := unit * math.floor(ratio**k)) <= most)


def trained(task: Task, split: Split, model: nn.Module, seed: int, most: int) -> Iterator[int]:
    """SGD by passes over the data in orders of their own; the number of steps after each step."""
    optimizer, generator = task.sgd(model), stream(seed, "batches")
    step, n = 0, len(split.x)
    while step < most:
        order = torch.randperm(n, generator=generator).to(split.x.device)
        for chosen in order.split(task.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(split.x[chosen]), split.y[chosen]).backward()
            optimizer.step()
            step += 1
            yield step


@torch.no_grad()
def evaluated(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Cross-entropy and accuracy."""
    loss, right = 0.0, 0
    for xs, ys in zip(x.split(EVALUATED), y.split(EVALUATED), strict=True):
        f = model(xs)
        loss += float(nn.functional.cross_entropy(f, ys, reduction="sum"))
        right += int((f.argmax(1) == ys).sum())
    return loss / len(x), right / len(x)


def measured(task: Task, seed: int, *, stop: float | int = 0.01, most: int = 20_000) -> dict[str, float]:
    """Train until the cross-entropy of the training data is `stop`, or `most` steps are done; then measure.

    Names: "gap" (of accuracies, the training's on the labels it was given), "path" (6.4.11), "displacement", "length",
    "steps", "loss", "margin", the measures of `lw.bounds`, and with "/margin" those divided by the margin.
    """
    split = task.split(seed)
    with torch.random.fork_rng(devices=[]):  # layers are drawn twice, first from torch's own state
        model = task.model(seed).to(task.device)
    initial = copy.deepcopy(model)
    path = bounds.FlowComplexity(model, split.x[:PROBE], every=snapshots(most))
    a_pass = math.ceil(len(split.x) / task.batch)
    loss = math.inf
    for step in trained(task, split, model, seed, most):
        path()
        if step % a_pass == 0:
            loss, _ = evaluated(model, split.x, split.y)
            if not loss > stop:  # NaN ends it, too
                break
    loss, right = evaluated(model, split.x, split.y)
    _, held = evaluated(model, split.held_x, split.held_y)
    x, y = split.x[:LOOKED_AT], split.y[:LOOKED_AT]
    with torch.no_grad():
        margin = bounds.margin_percentile(model(x), y)
    found = {
        "gap": right - held,
        "test": held,
        "loss": loss,
        "steps": float(path.steps),
        "path": path.value,
        "displacement": path.displacement,
        "length": path.length,
        "margin": margin,
    }
    found |= bounds.measures(model, initial, x, y)
    divided = bounds.measures(model, initial, x, y, normalized=True) if margin > 0 else {}
    return found | {f"{name}/margin": value for name, value in divided.items()}
