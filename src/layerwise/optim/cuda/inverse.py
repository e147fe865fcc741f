"""Inverses that are refined from the last one by products, tested on the device, and solved exactly where they fail.

| rounds | | products of whole matrices |
|---|---|---|
| 1 | one step of Newton's: what was far by T is far by T² | one precise, one rough |
| 2 | a series: by T³ | one precise, two rough |
| 3 | directions that grew are taken in (`outliers`), then two steps of Newton's | two precise, two rough |

Sampled labels replace a share w of a factor by an estimate of it from one batch: T is then about ``w √(n/rows)``. In
the first turns, with w from a tenth to a half, that is too much for one step, and little enough for a series. Factors
of gradients that few rows dominate (of queries, keys and values: early tokens hear from all later ones) also grow by
more than Newton's iteration can bear, in some directions for each sequence.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerwise.optim.cuda import factor as symmetric
from layerwise.optim.cuda import storage as stored
from layerwise.optim.cuda.linalg.newton_inverse import (
    RESIDUAL_LIMIT,
    accepted,
    product_inverse,
    refined_inverse,
    series_inverse,
)
from layerwise.optim.cuda.linalg.outliers import without_outliers
from layerwise.optim.cuda.linalg.products import Products
from layerwise.optim.cuda.monitor import FAILED, MOST_ROUNDS, REFUSED, SOLVED, WANTING, InverseWatch, Plan
from layerwise.optim.cuda.storage import products_of
from layerwise.optim.roots import mean_eigenvalue
from layerwise.optim.rule import Context, State

EXACT_BATCHES = 8
"""While statistics are of so few, a new batch changes them too much for a refinement."""
FINE_RESIDUAL = 3e-3
"""Of the estimate of a direction's error, which may be three times as large."""
CONVERGING = 0.7
"""Of the spectral radius of ``I − X M``: below it X is better than what it came from, and a next step will do."""
EASY_TYPICAL, EASY_GROWN = 0.05, 0.4
"""Of what a refinement began with: one step squares both, and what is typical shows in every direction. Measured, the
residual after a step is 0.6 times the square of what was typical, 1.5e-3 here."""
SERIES_ORDER = 3
SERIES_TYPICAL, SERIES_GROWN = 0.12, 0.5
"""The same for the series, which leaves about the cube of both."""
FIRST_TURNS = 2
"""With all rounds, before an inverse that is new is refined in as few as it needs."""
NEWTON_STEPS = 2
"""After directions that grew were taken in."""
ROUNDED = 0.5
"""Of the radius: what a step or a series leaves is less. A larger residual is the rounding of X, which is kept in 22
bits."""


def refine_inverse(state: State, side: str, groups: slice, shift: Tensor, context: Context, plan: Plan) -> None:
    """``(M + shift I)⁻¹`` of some groups: from the last inverse by products, or by Cholesky where that is due."""
    name, M = f"{side}_root", state[side][groups]
    products, mean = products_of(state, name), mean_eigenvalue(M)
    damped, known = (shift, own_size(side, context, M), mean), mean > 0  # in padding: any number > 0
    if name in plan.exact:
        X, good = product_inverse(symmetric.damped(M, *damped), products=products)
        verdict = torch.where(good, SOLVED, FAILED)
    else:
        rounds, M_ = plan.rounds(name), products.prepared(symmetric.damped_operand(M, *damped), definite=True)
        found = _refined(M_, stored.operand(state, name, groups), rounds, products)
        X, good, verdict = found.X, found.radius < CONVERGING, _verdict(found, rounds)
    watch_of(state, name, context).verdict[groups] = torch.where(known, verdict, SOLVED).to(torch.int8)
    stored.write(state, name, groups, X, good & known)


class Refined(NamedTuple):
    """An inverse, the numbers of `inverse_errors`, and how many rounds its guess was worth."""

    X: Tensor
    residual: Tensor
    radius: Tensor
    needed: Tensor | int


def _refined(M: Any, guess: Any, rounds: int, products: Products) -> Refined:
    if rounds == 1:
        return Refined(*refined_inverse(M, guess, products=products), 1)
    if rounds == 2:
        X, residual, radius, typical = series_inverse(M, guess, SERIES_ORDER, products)
        easy = (typical <= EASY_TYPICAL) & (radius <= EASY_GROWN**SERIES_ORDER)
        return Refined(X, residual, radius, torch.where(easy, 1, 2))
    X, drift = without_outliers(M, guess, products=products)
    easy = (drift.typical <= EASY_TYPICAL) & (drift.grown <= EASY_GROWN)
    series = (drift.typical <= SERIES_TYPICAL) & (drift.grown <= SERIES_GROWN)
    needed = torch.where(easy, 1, torch.where(series, 2, 3))
    return Refined(*refined_inverse(M, X, steps=NEWTON_STEPS, products=products), needed)


def _verdict(found: Refined, rounds: int) -> Tensor:
    """Rounds that would have done or will, where it converges; see `solver`.

    Where rounding is all that is left, more rounds, or Cholesky, would leave it too: it is counted, and no more. But a
    factor that has grown or shrunk as a whole leaves as much; only all rounds, which take the scale out, tell the two.
    """
    fine = accepted(found.residual, found.radius) & (found.residual <= FINE_RESIDUAL)
    rounded = accepted(0 * found.radius, found.radius) & (found.residual >= ROUNDED * found.radius)
    within = rounded & (found.residual <= RESIDUAL_LIMIT)
    enough = fine | (rounded if rounds == MOST_ROUNDS else within)
    wanting, needed = ~fine & ~within, torch.where(enough, found.needed, min(rounds + 1, MOST_ROUNDS))
    return torch.where(found.radius < CONVERGING, needed + wanting * WANTING, REFUSED)


def watch_of(state: State, name: str, context: Context) -> InverseWatch:
    """The watch over an inverse."""
    if name not in context.memory:
        context.memory[name] = InverseWatch.over(len(state[name]), state[name].device, FIRST_TURNS)
    return context.memory[name]


def own_size(side: str, context: Context, M: Tensor) -> int:
    """Rows of a factor without padding."""
    if context.shape is None:
        return symmetric.size(M)
    return context.shape.own_outputs if side == "P" else context.shape.own_inputs
