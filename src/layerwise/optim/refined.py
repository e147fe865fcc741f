"""Inverses that are refined from the last one by products, tested on the device, and solved exactly where they fail.

Where damping has changed from λ to λ′ since the last inverse X, ``X √(λ/λ′)`` is a guess that is as far off in the
directions that damping rules as in the others.
"""

import torch
from torch import Tensor

from layerwise.foundations.linalg.inverses import accepted, product_inverse, refined_inverse
from layerwise.foundations.linalg.outliers import without_outliers
from layerwise.optim import stored
from layerwise.optim.roots import mean_eigenvalue
from layerwise.optim.rule import Context, Health, State
from layerwise.optim.solver import Watch
from layerwise.optim.stored import products_of


def refine_inverse(state: State, side: str, groups: slice, shift: Tensor, context: Context, health: Health) -> None:
    """``(M + shift I)⁻¹`` of some groups: one Newton step from the last inverse, or by Cholesky where that is due."""
    name, M = f"{side}_root", state[side][groups]
    products = products_of(state, name)
    mean = mean_eigenvalue(M)
    damped = M + shift.view(-1, 1, 1) * torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    damped.diagonal(dim1=-2, dim2=-1)[:, own_size(side, context, M) :] = mean.unsqueeze(-1)  # padding: any number > 0
    watch = context.memory.setdefault(name, Watch([True] * len(state[side])))
    shifts = context.memory.setdefault(f"{name}_shifts", torch.ones_like(state[side][:, 0, 0]))
    known = mean > 0
    if watch.take_exact(context.step, groups) or _young(context):
        X, good = product_inverse(damped, products=products)
        good = good & known
        health.count("fallbacks", (known & ~good).sum())
    else:
        X = stored.value(state, name, groups) * (shifts[groups] / shift).sqrt().view(-1, 1, 1)
        X, residual, radius = refined_inverse(damped, without_outliers(damped, X), products=products)
        good = accepted(residual, radius) & known
        health.count("refusals", (known & ~good).sum())
        watch.post(context.step, groups, good | ~known)
    stored.write(state, name, groups, X, good)
    shifts[groups] = torch.where(good, shift, shifts[groups])


def own_size(side: str, context: Context, M: Tensor) -> int:
    """Rows of a factor without padding."""
    if context.shape is None:
        return M.shape[-1]
    return context.shape.own_outputs if side == "P" else context.shape.own_inputs


def _young(context: Context) -> bool:
    """While statistics begin, they change too much for a refinement."""
    return context.step <= YOUNG_STEPS


YOUNG_STEPS = 8


def overdue(context: Context) -> set[int]:
    """One group of each factor whose inverse was refused."""
    found: set[int] = set()
    for watch in context.memory.values():
        if isinstance(watch, Watch):
            watch.hear(context.step)
            found |= set([place for place, exact in enumerate(watch.exact) if exact][:1])
    return found
