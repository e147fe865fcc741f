"""Margins, the ramp loss, contractions and the margin bound of appendix B.2.2 of George (2023).

The bound is (B.2.5). The thesis prints another one as (2.5.4), with a smaller last term; it does not follow from the
same argument and is not here.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from layerwise.foundations.errors import InputError, describe

Number = int | float


def margins(f: Float[Tensor, "N *C"], y: Shaped[Tensor, "M *one"]) -> Float[Tensor, "N"]:
    """y f(x) for scores ``[N]`` and labels ±1; f(x)[y] − max over the others of f(x)[y′] for ``[N, C]`` (B.2.3).

    >>> margins(torch.tensor([[2.0, 0.5], [1.0, 3.0]]), torch.tensor([0, 0])).tolist()
    [1.5, -2.0]
    >>> margins(torch.tensor([2.0, 0.5]), torch.tensor([1, -1])).tolist()
    [2.0, -0.5]
    """
    if y.numel() != len(f) or not len(f):
        given = f"scores of shape {tuple(f.shape)} and labels of shape {tuple(y.shape)}"
        raise InputError(describe(given, "one label an example", "pass both for the same examples"))
    y = y.reshape(-1)
    if f.ndim == 1 or (f.ndim == 2 and f.shape[1] == 1):
        if not bool(((y == 1) | (y == -1)).all()):
            given = f"one score an example, and labels {sorted(set(y.tolist()))[:5]}"
            raise InputError(describe(given, "labels −1 and 1", "pass 2 * y − 1"))
        return f.reshape(-1) * y
    if f.ndim != 2 or not bool(((y >= 0) & (y < f.shape[1])).all()) or y.is_floating_point():
        given = f"scores of shape {tuple(f.shape)} and labels of {y.dtype} from {y.min().item()} to {y.max().item()}"
        raise InputError(describe(given, "scores [N, C] and integer labels below C", "check the number of classes"))
    own = f.gather(1, y[:, None]).squeeze(1)
    return own - f.scatter(1, y[:, None], -math.inf).amax(1)


def margin_percentile(f: Float[Tensor, "N *C"], y: Shaped[Tensor, "N *one"], percent: Number = 10) -> float:
    """The margin below which `percent` of the examples are; by this measures of complexity are divided.

    >>> margin_percentile(torch.arange(11.0), torch.ones(11), percent=10)
    1.0
    """
    if not 0 <= percent <= 100:
        raise InputError(describe(f"percent={percent}", "a number from 0 to 100", "take e.g. 10"))
    return float(torch.quantile(margins(f, y).double(), percent / 100))


def ramp(u: Float[Tensor, "*N"], gamma: Number) -> Float[Tensor, "*N"]:
    """φ_γ(u): 1 for u ≤ 0, 0 for u > γ, 1 − u/γ between.

    >>> ramp(torch.tensor([-1.0, 0.5, 3.0]), gamma=2.0).tolist()
    [1.0, 0.75, 0.0]
    """
    _positive("gamma", gamma)
    return (1 - u / gamma).clamp(0, 1)


def margin_loss(f: Float[Tensor, "N *C"], y: Shaped[Tensor, "N *one"], gamma: Number) -> float:
    """L̂_γ, the mean ramp loss of the margins: at least the error on the examples.

    >>> margin_loss(torch.tensor([2.0, 0.5]), torch.tensor([1, -1]), gamma=1.0)
    0.5
    """
    return float(ramp(margins(f, y), gamma).double().mean())


def binary_contraction(complexity: Number, gamma: Number) -> float:
    """R̂ of the margin loss ≤ R̂ of the functions / γ, for one score (B.2.7).

    >>> binary_contraction(0.5, gamma=2.0)
    0.25
    """
    return float(complexity / _positive("gamma", gamma))


def multiclass_contraction(complexities: Sequence[Number], gamma: Number) -> float:
    """R̂ of the margin loss ≤ (c/γ) Σ_y R̂ of the scores of class y (B.2.19).

    >>> multiclass_contraction([0.25, 0.25, 0.5], gamma=2.0)
    1.5
    """
    return len(complexities) / _positive("gamma", gamma) * math.fsum(complexities)


def generalization_bound(loss: Number, complexity: Number, n: int, delta: Number = 0.05) -> float:
    """L₀ ≤ L̂_γ + 2R̂ + 3√(log(2/δ)/2n) with probability 1 − δ over the n examples (B.2.5).

    Args:
        loss: L̂_γ of the examples, from `margin_loss`.
        complexity: R̂ of the class of losses: see `binary_contraction` and `multiclass_contraction`.
        n: examples.
        delta: δ.

    >>> round(generalization_bound(0.1, 0.05, n=10_000), 4)
    0.2407
    """
    if not 0 < delta < 1 or n < 1:
        raise InputError(describe(f"n={n}, delta={delta}", "n ≥ 1 and 0 < δ < 1", "take e.g. delta=0.05"))
    return float(loss + 2 * complexity + 3 * math.sqrt(math.log(2 / delta) / (2 * n)))


def _positive(name: str, number: Number) -> Number:
    if not 0 < number < math.inf:
        raise InputError(describe(f"{name}={number}", "a number > 0", "take e.g. a percentile of `margins`"))
    return number
