"""Meta-gradients on quadratics: the stable formula, backpropagation in two precisions, and the naive objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise import theory
from layerwise.foundations.random import stream
from layerwise.meta.quadratic import Quadratic
from layerwise.meta.unroll import unrolled
from layerwise.studies.learning_to_learn.settings import SETTINGS as SETTINGS
from layerwise.studies.learning_to_learn.settings import Setting

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


def problems(seeds: Sequence[int], count: int, d: int) -> Quadratic:
    """Quadratics of section 5.5, `count` of each seed, one seed after the other."""
    return joined([Quadratic.random(count, d, stream(seed, "quadratics")) for seed in seeds])


def joined(parts: Sequence[Quadratic]) -> Quadratic:
    """Problems one after the other, to be run as one tensor program."""
    return Quadratic(torch.cat([p.eigenvalues for p in parts]), torch.cat([p.c for p in parts]))


def paths(
    problem: Quadratic, settings: Sequence[Setting], meta_steps: int, constant: float | int, signed: bool = True
) -> dict[Setting, Float[Tensor, "path problems"]]:
    """Step sizes along meta-training by the stable formula with rates constant/√k, for each setting and problem.

    Not signed: by its absolute value, which is what (5.2) prints.
    """
    found = {}
    for steps, here in _by_steps(settings).items():
        repeated, start = joined([problem] * len(here)), _starts(here, len(problem.c))

        def gradient(eta: Tensor, repeated: Quadratic = repeated, steps: int = steps) -> Tensor:
            value = repeated.gradient(eta, steps)
            return value if signed else value.abs()

        path = repeated.learn(start, steps, meta_steps, lambda k: constant / math.sqrt(k), gradient)
        found |= dict(zip(here, path.unflatten(1, (len(here), -1)).unbind(1), strict=True))
    return found


def _by_steps(settings: Sequence[Setting]) -> dict[int, list[Setting]]:
    """Settings of one number of steps are run together."""
    return {t: [s for s in settings if s.steps == t] for t in sorted({s.steps for s in settings})}


def _starts(settings: Sequence[Setting], count: int) -> Float[Tensor, "runs"]:
    return torch.tensor([s.eta for s in settings], dtype=torch.float64).repeat_interleave(count)


def relative_errors(
    problem: Quadratic, found: dict[Setting, Tensor], at: int = -1
) -> dict[Setting, Float[Tensor, "problems"]]:
    """|η − η*| / η* at a step of each path."""
    best = {steps: problem.best_step(steps) for steps in {setting.steps for setting in found}}
    return {s: (path[at] - best[s.steps]).abs() / best[s.steps] for s, path in found.items()}


# --- backpropagation --------------------------------------------------------------------------------------------


def backpropagated(
    problem: Quadratic, eta: Float[Tensor, "problems"], steps: int, precision: str
) -> Float[Tensor, "problems"]:
    """The derivative of log f(w_t)/t by autograd through all steps, in a precision; as float64, to be compared."""
    dtype = PRECISIONS[precision]
    lam, w = problem.eigenvalues.to(dtype), problem.c.to(dtype)
    eta = eta.to(dtype).detach().requires_grad_()
    for _ in range(steps):
        w = w - eta[:, None] * (lam * w)
    (found,) = torch.autograd.grad((problem.loss(w).log() / steps).sum(), eta)
    return found.double()


def fits(problem: Quadratic, eta: float, steps: int, precision: str) -> Bool[Tensor, "problems"]:
    """Whether f(w_t) lies well within the range of a precision: at least a factor of 100 from its ends."""
    exponent = problem.objective(eta, steps) * steps / math.log(10)
    return exponent.abs() < math.log10(torch.finfo(PRECISIONS[precision]).max) - 2


def overflows(problem: Quadratic, eta: float, steps: int, precision: str) -> Bool[Tensor, "problems"]:
    """Whether f(w_t) is beyond the largest number of a precision."""
    exponent = problem.objective(eta, steps) * steps / math.log(10)
    return exponent > math.log10(torch.finfo(PRECISIONS[precision]).max)


def failed(gradient: Tensor) -> Bool[Tensor, "*problems"]:
    """Where a derivative is zero, which this one never is away from η*, or no number."""
    return (gradient == 0) | ~torch.isfinite(gradient)


def failures_in_the_loop(
    problem: Quadratic, settings: Sequence[Setting], precision: str, meta_steps: int, constant: float | int
) -> dict[Setting, Loop]:
    """Meta-training by backpropagation; a run whose derivative failed stays where it is."""
    found = {}
    for steps, here in _by_steps(settings).items():
        repeated, eta = joined([problem] * len(here)), _starts(here, len(problem.c))
        hit = torch.zeros(len(eta), dtype=torch.bool)
        for k in range(1, meta_steps + 1):
            gradient = backpropagated(repeated, eta, steps, precision)
            hit = hit | failed(gradient)
            eta = torch.clamp(eta - constant / math.sqrt(k) * torch.where(hit, 0.0, gradient), min=0.0)
            if bool(hit.all()):
                break
        parts = zip(hit.unflatten(0, (len(here), -1)), eta.unflatten(0, (len(here), -1)), strict=True)
        found |= {setting: Loop(*part) for setting, part in zip(here, parts, strict=True)}
    return found


def fault(problem: Quadratic, eta: float, steps: int, precision: str) -> str:
    """What the library says of such a meta-gradient: where it stopped being a number, or nothing."""
    lam = problem.eigenvalues.to(PRECISIONS[precision])
    found = unrolled(
        lambda w, meta, _: w - meta["lr"] * lam * w,
        problem.c,
        {"lr": torch.tensor(eta, dtype=torch.float64)},
        steps=steps,
        objective=lambda w, _: (problem.loss(w).log() / steps).sum(),
        dtype=PRECISIONS[precision],
    )
    return "" if found.fault is None else found.fault.phase


# --- the naive objective ----------------------------------------------------------------------------------------


def slope_in_steps(problem: Quadratic, eta: float | int, steps: Sequence[int]) -> Float[Tensor, "problems"]:
    """d log₁₀|F'| / dt of the naive objective: least squares over some numbers of steps."""
    t = torch.tensor(steps, dtype=torch.float64)
    logs = torch.stack([problem.naive_log_gradient(eta, k).logabs / math.log(10) for k in steps])
    centered = t - t.mean()
    return (centered[:, None] * logs).sum(0) / centered.square().sum()


