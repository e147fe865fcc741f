"""How many samples an optimizer of the library needs until it has found a linear representation, by anisotropy.

Student F G x, teacher y = F⋆G⋆x + ε, inputs x = Σ^½u with log-spaced eigenvalues of a given condition number. Every
step takes a fresh batch, so that samples used are steps times the batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.batch import draw
from layerwise.studies.feature_learning.covariance import haar
from layerwise.studies.feature_learning.measures import subspace_distance
from layerwise.studies.feature_learning.members import Member, members
from layerwise.studies.feature_learning.problem import Task
from layerwise.studies.feature_learning.sample_budget import FIRST as FIRST
from layerwise.studies.feature_learning.sample_budget import Recovery as Recovery

DIVERGED = 100
"""A run has diverged once its loss is so many times that of its first batch."""


@dataclass(frozen=True, kw_only=True)
class Descent:
    """One run: the distance before the first step and after each."""

    dist: tuple[float, ...]
    needed: float
    """Samples until the representation was found; ∞ if it was not."""
    diverged: bool = False
    """Whether the run was broken off because its loss had grown too large; its last distance then says nothing."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A member at its rates: the one that needs the fewest samples, or, if none finds it, ends nearest undiverged."""

    rate: float
    best: Descent
    place: int
    """Which of the rates, from 0."""


def draw_teacher(setting: Recovery, seed: int) -> tuple[Float[Tensor, "k dx"], Task]:
    """G⋆ and the law of (x, y). All κ of a seed share G⋆, F⋆ and the basis of Σ; both factors are orthonormal.

    >>> G, task = draw_teacher(Recovery(condition=100.0), 0)
    >>> round(float(torch.linalg.cond(task.Sigma)), 6), round(float(task.Sigma.trace()) / 24, 9)
    (100.0, 1.0)
    """
    generator = stream(seed, "samples", "teacher")
    G, F = haar(setting.k, setting.dx, generator), haar(setting.k, setting.dy, generator).mT
    # As `log_spaced`, with the root from the same basis; its rounding is another, and SOAP's runs amplify rounding.
    basis, values = haar(setting.dx, setting.dx, generator), setting.eigenvalues
    Sigma, root = ((basis * values**exponent) @ basis.mT for exponent in (1.0, 0.5))
    return G, Task(Sigma=Sigma, root=root, map=F @ G, deviation=float(setting.noise), uniform=True)


def student(setting: Recovery, seed: int) -> nn.Sequential:
    """x ↦ F G x without biases in double precision, rows of G and columns of F orthonormal at the start.

    >>> [tuple(p.shape) for p in student(Recovery(), 0).parameters()]
    [(3, 24), (6, 3)]
    """
    generator = stream(seed, "samples", "student")
    sizes = {"bias": False, "dtype": torch.float64}
    model = nn.Sequential(nn.Linear(setting.dx, setting.k, **sizes), nn.Linear(setting.k, setting.dy, **sizes))
    first, second = model.parameters()
    with torch.no_grad():
        first.copy_(haar(setting.k, setting.dx, generator))
        second.copy_(haar(setting.k, setting.dy, generator).mT)
    return model


def rates(name: str, count: int) -> list[float]:
    """The rates at which a member is tried: as many for each, equally spaced in logarithm over two decades.

    >>> rates("kfac", 5), rates("kfac", 1)
    ([0.01, 0.03162, 0.1, 0.3162, 1.0], [0.1])
    """
    decades = [2 * i / (count - 1) for i in range(count)] if count > 1 else [1.0]
    return [float(f"{10 ** (FIRST[name] + above):.4g}") for above in decades]


def samples_needed(dist: Sequence[float], setting: Recovery) -> float:
    """Samples at the first of `stay` steps in a row with dist ≤ δ; ∞ if there are none.

    >>> samples_needed([1.0, 0.2, 0.9, 0.2, 0.1], Recovery(stay=2, batch=10))
    30.0
    """
    found = [value <= setting.distance for value in dist]
    for first in range(len(found) - setting.stay + 1):
        if all(found[first : first + setting.stay]):
            return float(first * setting.batch)
    return math.inf


