"""The passes of `elementwise` in plain torch: what the kernels are checked against, and what runs without them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from layerwise.optim.step.seen_rows import of_all_rows

AllFinite = Tensor | None


def chosen(all_finite: AllFinite, new: Tensor, old: Tensor | int | float) -> Tensor:
    """The new values, or the old in a step that is left out."""
    return new if all_finite is None else torch.where(all_finite, new, old)


def per_group(numbers: Tensor, X: Tensor) -> Tensor:
    """One number for each group, shaped to multiply X."""
    return numbers.view(-1, *[1] * (X.ndim - 1))


def ema_(mean: Tensor, new: Tensor, weight: Tensor, divisor: Tensor | int | float) -> None:
    """`elementwise.ema_`, with mean and new as stacks of matrices."""
    former = widened(mean)
    x = torch.zeros_like(former)
    divisor = per_group(divisor, new) if isinstance(divisor, Tensor) else divisor
    x[:, : new.shape[1], : new.shape[2]] = new.to(former.dtype) / divisor
    w = per_group(weight, mean)
    moved = torch.where(w == 1, x, former + w * (x - former))
    mean.copy_(cut(torch.where(w == 0, former, moved), mean.dtype))


def adam_(
    M: Tensor,
    V: Tensor,
    G: Tensor,
    scales: Sequence[Tensor],
    step: Tensor,
    factor: int | float,
    beta1: int | float,
    beta2: int | float,
    eps: int | float,
    correction1: Tensor,
    correction2: Tensor,
    rotated: bool,
    floor: Tensor | None,
    all_finite: AllFinite,
) -> None:
    """`elementwise.adam_` and `elementwise.rotated_adam_`."""
    G, m = over(G.to(V.dtype), scales), M.to(V.dtype)
    m = chosen(all_finite, m.lerp(G, 1 - beta1), m)
    M.copy_(m)
    V.copy_(chosen(all_finite, beta2 * V + (1 - beta2) * G * G, V))
    c1, c2 = per_group(correction1, m), per_group(correction2, m)
    d = m / (V.sqrt() + eps) * (c2.sqrt() / c1) if rotated else m / c1 / (V.sqrt() / c2.sqrt() + eps)
    d = d if floor is None else d * above(V, floor)
    step.copy_(cut(chosen(all_finite, d if factor == 1 else d * factor, 0.0), step.dtype))


def adam_norms_(
    M: Tensor,
    V: Tensor,
    G: Tensor,
    scales: Sequence[Tensor],
    beta1: int | float,
    beta2: int | float,
    eps: int | float,
    correction1: Tensor,
    correction2: Tensor,
    all_finite: AllFinite,
    apart: int,
) -> tuple[Tensor, Tensor]:
    """`elementwise.adam_norms_`."""
    part, step, G = M, torch.empty_like(V), over(G.to(V.dtype), scales)
    seen = G[:, ::apart][:, : V.shape[1]]
    if M.shape != V.shape:  # m is of all rows
        part = M[:, ::apart][:, : V.shape[1]].clone()
        M.copy_(chosen(all_finite, M.to(V.dtype).lerp(G, 1 - beta1), M.to(V.dtype)))
    adam_(part, V, seen, (), step, 1.0, beta1, beta2, eps, correction1, correction2, False, None, all_finite)
    found = torch.linalg.vector_norm(step.flatten(1), dim=1)
    if apart > 1:
        found = chosen(all_finite, of_all_rows(found, G, apart, V.shape[1]), 0.0)
    return found, M.abs().flatten(1).amax(1).to(V.dtype)


def above(V: Tensor, floor: Tensor) -> Tensor:
    """``max(0, 1 − floor/V)``: how far each entry lies above its group's floor; 0 where both are."""
    floor = per_group(floor.clamp_min(torch.finfo(V.dtype).tiny), V)  # nothing over nothing is none of it
    return (floor / V).neg_().add_(1.0).clamp_min_(0.0)


