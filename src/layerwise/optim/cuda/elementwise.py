"""What an optimizer's step does entry by entry, in one pass each: averages, Adam and momentum.

On a GPU with Triton every function is one launch, or two; elsewhere it is a few calls of torch, which the kernels are
checked against. Nothing here asks the device for a value. `all_finite` is a bool on the device, or None for a step that
is taken: where it is false nothing changes, whatever the other arguments hold.
Stacks ``[K, O, I]`` may be strided along K (``state[groups]``), but each matrix lies in one piece.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.cuda import elementwise_torch
from layerwise.optim.cuda.checks import check_means, check_whole
from layerwise.optim.cuda.elementwise_torch import over
from layerwise.optim.cuda.scaled import Scaled, parts
from layerwise.optim.cuda.triton import elementwise as triton_elementwise
from layerwise.optim.cuda.triton.products import available

TAKEN = (torch.float32, torch.bfloat16, torch.float16)
"""Types that the kernels read; they compute in float32."""
AllFinite = Bool[Tensor, ""] | None


@torch.no_grad()
def ema_(
    mean: Float[Tensor, "K *n"],
    new: Float[Tensor, "K *m"],
    weight: Float[Tensor, "K"],
    divisor: Float[Tensor, "K"] | int | float = 1.0,
) -> Float[Tensor, "K *n"]:
    """Move running means, matrices or vectors, towards ``new / divisor``, padded with zeros to the mean's shape.

        mean ← mean + weight·(new/divisor − mean)

    A weight of 0 leaves its mean unchanged even if `new` is not finite; a weight of 1 replaces it. A mean of half
    precision is rounded when it is written.

    >>> ema_(torch.ones(2, 2), torch.tensor([[4.0], [torch.nan]]), torch.tensor([0.5, 0.0]), 2.0).tolist()
    [[1.5, 0.5], [1.0, 1.0]]
    """
    check_means(mean, new)
    if mean.numel() and new.numel():
        stacks = (mean, new) if mean.ndim == 3 else (mean.unsqueeze(1), new.unsqueeze(1))
        implementation_for(stacks[0], others=(new,), half=True).ema_(*stacks, weight, divisor)
    return mean


@torch.no_grad()
def corrections_(
    steps: Float[Tensor, "K"], beta1: int | float, beta2: int | float, all_finite: AllFinite = None
) -> tuple[Float[Tensor, "K"], Float[Tensor, "K"]]:
    """Count a step of each group, t, in a step that is taken; returns ``1 − beta1ᵗ`` and ``1 − beta2ᵗ`` (of t ≥ 1).

    >>> steps = torch.tensor([1.0])
    >>> corrections_(steps, 0.5, 0.0), steps
    ((tensor([0.7500]), tensor([1.])), tensor([2.]))
    """
    found = torch.empty_like(steps), torch.empty_like(steps)
    if steps.numel():
        implementation_for(steps.unsqueeze(0)).corrections_(steps, *found, beta1, beta2, all_finite)
    return found


@torch.no_grad()
def rotated_adam_(
    M: Float[Tensor, "K O I"],
    V: Float[Tensor, "K O I"],
    R: Float[Tensor, "K O I"] | Scaled,
    *,
    beta1: int | float,
    beta2: int | float,
    eps: int | float,
    correction1: Float[Tensor, "K"],
    correction2: Float[Tensor, "K"],
    floor: Float[Tensor, "K"] | None = None,
    all_finite: AllFinite = None,
    out: Float[Tensor, "K O I"] | None = None,
    factor: int | float = 1.0,
) -> Float[Tensor, "K O I"]:
    """SOAP's step in the eigenbasis, ``M/(√V + ε) · √c₂/c₁``, with both moments moved towards R and R² before.

    The corrections are ``c = 1 − βᵗ``. With a `floor` the step is multiplied by ``max(0, 1 − floor/V)``, by the new V:
    there is none where V is no more than what rounding leaves. `out` may be R, or of half precision; what it gets is
    `factor` times the step, in float16 cut off where it is too large (NaN stays). In a step left out it is zero.

    >>> M, V, c = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), torch.tensor([0.5])
    >>> step = rotated_adam_(M, V, torch.ones(1, 1, 1), beta1=0.5, beta2=0.5, eps=0.0, correction1=c, correction2=c)
    >>> M.item(), V.item(), round(step.item(), 6)
    (0.5, 0.5, 1.0)
    """
    return _adam(M, V, R, out, factor, (beta1, beta2, eps, correction1, correction2, True, floor, all_finite))


@torch.no_grad()
def adam_(
    m: Float[Tensor, "K O I"],
    v: Float[Tensor, "K O I"],
    g: Float[Tensor, "K O I"],
    *,
    beta1: int | float,
    beta2: int | float,
    eps: int | float,
    correction1: Float[Tensor, "K"],
    correction2: Float[Tensor, "K"],
    all_finite: AllFinite = None,
    out: Float[Tensor, "K O I"] | None = None,
) -> Float[Tensor, "K O I"]:
    """Adam's step ``(m/c₁) / (√v/√c₂ + ε)``; otherwise as `rotated_adam_`.

    >>> m, v, c = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), torch.tensor([0.5])
    >>> adam_(m, v, torch.ones(1, 1, 1), beta1=0.5, beta2=0.5, eps=1.0, correction1=c, correction2=c)
    tensor([[[0.5000]]])
    """
    return _adam(m, v, g, out, 1.0, (beta1, beta2, eps, correction1, correction2, False, None, all_finite))


@torch.no_grad()
def adam_norms_(
    m: Float[Tensor, "K M I"],
    v: Float[Tensor, "K V I"],
    g: Float[Tensor, "K O I"] | Scaled,
    *,
    beta1: int | float,
    beta2: int | float,
    eps: int | float,
    correction1: Float[Tensor, "K"],
    correction2: Float[Tensor, "K"],
    all_finite: AllFinite = None,
    apart: int = 1,
) -> tuple[Float[Tensor, "K"], Float[Tensor, "K"]]:
    """The norm of `adam_`'s step, which is not written, and the largest magnitude of m; both moments are moved. m may
    be of half precision.

    v has only rows 0, `apart`, 2·`apart`, … (of padding none, where it has fewer), by which the norm of all is measured
    (`of_all_rows`); m has all rows, or the same. In a step that is left out the norm is zero, and the largest magnitude
    may be.

    >>> m, v, c = torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), torch.tensor([0.5])
    >>> adam_norms_(m, v, torch.ones(1, 1, 2), beta1=0.5, beta2=0.5, eps=1.0, correction1=c, correction2=c)
    (tensor([0.7071]), tensor([0.5000]))
    """
    g, scales = parts(g)
    for name, X in (("m", m), ("v", v), ("g", g)):
        check_whole(X, name)
    if not (len(range(0, g.shape[1], apart)) >= v.shape[1] and m.shape[1] in (g.shape[1], v.shape[1])):
        raise InputError(
            describe(
                f"m and v of {m.shape[1]} and {v.shape[1]} rows, for every row of {g.shape[1]} in {apart}",
                "v of those rows, and m of those or of all",
                "begin the moments anew",
            )
        )
    if not m.numel():
        return torch.zeros(len(v), dtype=v.dtype, device=v.device), torch.zeros(len(v), dtype=v.dtype, device=v.device)
    numbers = (beta1, beta2, eps, correction1, correction2, all_finite, apart)
    way = implementation_for(v, others=(m, g)) if g[0].numel() <= triton_elementwise.MOST_ENTRIES else elementwise_torch
    return way.adam_norms_(m, v, g, scales, *numbers)


def _adam(
    M: Tensor, V: Tensor, G: Tensor | Scaled, out: Tensor | None, factor: int | float, numbers: tuple[Any, ...]
) -> Tensor:
    G, scales = parts(G)
    step = torch.empty(V.shape, dtype=V.dtype, device=V.device) if out is None else out
    for name, X in (("M", M), ("V", V), ("the gradient", G), ("out", step)):
        check_whole(X, name)
    if M.numel():
        implementation_for(V, others=(M, G, step)).adam_(M, V, G, scales, step, factor, *numbers)
    return step


@torch.no_grad()
def momentum_update_(
    M: Float[Tensor, "K O I"],
    G: Float[Tensor, "K O I"],
    mu: int | float,
    nesterov: bool = True,
    all_finite: AllFinite = None,
) -> tuple[Float[Tensor, "K O I"], Float[Tensor, "K"]]:
    """Muon's ``M ← mu·M + (1 − mu) G``, what is orthogonalized, and its squared norms.

    That is M, or with `nesterov` ``mu·M + (1 − mu) G`` once more, in a tensor of its own. It is not rounded before its
    norm is known. The squares are added in an order that does not change. In a step that is left out both are zero.

    >>> M = torch.zeros(1, 1, 2)
    >>> update, squares = momentum_update_(M, torch.tensor([[[2.0, 4.0]]]), 0.5, nesterov=False)
    >>> M.tolist(), update.tolist(), squares
    ([[[1.0, 2.0]]], [[[1.0, 2.0]]], tensor([5.]))
    """
    check_whole(M, "M")
    check_whole(G, "G")
    return implementation_for(M, others=(G,)).momentum_update_(M, G, mu, nesterov, all_finite)


@torch.no_grad()
def dot(X: Float[Tensor, "K *n"] | Scaled, Y: Float[Tensor, "K *n"]) -> Float[Tensor, ""]:
    """``⟨X, Y⟩`` in float32, added in an order that does not change; the types may differ.

    >>> dot(torch.ones(2, 3), torch.full((2, 3), 2.0))
    tensor(12.)
    """
    X, scales = parts(X)
    check_whole(X, "X")
    check_whole(Y, "Y")
    dtype = torch.promote_types(torch.promote_types(X.dtype, Y.dtype), torch.float32)
    return (over(X.to(dtype), scales) * Y.to(dtype)).sum()


# --- which way ----------------------------------------------------------------------------------------------


def implementation_for(first: Tensor, *, others: Sequence[Tensor] = (), half: bool = False) -> Any:
    """The kernels, if they run on this device and take all of these; else torch. `first` is float32, or `half`."""
    if not available(first.device) or not first.numel():
        return elementwise_torch
    fits = first[0].numel() <= triton_elementwise.MOST_ENTRIES and len(first) <= triton_elementwise.MOST_GROUPS
    fits &= first.dtype in TAKEN if half else first.dtype == torch.float32
    fits &= all(X.dtype in TAKEN for X in others)
    return triton_elementwise if fits else elementwise_torch
