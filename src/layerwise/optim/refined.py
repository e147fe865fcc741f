"""Inverses that are refined from the last one by products, tested on the device, and solved exactly where they fail."""

import torch
from torch import Tensor

from layerwise.foundations.linalg.half_pairs import multiply
from layerwise.foundations.linalg.inverses import accepted, product_inverse, refined_inverse
from layerwise.optim import stored
from layerwise.optim.roots import mean_eigenvalue
from layerwise.optim.rule import Context, Health, State
from layerwise.optim.solver import Watch


def refine_inverse(state: State, side: str, groups: slice, shift: Tensor, context: Context, health: Health) -> None:
    """``(M + shift I)⁻¹`` of some groups: one Newton step from the last inverse, or by Cholesky where that is due."""
    name, M = f"{side}_root", state[side][groups]
    product = multiply if stored.is_paired(state, name) else torch.matmul
    damped = M + shift.view(-1, 1, 1) * torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    watch = context.memory.setdefault(name, Watch([True] * len(state[side])))
    known = mean_eigenvalue(M) > 0
    if watch.take_exact(context.step, groups) or _young(context):
        X, good = product_inverse(damped, matmul=product)
        good = good & known
        health.count("fallbacks", (known & ~good).sum())
    else:
        X, residual, radius = refined_inverse(damped, stored.value(state, name, groups), matmul=product)
        good = accepted(residual, radius) & known
        health.count("refusals", (known & ~good).sum())
        watch.post(context.step, groups, good | ~known)
    stored.write(state, name, groups, X, good)


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
