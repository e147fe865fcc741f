"""Inverses that are refined from the last one by products, tested on the device, and solved exactly where they fail."""

import torch
from torch import Tensor

from layerwise.foundations.linalg.inverses import accepted, product_inverse, refined_inverse
from layerwise.foundations.linalg.outliers import without_outliers
from layerwise.optim import stored
from layerwise.optim.roots import mean_eigenvalue
from layerwise.optim.rule import Context, State
from layerwise.optim.solver import EASY, FAILED, FINE, REFINED, REFUSED, InverseWatch, Plan
from layerwise.optim.stored import products_of

EXACT_STEPS = 8
"""In the first steps statistics change too much for a refinement."""
FINE_RESIDUAL = 3e-3
"""Of the estimate of a direction's error, which may be three times as large."""
CONVERGING = 0.7
"""Of the spectral radius of ``I − X M``: below it X is better than what it came from, and a next step will do."""
EASY_TYPICAL, EASY_GROWN = 0.03, 0.4
"""Of what a refinement began with: one step squares both, and what is typical shows in every direction."""
FIRST_TURNS = 2
"""Easy ones, before an inverse that is new is refined by one step alone."""
MORE_ROUNDS = 2
"""Newton's steps, after grown directions were taken in, where one step alone did not suffice, or would not."""


def refine_inverse(state: State, side: str, groups: slice, shift: Tensor, context: Context, plan: Plan) -> None:
    """``(M + shift I)⁻¹`` of some groups: from the last inverse by Newton's steps, or by Cholesky where that is due."""
    name, M = f"{side}_root", state[side][groups]
    products, mean = products_of(state, name), mean_eigenvalue(M)
    damped, own = M.clone(), own_size(side, context, M)
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(shift.unsqueeze(-1))
    diagonal[:, own:] = mean.unsqueeze(-1)  # padding: any number > 0
    known = mean > 0
    if name in plan.exact:
        X, good = product_inverse(damped, products=products)
        verdict = torch.where(good, FINE, FAILED)
    else:
        M_ = products.prepared(damped, definite=True)
        X, rounds, easy = stored.operand(state, name, groups), 1, known
        if name in plan.more:
            X, drift = without_outliers(M_, X, products=products)
            rounds, easy = MORE_ROUNDS, (drift.typical <= EASY_TYPICAL) & (drift.grown <= EASY_GROWN)
        X, residual, radius = refined_inverse(M_, X, steps=rounds, products=products)
        good = radius < CONVERGING
        fine = accepted(residual, radius) & (residual <= FINE_RESIDUAL)
        verdict = torch.where(fine, torch.where(easy, EASY, FINE), torch.where(good, REFINED, REFUSED))
    watch_of(state, name, context).verdict[groups] = torch.where(known, verdict, FINE).to(torch.int8)
    stored.write(state, name, groups, X, good & known)


def watch_of(state: State, name: str, context: Context) -> InverseWatch:
    """The watch over an inverse."""
    if name not in context.memory:
        context.memory[name] = InverseWatch.over(len(state[name]), state[name].device, FIRST_TURNS)
    return context.memory[name]


def own_size(side: str, context: Context, M: Tensor) -> int:
    """Rows of a factor without padding."""
    if context.shape is None:
        return M.shape[-1]
    return context.shape.own_outputs if side == "P" else context.shape.own_inputs
