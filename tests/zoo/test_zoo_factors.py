"""Kronecker factors of the zoo's linear layers by their formula, from hooks of the tests' own."""

from typing import Any

import pytest
import torch
from factors import joined, moments_of
from oracle import Truth
from torch import Tensor
from verdicts import gap
from zoo_entries import Entry, entries
from zoo_truth import Arranged, truth_of

import layerwise as lw

EXACT = 1e-6


def in_order(block: Tensor, spec: Any) -> Tensor:
    """A layer's block by its rows of weight and bias, in place of all weights before all biases."""
    parts = spec.form.parts
    pieces = torch.arange(len(block)).split([part.numel() for part in parts])
    numbered = {part.name: piece.reshape(part.shape) for part, piece in zip(parts, pieces, strict=True)}
    order = spec.form.join(numbered).flatten()
    return block[order.unsqueeze(1), order]


@pytest.mark.parametrize("entry", entries())
def test_kronecker_factors(entry: Entry):
    """G ⊗ A of every linear layer that is called once, and the traces that K-FAC and EKFAC must have.

    All positions count here: where some do not, layers differ in whether their rows know.
    """
    truth, model = truth_of(entry), entry.model()
    generator = torch.Generator().manual_seed(1)
    C = truth.batches[0].z.shape[-1]
    batches = [batch.all_counted(C, generator) for batch in entry.batches()]
    counted = [Truth(t.z, t.J, b.y, t.likelihood, t.options) for t, b in zip(truth.batches, batches, strict=True)]
    of_double = Arranged(truth.model)
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
