"""The relative entropy of two coins, and its inverse: from an error that was seen to one that cannot be exceeded."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe

STEPS = 60
"""Newton steps; fewer than ten are needed, except where q/p is tiny."""


def binary_kl(q: Float[Tensor, "*N"], p: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """``q log(q/p) + (1 − q) log((1 − q)/(1 − p))``, with 0 log 0 = 0.

    >>> round(float(binary_kl(torch.tensor(0.1), torch.tensor(0.2))), 4)
    0.0367
    """
    return (torch.xlogy(q, q / p)).nan_to_num(nan=0.0) + torch.xlogy(1 - q, (1 - q) / (1 - p)).nan_to_num(nan=0.0)


def kl_inverse(error: float | int | Tensor, rate: float | int | Tensor) -> float | Tensor:
    """The largest p with ``kl(error ‖ p) ≤ rate``: the bound on a true error that PAC-Bayes theorems end with.

    Newton's method in ``t = log((1 − q)/(1 − p))``, where kl is convex and neither p near 0 nor 1 − p near 0 loses
    digits. It starts above the root, so that every step comes from above.

    >>> round(kl_inverse(0.03373, 0.0780), 4)
    0.1548
    >>> kl_inverse(0.0, 0.5) == -math.expm1(-0.5), kl_inverse(0.2, 0.0), kl_inverse(1.0, 0.3)
    (True, 0.2, 1.0)

    Args:
        error: observed errors, between 0 and 1; broadcast against `rate`.
        rate: what their relative entropy may be, at least 0; ∞ gives 1.

    Returns:
        A number if both are numbers, otherwise a tensor of their dtype; it is computed in double precision.
    """
    given = [v for v in (error, rate) if isinstance(v, Tensor)]
    device = given[0].device if given else torch.device("cpu")
    q, r = (torch.as_tensor(v, dtype=torch.float64, device=device) for v in (error, rate))
    if not bool(((q >= 0) & (q <= 1)).all()):
        raise InputError(describe(f"an error of {_odd(q, 1)}", "errors between 0 and 1", "pass shares, not counts"))
    if not bool((r >= 0).all()):
        raise InputError(describe(f"a rate of {_odd(r, math.inf)}", "rates ≥ 0", "check the relative entropy"))
    found = _inverse(*torch.broadcast_tensors(q, r))
    if not given:
        return float(found)
    floating = [v.dtype for v in given if v.is_floating_point()]
    dtype = torch.get_default_dtype() if not floating else floating[0]
    for other in floating[1:]:
        dtype = torch.promote_types(dtype, other)
    return found.to(dtype)


def _odd(values: Tensor, most: float | int) -> float:
    return float(values[~((values >= 0) & (values <= most))].flatten()[0])


def _inverse(q: Float[Tensor, "*N"], rate: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """In double precision; where an input is at an edge, the closed form of the edge."""
    edge = (q >= 1) | (rate == math.inf)
    plain_q, plain_rate = torch.where(edge, 0.5, q), torch.where(edge, 0.5, rate)
    rest = 1 - plain_q
    t = _above(plain_q, rest, plain_rate)
    for _ in range(STEPS):
        moved = -rest * torch.expm1(-t)  # p − q
        p = plain_q + moved
        relative = torch.where(plain_q > 0, moved / torch.where(plain_q > 0, plain_q, 1.0), 0.0)
        value = rest * t - plain_q * torch.log1p(relative)
        slope = torch.where(moved > 0, moved / torch.where(p > 0, p, 1.0), math.inf)
        step = (value - plain_rate).clamp_min(0) / slope
        t = (t - step).clamp_min(0)
        if not bool((step > 1e-16 * t).any()):
            break
    return torch.where(edge, 1.0, plain_q - rest * torch.expm1(-t))


def _above(q: Tensor, rest: Tensor, rate: Tensor) -> Tensor:
    """A t at or above the root, as kl is at least (p − q)²/2p, 2(p − q)² and −(1 − q) log(1 − p) − H(q)."""
    moved = torch.minimum(rate + (rate * (rate + 2 * q)).sqrt(), (rate / 2).sqrt())
    near = -torch.log1p(-(moved / rest).clamp_max(1.0))
    entropy = -torch.xlogy(q, q) - torch.xlogy(rest, rest)
    return torch.minimum(near, (rate + entropy) / rest + rest.log())