def batch(setting: Recovery, task: Task, seed: int, step: int) -> tuple[Float[Tensor, "n dx"], Float[Tensor, "n dy"]]:
    """Inputs and labels of a step, the same for all optimizers and rates of a seed."""
    u, noise, _ = draw(task, setting.batch, stream(seed, "samples", "batch", step))
    x = u.double() @ task.root
    return x, x @ task.map.mT + noise


def descend(setting: Recovery, member: Member, rate: float | int, seed: int, limit: float | int = math.inf) -> Descent:
    """Train with the plain loop until the representation is found, the steps are spent or the loss has diverged.

    A run that has used `limit` samples outside δ is given up, too.

    >>> from layerwise.studies.feature_learning.members import member
    >>> descend(Recovery(), member("kfac"), 0.1, 0).needed < 128 * 100
    True
    """
    target, task = draw_teacher(setting, seed)
    model = student(setting, seed)
    weight, optimizer = next(model.parameters()), member.make(model, float(rate))
    dist, within, largest = [float(subspace_distance(weight.detach(), target))], 0, math.inf
    diverged = False
    for step in range(1, setting.steps + 1):
        x, y = batch(setting, task, seed, step)
        optimizer.zero_grad()
        loss = (y - model(x)).square().sum(1).mean() / 2
        loss.backward()
        if diverged := not loss.item() <= largest:
            break
        largest = min(largest, DIVERGED * loss.item()) if step == 1 else largest
        optimizer.step()
        dist.append(float(subspace_distance(weight.detach(), target)))
        within = within + 1 if dist[-1] <= setting.distance else 0
        if within >= setting.stay or (within == 0 and step * setting.batch >= limit):
            break
    return Descent(dist=tuple(dist), needed=samples_needed(dist, setting), diverged=diverged)


def search(setting: Recovery, member: Member, seed: int, rates: Sequence[float | int]) -> Search:
    """The rate with which the member needs the fewest samples.

    Rates are tried from the middle outwards, and one that has used more samples than the best so far is given up:
    which changes no result, as it could only have needed more.

    >>> from layerwise.studies.feature_learning.members import member
    >>> search(Recovery(steps=100), member("kfac"), 0, [0.03, 0.1, 0.3]).place
    2
    """
    if not rates:
        raise InputError(describe("no rates", "at least one", "pass rates=[0.1]"))
    middle, found = (len(rates) - 0.5) / 2, []
    for place in sorted(range(len(rates)), key=lambda place: abs(place - middle)):
        least = min((search.best.needed for search in found), default=math.inf)
        run = descend(setting, member, rates[place], seed, least)
        found.append(Search(rate=float(rates[place]), best=run, place=place))
    return min(found, key=lambda search: (search.best.needed, search.best.diverged, search.best.dist[-1]))


def damped_kfac(damping: float | int) -> Member:
    """KFAC of the comparison with another damping.

    >>> damped_kfac(1e-6).label
    'KFAC'
    """
    return members(damping)["kfac"]


def growth(conditions: Sequence[float | int], needed: Sequence[float]) -> float:
    """p of needed ~ κ^p by least squares of logarithms, over the κ where it is finite; NaN for fewer than two.

    >>> round(growth([1, 10, 100, 1000], [5.0, 50.0, 500.0, math.inf]), 9)
    1.0
    """
    kept = [(math.log(a), math.log(b)) for a, b in zip(conditions, needed, strict=True) if 0 < b < math.inf]
    if len({a for a, _ in kept}) < 2:
        return math.nan
    return float(np.polyfit([a for a, _ in kept], [b for _, b in kept], 1)[0])


def ratio(above: float | int, below: float | int) -> float:
    """above/below of two needs; NaN where it says nothing: 0/0, ∞/∞ or a need of no samples at all.

    >>> ratio(6.0, 3.0), ratio(math.inf, 3.0), ratio(3.0, 0.0)
    (2.0, inf, nan)
    """
    return above / below if below else math.nan
