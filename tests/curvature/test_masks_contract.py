"""A masked position is a position that is not there."""

from typing import Any

import pytest
import torch
from references import close
from torch import Tensor, nn

import layerwise as lw
from layerwise.testing import oracles

T, KEPT = 5, 4
STRUCTURES = ("dense", "block", "diag", "quasidiag", "kfac", "ekfac", "lowrank")


def _make(conv: bool = False) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if conv:
        model = nn.Sequential(nn.Conv1d(4, 5, 1), nn.Tanh(), nn.Conv1d(5, 3, 1)).double()
        return model, torch.randn(6, 4, T).double(), torch.randint(3, (6, T))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    return model, torch.randn(6, T, 4).double(), torch.randint(3, (6, T))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("estimator", ["exact", "empirical"])
@pytest.mark.parametrize("way", ["ignore_index", "mask"])
@pytest.mark.usefixtures("untyped")
def test_masked_positions_are_as_if_deleted_contract(way: str, estimator: str, sharing: str):
    model, x, y = _make()
    if way == "mask":
        mask = torch.ones(6, T, dtype=torch.bool)
        mask[:, KEPT:] = False
        masked: tuple = (x, y, mask)
    else:
        masked = (x, y.index_fill(1, torch.arange(KEPT, T), -100))
    for normalize in ("examples", "terms"):
        for structure in STRUCTURES:
            options: Any = {"structure": structure, "estimator": estimator, "sharing": sharing, "normalize": normalize}
            found = lw.fisher(model, masked, **options)
            close(found.to_dense(), lw.fisher(model, (x[:, :KEPT], y[:, :KEPT]), **options).to_dense())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_masked_pixels_of_a_pointwise_convolution_are_as_if_deleted_contract(structure: str):
    model, x, y = _make(conv=True)
    ignored = y.index_fill(1, torch.arange(KEPT, T), -100)
    options: Any = {"structure": structure, "estimator": "exact", "class_axis": 1}
    found = lw.fisher(model, (x, ignored), **options)
    close(found.to_dense(), lw.fisher(model, (x[..., :KEPT], y[:, :KEPT]), **options).to_dense())


RAGGED = torch.tensor(
    [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [1, 0] + [1] * 3]
)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian", "bernoulli"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_ragged_masks_have_factors_of_the_positions_left_oracle(likelihood: str, sharing: str):
    """One linear layer: A over the rows that count, G the sum of their output Hessians over N."""
    torch.manual_seed(0)
    model, mask = nn.Linear(4, 3).double(), RAGGED.bool()
    x = torch.randn(6, T, 4).double()
    f = oracles.outputs(model, x)
    y = torch.randint(3, (6, T)) if likelihood == "categorical" else torch.randint(2, (6, T, 3)).double()
    K: Any = lw.fisher(model, (x, y, mask), likelihood, "kfac", "exact", sharing=sharing)
    a = torch.nn.functional.pad(x, (0, 1), value=1.0)
    p, q = f.softmax(-1), f.sigmoid()
    H = {
        "categorical": torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2),
        "gaussian": torch.diag_embed(torch.ones_like(f)),
        "bernoulli": torch.diag_embed(q * (1 - q)),
    }[likelihood]
    # Output gradients of one position are zero at all others, so that their sum over positions is themselves.
    G = (H * mask[..., None, None]).sum((0, 1)) / 6
    if sharing == "expand":
        A = torch.einsum("nsi,nsj,ns->ij", a, a, mask.double()) / mask.sum()
    else:
        kept = mask.any(1)
        means = (a * mask.unsqueeze(-1)).sum(1)[kept] / mask.sum(1)[kept].unsqueeze(-1)
        A = means.mT @ means / kept.sum()
    operator = next(iter(K.operators.values()))
    close(operator.A.dense()[0], A)
    close(operator.G[0], G)


def test_a_mask_and_an_ignored_label_are_one_contract():
    model, x, y = _make()
    mask = RAGGED.bool()
    for structure in STRUCTURES:
        options: Any = {"structure": structure, "estimator": "exact", "normalize": "terms"}
        by_mask = lw.fisher(model, (x, y, mask), **options)
        by_label = lw.fisher(model, (x, y.masked_fill(~mask, -100)), **options)
        close(by_mask.to_dense(), by_label.to_dense())


def test_the_trace_of_masked_ekfac_is_exact():
    model, x, y = _make()
    E = lw.fisher(model, (x, y, RAGGED.bool()), structure="ekfac", estimator="exact")
    close(E.trace(), oracles.fisher(model, x, y, mask=RAGGED.bool()).trace())
