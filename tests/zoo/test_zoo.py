"""Models that people have, in float32, against plain autograd in float64: at most 1e-6 apart, relatively.

Every call gets batches of different sizes and lengths. `make test-zoo` runs all models, `make test` a few.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from verdicts import gap
from zoo_entries import Entry, entries
from zoo_truth import truth_of

import layerwise as lw

EXACT = 1e-6
TWO_PASSES = 2e-6
"""Of products with a matrix that is never formed, J and then its transpose in float32: CLIP's text model is 1.1e-6 off
with MKL on a Xeon, and less than 1e-6 on ARM."""


def too_far(found: dict[Any, float]) -> dict[Any, float]:
    """What is not exact."""
    return {k: g for k, g in found.items() if g > (TWO_PASSES if "implicit" in str(k) else EXACT)}


def draws(size: int, columns: int = 6) -> Tensor:
    """Random vectors that float32 has exactly; several, since one may be nearly orthogonal to a matrix of low rank."""
    return torch.randn(size, columns, generator=torch.Generator().manual_seed(5)).double()


def blocks_alone(expected: Tensor, M: lw.ParamMatrix, parameters: dict[str, slice]) -> Tensor:
    """Of a matrix on parameter space, what is inside the layers of `M`."""
    kept = torch.zeros_like(expected)
    for spec in M.table.layers:  # type: ignore[attr-defined]
        own = torch.cat([torch.arange(len(expected))[parameters[name]] for name in spec.parameters])
        kept[own.unsqueeze(1), own] = expected[own.unsqueeze(1), own]
    return kept


@pytest.mark.parametrize("entry", entries(quick=True))
def test_a_few_answers(entry: Entry, untyped: None):
    """What `make test` has of this."""
    truth, model = truth_of(entry), entry.model()
    F, J = truth.fisher("exact"), truth.batches[1].flat()
    v = draws(len(F))
    M = lw.fisher(model, [b.given() for b in entry.batches()], entry.likelihood, "lowrank", "exact", **entry.options)
    assert gap(M @ v.float(), F @ v) < EXACT
    assert gap(lw.ntk(model, entry.batches()[1].x).matrix(), J @ J.T) < EXACT


@pytest.mark.parametrize("entry", entries())
def test_fisher(entry: Entry):
    truth, model = truth_of(entry), entry.model()
    data = [batch.given() for batch in entry.batches()]
    before = {k: t.clone() for k, t in model.state_dict().items()}
    found = {}
    for estimator in ("exact", "empirical"):
        F = truth.fisher(estimator)
        v = draws(len(F))
        for structure in ("implicit", "lowrank", "dense", "block", "diag"):
            M = lw.fisher(model, data, entry.likelihood, structure, estimator, **entry.options)
            expected = F
            if structure == "diag":
                expected = F.diag().diag()
            elif structure == "block":
                expected = blocks_alone(F, M, truth.slices)
            found[estimator, structure, "F @ v"] = gap(M @ v.float(), expected @ v)
            if structure not in ("implicit", "lowrank"):
                found[estimator, structure, "whole"] = gap(M.to_dense(), expected)
            if structure != "implicit":
                found[estimator, structure, "trace"] = gap(M.trace(), expected.trace())
    assert too_far(found) == {}
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


@pytest.mark.parametrize("entry", entries())
def test_ggn_and_moments(entry: Entry):
    truth, model = truth_of(entry), entry.model()
    data = [batch.given() for batch in entry.batches()]
    F, g = truth.fisher("exact"), torch.cat([t.gradients() for t in truth.batches])
    C = g.T @ g / len(g)
    v = draws(len(F))
    G = lw.ggn(model, data, entry.likelihood, "implicit", **entry.options)
    found = {"ggn": gap(G @ v.float(), F @ v)}
    for centered in (False, True):
        expected = C - torch.outer(g.mean(0), g.mean(0)) * centered
        for structure in ("implicit", "lowrank", "dense"):
            M = lw.gradient_moment(
                model, data, structure=structure, centered=centered, likelihood=entry.likelihood, **entry.options
            )
            found[f"moment {structure} {centered}"] = gap(M @ v.float(), expected @ v)
    assert too_far(found) == {}


@pytest.mark.parametrize("entry", entries())
def test_jacobian_and_kernel(entry: Entry):
    """Each batch after the other and the first one again: nothing may be left of a batch of other sizes."""
    truth, model = truth_of(entry), entry.model()
    found = {}
    for turn, number in enumerate((*range(len(entry.sizes)), 0)):
        x, expected = entry.batches()[number].x, truth.batches[number].flat()
        J = lw.jacobian(model, x)
        v, u = draws(expected.shape[1]), draws(len(expected))
        found[turn, "J @ v"] = gap(J @ v.float(), expected @ v)
        found[turn, "J.T @ u"] = gap(J.T @ u.float(), expected.T @ u)
        found[turn, "J"] = gap(J.to_dense(), expected)
        K = lw.ntk(model, x)
        found[turn, "K @ u"] = gap(K @ u.float(), expected @ (expected.T @ u))
        found[turn, "K"] = gap(K.matrix(), expected @ expected.T)
    first, second = (t.flat() for t in truth.batches[:2])
    if truth.batches[0].z.shape[1:] == truth.batches[1].z.shape[1:]:
        one, two = (batch.x for batch in entry.batches()[:2])
        found["K of two batches"] = gap(lw.ntk(model, one, two).matrix(), first @ second.T)
    assert too_far(found) == {}
