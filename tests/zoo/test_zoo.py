"""Models that people have, in float32, against plain autograd in float64: at most 1e-6 apart, relatively.

Every call gets batches of different sizes and lengths. `make test-zoo` runs all models, `make test` a few.
"""

from functools import lru_cache
from typing import Any

import pytest
import torch
from factors import joined, moments_of
from oracle import Truth
from torch import Tensor, nn
from verdicts import gap
from zoo_entries import ENTRIES, Entry, entries
from zoo_truth import Arranged, ZooTruth

import layerwise as lw

EXACT = 1e-6


@lru_cache(maxsize=None)
def truth_of(name: str) -> ZooTruth:
    """Made once for all tests of a model."""
    return ZooTruth(next(e for e in ENTRIES if e.name == name))


def draws(size: int, columns: int = 2) -> Tensor:
    return torch.randn(size, columns, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def blocks_alone(expected: Tensor, M: lw.ParamMatrix, parameters: dict[str, slice]) -> Tensor:
    """Of a matrix on parameter space, what is inside the layers of `M`."""
    kept = torch.zeros_like(expected)
    for spec in M.table.layers:  # type: ignore[attr-defined]
        own = torch.cat([torch.arange(len(expected))[parameters[name]] for name in spec.parameters])
        kept[own.unsqueeze(1), own] = expected[own.unsqueeze(1), own]
    return kept


def in_order(block: Tensor, spec: Any) -> Tensor:
    """A layer's block by its rows of weight and bias, in place of all weights before all biases."""
    parts = spec.form.parts
    pieces = torch.arange(len(block)).split([part.numel() for part in parts])
    numbered = {part.name: piece.reshape(part.shape) for part, piece in zip(parts, pieces, strict=True)}
    order = spec.form.join(numbered).flatten()
    return block[order.unsqueeze(1), order]


@pytest.mark.parametrize("entry", entries())
def test_fisher(entry: Entry):
    truth, model = truth_of(entry.name), entry.model()
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
    assert {k: g for k, g in found.items() if g > EXACT} == {}
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


@pytest.mark.parametrize("entry", entries(quick_ones=False))
def test_ggn_and_moments(entry: Entry):
    truth, model = truth_of(entry.name), entry.model()
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
    assert {k: g for k, g in found.items() if g > EXACT} == {}


@pytest.mark.parametrize("entry", entries())
def test_jacobian_and_kernel(entry: Entry):
    """Each batch after the other and the first one again: nothing may be left of a batch of other sizes."""
    truth, model = truth_of(entry.name), entry.model()
    found = {}
    for turn, number in enumerate((0, 1, 0)):
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
    assert {k: g for k, g in found.items() if g > EXACT} == {}


@pytest.mark.parametrize("entry", entries(quick_ones=False))
def test_kronecker_factors(entry: Entry):
    """G ⊗ A of every linear layer that is called once, and the traces that K-FAC and EKFAC must have.

    All positions count here: where some do not, layers differ in whether their rows know.
    """
    truth, model = truth_of(entry.name), entry.model()
    generator = torch.Generator().manual_seed(1)
    C = truth.batches[0].z.shape[-1]
    batches = [batch.all_counted(C, generator) for batch in entry.batches()]
    counted = [Truth(t.z, t.J, b.y, t.likelihood, t.options) for t, b in zip(truth.batches, batches, strict=True)]
    of_double: nn.Module = Arranged(truth.model)
    parts = [moments_of(of_double, Arranged.batch(b), t, "exact") for b, t in zip(batches, counted, strict=True)]
    plain = {name.removeprefix("model."): factors for name, factors in joined(parts).items()}
    data = [batch.given() for batch in batches]
    M = lw.fisher(model, data, entry.likelihood, "kfac", "exact", **entry.options)
    E = lw.fisher(model, data, entry.likelihood, "ekfac", "exact", **entry.options)
    F = sum(t.fisher_sum("exact") for t in counted) / sum(b.n for b in batches)  # type: ignore[operator]
    found = {"trace of EKFAC": gap(E.trace(), F.trace())}  # type: ignore[union-attr]
    for spec in M.table.layers:  # type: ignore[attr-defined]
        if spec.name in plain and spec.structure("kfac") == "kfac":
            A, G, _ = plain[spec.name]
            found[spec.name] = gap(in_order(M.layer(spec.name).to_dense(), spec), torch.kron(G, A))
    assert {k: g for k, g in found.items() if g > EXACT} == {}
