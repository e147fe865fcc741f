"""Meta-training by truncated unrolls: trajectories are cut into segments, with one step on the meta-parameters each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.progress import Progress, Silent
from layerwise.meta.checks import whole
from layerwise.meta.unroll import Fault, Meta, Objective, Step, Tree, checked, unrolled

RATE = 0.01


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """One inner training, or several at once, from a start on."""

    state: Tree
    segments: Sequence[int]
    """Steps of each segment; the meta-parameters change after each, and the inner training goes on."""
    batches: Callable[[int], Any] | None = None
    """What the inner step gets, by the number of the step since the start; called once for each step."""
    judged: Callable[[int], Any] | None = None
    """What the objective gets, likewise."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Learned:
    """Meta-parameters, and how they came about."""

    meta: dict[str, Tensor]
    objectives: list[float] = field(default_factory=list)
    """The meta-objective of each segment, before the step that followed it; NaN or ∞ where there was a fault."""
    faults: list[tuple[int, Fault]] = field(default_factory=list)
    """Segments, counted over all episodes, after which no step was made because numbers were not finite; the rest of
    their episode was left out."""


def learn(
    step: Step,
    meta: Meta,
    episodes: Iterable[Episode],
    objective: Objective,
    *,
    lr: float | int | Callable[[int], float] = RATE,
    decay: float | int = 0.9,
    clip: float | int | None = None,
    tasks: bool = True,
    progress: Progress | None = None,
) -> Learned:
    """Meta-parameters by RMSProp on the mean objective of each segment, as in Wu (2023), D.6.1.

    A gradient that is not finite is never used, and never hidden: it is listed in `faults`, and the episode ends there.

    Args:
        step: the inner step, ``step(state, meta, batch) → state``.
        meta: where to start.
        episodes: inner trainings, one after the other; several tasks at once with ``tasks=True``.
        objective: ``objective(state, batch)``; see `unrolled`.
        lr: of RMSProp: a number, or a function of the update's number 1, 2, ….
        decay: of its average of squares.
        clip: largest norm of the whole meta-gradient; longer ones are shortened. None: not.
        tasks: whether states and batches have a first axis of tasks.
        progress: shows how far it is.

    >>> def step(w, meta, batch):
    ...     return w - meta["log_lr"].exp() * w
    >>> episodes = [Episode(state=torch.ones(4), segments=[5]) for _ in range(60)]
    >>> found = learn(step, {"log_lr": torch.tensor(-3.0)}, episodes, lambda w, _: 0.5 * w**2, lr=0.1)
    >>> bool(found.meta["log_lr"].exp() > 0.6), found.faults
    (True, [])
    """
    if not callable(lr) and not lr > 0:
        raise InputError(describe(f"lr={lr}", "a rate > 0", "pass e.g. lr=0.01"))
    if not 0 <= decay < 1:
        raise InputError(describe(f"decay={decay}", "0 ≤ decay < 1", "pass e.g. decay=0.9"))
    if clip is not None and not clip > 0:
        raise InputError(describe(f"clip={clip}", "a norm > 0, or None", "pass e.g. clip=1.0"))
    rate = lr if callable(lr) else lambda k: lr
    now = {name: torch.nn.Parameter(value.detach().clone()) for name, value in checked(meta).items()}
    optimizer = torch.optim.RMSprop(now.values(), lr=rate(1), alpha=decay)
    updates = 0
    objectives: list[float] = []
    faults: list[tuple[int, Fault]] = []
    total = len(episodes) if isinstance(episodes, Sized) else None
    for episode in (progress or Silent()).track(episodes, "episodes", total):
        state, done = episode.state, 0
        for length in episode.segments:
            found = unrolled(
                step,
                state,
                {name: value.detach() for name, value in now.items()},
                steps=whole(length, "segment"),
                objective=objective,
                batches=_from(episode.batches, done),
                judged=_from(episode.judged, done),
                average=True,
                tasks=tasks,
            )
            objectives.append(float(found.value))
            if found.fault is not None:
                faults.append((len(objectives) - 1, found.fault))
                break
            for name, value in now.items():
                value.grad = found.gradient[name]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(list(now.values()), clip)
            updates += 1
            optimizer.param_groups[0]["lr"] = rate(updates)
            optimizer.step()
            state, done = found.state, done + length
    return Learned(meta={n: p.detach().clone() for n, p in now.items()}, objectives=objectives, faults=faults)


def _from(batches: Callable[[int], Any] | None, done: int) -> Callable[[int], Any] | None:
    return None if batches is None else lambda k: batches(done + k)
