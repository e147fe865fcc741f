"""What a step does entry by entry in an eigenbasis, in one pass each; the rules are those of `elementwise`.

Means s may be of half precision: they are read, and rounded when they are written.
"""

import torch
from jaxtyping import Float, Float16
from torch import Tensor

from layerwise.optim.cuda import elementwise
from layerwise.optim.cuda.checks import check_alike, check_whole
from layerwise.optim.cuda.scaled import Scaled, parts


@torch.no_grad()
def squares_ema_(
    s: Float[Tensor, "K O I"],
    R: Float[Tensor, "K O I"] | Scaled,
    weight: Float[Tensor, "K"],
    factor: int | float = 1.0,
) -> Float[Tensor, "K O I"]:
    """Move running means towards ``factor · R²``.

        s ← s + weight·(factor·R² − s)

    A weight of 0 leaves its matrix unchanged whatever R is; elsewhere an entry whose square is not finite leaves its
    own mean unchanged. (That a whole matrix be left out for one entry would take another pass over R, and gradients
    were found finite before.)

    >>> squares_ema_(torch.ones(1, 1, 2), torch.tensor([[[3.0, torch.inf]]]), torch.tensor([0.5]), 2.0)
    tensor([[[9.5000, 1.0000]]])
    """
    R, scales = parts(R)
    check_alike(s, {"R": R})
    if s.numel():
        elementwise.implementation_for(s, others=(R,), half=True).squares_ema_(s, R, scales, weight, factor)
    return s


@torch.no_grad()
def damped_quotient(
    R: Float[Tensor, "K O I"] | Scaled,
    s: Float[Tensor, "K O I"],
    s_P: Float[Tensor, "K O"] | None,
    s_Q: Float[Tensor, "K I"] | None,
    left: Float[Tensor, "K"] | None,
    right: Float[Tensor, "K"] | None,
    constant: Float[Tensor, "K"],
    out: Float[Tensor, "K O I"] | None = None,
    largest: Float[Tensor, "K"] | None = None,
) -> Float[Tensor, "K O I"]:
    """Divide by damped eigenvalues, what is added to them at least the least normal number.

        Yᵢⱼ = Rᵢⱼ / (sᵢⱼ + max(s_Pᵢ·right + left·s_Qⱼ + constant, tiny))

    Without `left` and `right` (then the factors' eigenvalues are not asked for) only the constant is added. `out` may
    be R (or what holds it, before it is divided), or of half precision. `largest`, zeros, becomes the largest magnitude
    of each Y, NaN where there is one.

    >>> one, two = torch.ones(1), torch.full((1, 1), 2.0)
    >>> damped_quotient(torch.full((1, 1, 1), 12.0), torch.ones(1, 1, 1), two, 3 * two, one, one, 3 * one)
    tensor([[[1.]]])
    """
    R, scales = parts(R)
    out = _room(R, out)
    check_alike(s, {"R": R, "out": out})
    if s.numel():
        way = elementwise.implementation_for(s, others=(R, out), half=True)
        way.damped_quotient(R, scales, s, s_P, s_Q, left, right, constant, out, largest)
    return out


@torch.no_grad()
def scaled(
    R: Float[Tensor, "K O I"] | Scaled,
    a: Float[Tensor, "K O"] | None,
    b: Float[Tensor, "K I"] | None,
    out: Float[Tensor, "K O I"] | None = None,
    largest: Float[Tensor, "K"] | None = None,
) -> Float[Tensor, "K O I"]:
    """``Rᵢⱼ aᵢ bⱼ``: rows and columns scaled, or one of the two alone.

    `out` and `largest` are as in `damped_quotient`.

    >>> scaled(torch.ones(1, 1, 2), torch.tensor([[3.0]]), torch.tensor([[1.0, 2.0]]))
    tensor([[[3., 6.]]])
    """
    R, scales = parts(R)
    out = _room(R, out)
    check_alike(R, {"out": out})
    if R.numel():
        way = elementwise.implementation_for(R, others=(out, *(x for x in (a, b) if x is not None)), half=True)
        way.scaled(R, scales, a, b, out, largest)
    return out


def divided_to_fp16(X: Float[Tensor, "K O I"], by: Float[Tensor, "K"]) -> Float16[Tensor, "K O I"]:
    """Each matrix divided by its number, and rounded; torch's own division into another type is three times slower.

    >>> divided_to_fp16(torch.ones(1, 1, 2), torch.tensor([4.0]))
    tensor([[[0.2500, 0.2500]]], dtype=torch.float16)
    """
    return scaled(Scaled(X, (by,)), None, None, torch.empty(X.shape, dtype=torch.float16, device=X.device))


def _room(R: Tensor, out: Tensor | None) -> Tensor:
    check_whole(R, "R")
    return torch.empty(R.shape, dtype=R.dtype, device=R.device) if out is None else out