def momentum_update_(
    M: Tensor, G: Tensor, mu: int | float, nesterov: bool, all_finite: AllFinite
) -> tuple[Tensor, Tensor]:
    """`elementwise.momentum_update_`."""
    G = G.to(M.dtype)
    M.copy_(chosen(all_finite, M.lerp(G, 1 - mu), M))
    update = chosen(all_finite, G.lerp(M, mu) if nesterov else M, 0.0)
    return update.clone() if update is M else update, update.square().flatten(1).sum(1)


def corrections_(
    steps: Tensor,
    correction1: Tensor,
    correction2: Tensor,
    beta1: int | float,
    beta2: int | float,
    all_finite: AllFinite,
) -> None:
    """`elementwise.corrections_`."""
    steps.copy_(chosen(all_finite, steps + 1, steps))
    t = steps.double().clamp_min(1)
    for correction, beta in ((correction1, beta1), (correction2, beta2)):
        correction.copy_(1 - beta**t)


def over(X: Tensor, scales: Sequence[Tensor]) -> Tensor:
    """X over the product of each group's scales, which are powers of two."""
    return X * per_group(reciprocal(scales), X) if scales else X


def reciprocal(scales: Sequence[Tensor]) -> Tensor:
    """Of their product, exactly; that of reciprocals may be subnormal where the product would be infinite."""
    by = scales[0].reciprocal()
    for scale in scales[1:]:
        by = by * scale.reciprocal()
    return by


def cut(X: Tensor, dtype: torch.dtype) -> Tensor:
    """What is too large for a half is cut off, where that is the type; NaN and infinity stay."""
    if dtype.itemsize > 2:
        return X
    most = torch.finfo(dtype).max
    return torch.where(torch.isfinite(X), X.clamp(-most, most), X)


def widened(X: Tensor) -> Tensor:
    """As it is computed with: a half in float32."""
    return X.to(torch.promote_types(X.dtype, torch.float32))


def largest_of(X: Tensor, largest: Tensor | None) -> None:
    """The largest magnitude of each matrix, where it is asked for; NaN stays visible."""
    if largest is not None:
        largest.copy_(torch.linalg.vector_norm(X.float(), float("inf"), dim=(-2, -1)))


def squares_ema_(s: Tensor, R: Tensor, scales: Sequence[Tensor], weight: Tensor, factor: int | float) -> None:
    """`eigenbasis_elementwise.squares_ema_`."""
    former = widened(s)
    w, x = per_group(weight, s), factor * over(R.to(former.dtype), scales).square()
    moved = torch.where(w == 1, x, former + w * (x - former))
    s.copy_(cut(torch.where((w != 0) & torch.isfinite(x), moved, former), s.dtype))


def damped(
    s: Tensor, s_P: Tensor | None, s_Q: Tensor | None, left: Tensor | None, right: Tensor | None, constant: Tensor
) -> Tensor:
    """What `eigenbasis_elementwise.damped_quotient` divides by."""
    added = per_group(constant, s)
    if left is not None and right is not None and s_P is not None and s_Q is not None:
        added = s_P.unsqueeze(-1) * per_group(right, s) + per_group(left, s) * s_Q.unsqueeze(-2) + added
    return widened(s) + added.clamp_min(torch.finfo(s.dtype).tiny)


def damped_quotient(
    R: Tensor,
    scales: Sequence[Tensor],
    s: Tensor,
    s_P: Tensor | None,
    s_Q: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    constant: Tensor,
    out: Tensor,
    largest: Tensor | None,
) -> None:
    """`eigenbasis_elementwise.damped_quotient`."""
    R = over(R.to(torch.promote_types(s.dtype, torch.float32)), scales)
    Y = R / damped(s, s_P, s_Q, left, right, constant)
    largest_of(Y, largest)
    out.copy_(cut(Y, out.dtype))


def scaled(
    R: Tensor,
    scales: Sequence[Tensor],
    a: Tensor | None,
    b: Tensor | None,
    out: Tensor,
    largest: Tensor | None,
) -> None:
    """`eigenbasis_elementwise.scaled`."""
    R = over(widened(R), scales)
    Y = R if a is None else R * a.unsqueeze(-1)
    Y = Y if b is None else Y * b.unsqueeze(-2)
    largest_of(Y, largest)
    out.copy_(cut(Y, out.dtype))
