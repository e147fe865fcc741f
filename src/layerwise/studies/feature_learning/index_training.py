"""The single-index problem after many steps: does a member's whole training find β⋆ where its first step did not?

Both layers of the student move, on the full batch, by the optimizers of `members`. Each is tried at several rates; rate
and moment are those of the least loss on samples that were held out, for all members alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.modes import evaluating
from layerwise.foundations.progress import Progress, Silent
from layerwise.studies.feature_learning.features import gradient_outer_product
from layerwise.studies.feature_learning.index_family import rotation, student, turned_trial
from layerwise.studies.feature_learning.members import member
from layerwise.studies.feature_learning.single_index import (
    Sample,
    SingleIndex,
    Trial,
    draw_sample,
    draw_trial,
    randomness,
)

HOPELESS = 1e3
"""A run is given up when its loss is so many times that of its start."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A network where its loss on held-out samples was least."""

    rate: float
    steps: int
    held_out: float
    """½ mean (y − f)² on the held-out samples, by which rate and step are chosen."""
    fresh: float
    """The same on samples that chose nothing; the noise leaves half its variance."""
    train: float
    correlation: float
    """|vᵀβ⋆|/‖β⋆‖ with v the top eigenvector of E[∇f ∇fᵀ], the direction along which the network's output changes."""


def split_trial(setting: SingleIndex, seed: int, held_out: int) -> tuple[Trial, Sample, Sample]:
    """A trial in a random basis, and twice as many samples again of the same problem: to choose by, and to report.

    >>> trial, held, fresh = split_trial(SingleIndex(dx=4, n=10, dh=5), 0, 7)
    >>> held.x.shape, fresh.x.shape
    (torch.Size([7, 4]), torch.Size([7, 4]))
    """
    plain, trial = draw_trial(setting, seed), turned_trial(setting, seed)
    O = rotation(setting, seed)
    drawn = [
        draw_sample(setting, plain.index, held_out, randomness(setting, seed, name)) for name in ("held out", "fresh")
    ]
    held, fresh = (Sample(x=sample.x @ O.mT, y=sample.y) for sample in drawn)
    return trial, held, fresh


def loss(model: nn.Module, sample: Sample) -> Float[Tensor, ""]:
    """½ mean (y − f)²."""
    return (model(sample.x)[:, 0] - sample.y).square().mean() / 2


def learned_correlation(model: nn.Module, x: Float[Tensor, "n dx"], index: Float[Tensor, "dx"]) -> float:
    """|vᵀβ⋆|/‖β⋆‖ with v the top eigenvector of the mean of ∇f ∇fᵀ over x.

    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> x = torch.ones(3, 2).double()
    >>> round(learned_correlation(model, x, model.weight[0].detach()), 6)
    1.0
    """
    top = torch.linalg.eigh(gradient_outer_product(model, x))[1][:, -1]
    return float((top @ index).abs() / index.norm())


def train_member(
    name: str,
    trial: Trial,
    held: Sample,
    fresh: Sample,
    *,
    exponents: Sequence[float | int],
    steps: int,
    every: int = 5,
    progress: Progress | None = None,
) -> Trained:
    """The best of a member's networks over rates 10^exponent and over every so many of the steps.

    >>> trial, held, fresh = split_trial(SingleIndex(dx=6, n=300, dh=20, activation="relu"), 0, 300)
    >>> found = train_member("adam", trial, held, fresh, exponents=[-2, -1], steps=30)
    >>> found.held_out < 1.5, found.steps % 5
    (True, 0)
    """
    if not exponents or steps < every or every < 1:
        raise InputError(
            describe(
                f"exponents={list(exponents)}, steps={steps}, every={every}",
                "a rate, and steps ≥ every ≥ 1",
                "pass e.g. exponents=[-2], steps=40",
            )
        )
    runs = [
        found
        for exponent in (progress or Silent()).track(list(exponents), name, len(exponents))
        for found in _run(name, trial, (held, fresh), 10.0**exponent, steps, every)
    ]
    return min(runs, key=lambda found: found.held_out)


def _run(name: str, trial: Trial, others: tuple[Sample, Sample], rate: float, steps: int, every: int) -> list[Trained]:
    """One rate: the network at its start and at every so many steps, as long as it is sane."""
    model = student(trial)
    optimizer = member(name).make(model, rate)
    found = [_measured(model, trial, others, rate, 0)]
    limit = HOPELESS * max(found[0].held_out, found[0].train)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        value = loss(model, trial.sample)
        if not float(value.detach()) < limit:
            break
        value.backward()
        optimizer.step()
        if step % every == 0:
            found.append(_measured(model, trial, others, rate, step))
    return [one for one in found if one.held_out < limit]


def _measured(model: nn.Module, trial: Trial, others: tuple[Sample, Sample], rate: float, steps: int) -> Trained:
    with torch.no_grad(), evaluating(model):
        held_out, fresh, train = (float(loss(model, sample)) for sample in (*others, trial.sample))
    finite = math.isfinite(held_out)
    return Trained(
        rate=rate,
        steps=steps,
        held_out=held_out if finite else math.inf,
        fresh=fresh,
        train=train,
        correlation=learned_correlation(model, others[1].x, trial.index) if finite else 0.0,
    )
