"""Inverses that are refined from the last one by products, tested on the device, and solved exactly where they fail."""

import torch
from torch import Tensor

from layerwise.foundations.linalg.inverses import accepted, product_inverse, refined_inverse
from layerwise.foundations.linalg.outliers import without_outliers
from layerwise.optim import stored
from layerwise.optim.roots import mean_eigenvalue
from layerwise.optim.rule import Context, Health, State
from layerwise.optim.solver import EXACT, FINE, REFINE, Watch
from layerwise.optim.stored import products_of

EXACT_STEPS = 8
"""At first, and at the doublings of the first steps, statistics change too much for a refinement."""
CONVERGING = 0.7
"""Of the spectral radius of ``I − X M``: below it X is better than what it came from, and a next step will do."""
YOUNG_STATISTICS, YOUNG_REFINEMENTS = 20, 2
"""While a new batch weighs more than its steady share, Newton takes two steps."""


def refine_inverse(state: State, side: str, groups: slice, shift: Tensor, context: Context, health: Health) -> None:
    """``(M + shift I)⁻¹`` of some groups: from the last inverse by Newton's steps, or by Cholesky where that is due."""
    name, M = f"{side}_root", state[side][groups]
    products, mean = products_of(state, name), mean_eigenvalue(M)
    damped = M + shift.view(-1, 1, 1) * torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    damped.diagonal(dim1=-2, dim2=-1)[:, own_size(side, context, M) :] = mean.unsqueeze(-1)  # padding: any number > 0
    watch = context.memory.setdefault(name, Watch.of(len(state[side])))
    known = mean > 0
    if watch.take_exact(context.step, groups) or context.step <= EXACT_STEPS:
        X, good = product_inverse(damped, products=products)
        health.count("fallbacks", (known & ~good).sum())
    else:
        M_ = products.prepared(damped, definite=True)
        X = without_outliers(M_, stored.operand(state, name, groups), products=products)
        steps = YOUNG_REFINEMENTS if context.statistics < YOUNG_STATISTICS else 1
        X, residual, radius = refined_inverse(M_, X, steps=steps, products=products)
        fine, good = accepted(residual, radius), radius < CONVERGING
        health.count("refusals", (known & ~fine).sum())
        need = torch.where(good, REFINE, EXACT)
        watch.post(context.step, groups, torch.where(fine | ~known, FINE, need).to(torch.int8))
    stored.write(state, name, groups, X, good & known)


def own_size(side: str, context: Context, M: Tensor) -> int:
    """Rows of a factor without padding."""
    if context.shape is None:
        return M.shape[-1]
    return context.shape.own_outputs if side == "P" else context.shape.own_inputs


def overdue(context: Context) -> set[int]:
    """Groups of which an inverse was refused."""
    found: set[int] = set()
    for watch in context.memory.values():
        if isinstance(watch, Watch):
            watch.hear(context.step)
            found |= {place for place, need in enumerate(watch.needs) if need != FINE}
    return found
