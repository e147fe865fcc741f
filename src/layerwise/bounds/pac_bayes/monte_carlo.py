"""The error of the stochastic network: networks are drawn from the posterior, and how often they are wrong."""

import math

import torch
from torch import Tensor, nn
from torch.func import vmap

from layerwise.bounds.kl import kl_inverse
from layerwise.bounds.pac_bayes.examples import Examples, outputs
from layerwise.bounds.pac_bayes.posterior import Posterior
from layerwise.bounds.pac_bayes.prior import check_confidence
from layerwise.foundations.errors import InputError, NumericalError, describe
from layerwise.foundations.progress import Progress
from layerwise.foundations.types import Tree, map_leaves

TOGETHER = 64
"""Networks at once, at most."""
NUMBERS = 16_000_000
"""Weights and unit outputs that are held at once, about."""


def error_limit(error: float | int, draws: int, delta: float | int) -> float:
    """What the stochastic error exceeds with probability δ′ at most, if n drawn networks had `error` on average.

    kl⁻¹(ê, log(2/δ′)/n), which holds for means of n independent numbers between 0 and 1.

    >>> round(error_limit(0.03373, 50_000, 0.01), 4)
    0.0364
    """
    check_confidence(delta=delta)
    if draws < 1:
        raise InputError(describe(f"draws={draws}", "one network or more", "draw some"))
    return float(kl_inverse(error, math.log(2 / delta) / draws))


@torch.no_grad()
def stochastic_error(
    model: nn.Module,
    posterior: Posterior,
    examples: Examples,
    draws: int,
    generator: torch.Generator,
    per_draw: int | None = None,
    progress: Progress | None = None,
) -> float:
    """The mean error of drawn networks on all examples, or each on `per_draw` of them that are drawn as well."""
    chunk = min(draws, _together(posterior, per_draw or examples.count))
    sizes = [min(chunk, draws - start) for start in range(0, draws, chunk)]
    wrong, seen = 0, 0
    rounds = iter(sizes) if progress is None else progress.track(sizes, "networks drawn", len(sizes))
    for n in rounds:
        params = posterior.draw(n, generator)
        if per_draw is not None and examples.whole:  # of its own for each network: what is averaged is independent
            x, y = examples.drawn(n * per_draw, generator)
            x = map_leaves(lambda t, n=n: t.unflatten(0, (n, -1)), x)
            wrong += int(_wrong(model, params, x, y.unflatten(0, (n, -1)), 0))
            seen += n * per_draw
            continue
        for x, y in examples.in_order():
            wrong += int(_wrong(model, params, x, y, None))
            seen += n * len(y)
    return wrong / seen


def _together(posterior: Posterior, examples: int) -> int:
    units = sum(spec.form.groups * spec.form.outputs for spec in posterior.bases.table if spec.sites)
    return max(1, min(TOGETHER, NUMBERS // (posterior.objective.parameters + min(examples, 10_000) * units)))


def _wrong(model: nn.Module, params: dict[str, Tensor], x: Tree, y: Tensor, axis: int | None) -> Tensor:
    """How many of all answers are wrong; `axis` 0 where each network has inputs of its own."""
    try:
        f = vmap(lambda p, x: outputs(model, p, x), in_dims=(0, axis))(params, x)
    except (RuntimeError, ValueError):  # a model whose operations cannot be batched: one network after another
        count = len(next(iter(params.values())))
        own = [x if axis is None else map_leaves(lambda t, i=i: t[i], x) for i in range(count)]
        f = torch.stack([outputs(model, {k: v[i] for k, v in params.items()}, own[i]) for i in range(count)])
    if not bool(torch.isfinite(f).all()):
        raise NumericalError("A network drawn from the posterior gives outputs that are not finite. Lower the rate.")
    return (f.argmax(-1) != y).sum()