def predicted_slope(problem: Quadratic, eta: float | int) -> Float[Tensor, "problems"]:
    """2 log₁₀ max|1 − ηλ|: what decides once t is large."""
    return 2 * (1 - eta * problem.eigenvalues).abs().amax(-1).log10()


def well_conditioned(seeds: Sequence[int], count: int, d: int) -> Quadratic:
    """Eigenvalues between 1 and 2, the ends included, where the derivative vanishes fast below 2/L."""
    return joined([_well_conditioned(seed, count, d) for seed in seeds])


def _well_conditioned(seed: int, count: int, d: int) -> Quadratic:
    generator = stream(seed, "well-conditioned")
    inside = 1 + torch.rand(count, d - 2, generator=generator, dtype=torch.float64)
    ends = torch.tensor([1.0, 2.0], dtype=torch.float64).expand(count, 2)
    eigenvalues = torch.cat([ends, inside], 1).sort(1).values
    return Quadratic(eigenvalues, torch.randn(count, d, generator=generator, dtype=torch.float64))


class Loop(NamedTuple):
    """How meta-training by backpropagation went, on each problem."""

    failed: Bool[Tensor, "problems"]
    """Whether a derivative was zero or no number at some step."""
    eta: Float[Tensor, "problems"]
    """The step size at the end, or where it failed."""


class Margins(NamedTuple):
    """How far the bounds of section 5.3 are from what they bound; each holds if it is at least 1."""

    vanishing: float
    """Theorem 5.3.1, the least of bound / |F'| below 2/L."""
    explosion: float
    """Theorem 5.3.1, the least of |F'| / floor above 2/L, where the floor is positive."""
    log: float
    """Claim 5.3.5, the least of bound / |F'| of the log objective."""
    log_floor: float
    """Claim 5.3.6, the least of |F'| / floor away from η*."""


def margins(problem: Quadratic, steps: Sequence[int], etas: int) -> Margins:
    """The bounds on problems of unit start, over numbers of steps and step sizes, as spread as the bounds allow."""
    problem = problem.normalized()
    found: list[list[float]] = [[], [], [], []]
    for lam, c in zip(problem.eigenvalues, problem.c, strict=True):
        one, lam_np, c_np = Quadratic(lam[None], c[None]), lam.numpy(), c.numpy()
        L, alpha = float(lam[-1]), float(lam[0])
        bound = theory.log_gradient_bound(lam_np, c_np)
        floor = theory.log_gradient_floor(lam_np, c_np, 0.5 / L, 2 / alpha)
        grid = np.geomspace(1e-3 / L, 2 / alpha, etas)
        for t in steps:
            logs = one.gradient(torch.from_numpy(grid)[:, None], t)[:, 0].abs()
            naive = one.naive_gradient(torch.from_numpy(grid)[:, None], t)[:, 0].abs().tolist()
            found[2].append(bound / float(logs.max()))
            away = (torch.from_numpy(grid) - one.best_step(t)).abs() >= 0.5 / L
            found[3].append(float(logs[away].min()) / floor)
            for eta, value in zip(grid.tolist(), naive, strict=True):
                if eta < 2 / L:
                    found[0].append(theory.naive_gradient_bound(lam_np, eta, t) / value)
                elif eta > 2 / L and (least := theory.naive_gradient_floor(lam_np, c_np, eta, t)) > 0:
                    found[1].append(value / least if math.isfinite(least) else 1.0)
    return Margins(*(min(values) for values in found))
