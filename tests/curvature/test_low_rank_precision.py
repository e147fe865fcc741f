"""Low-rank matrices of float32 rows keep the small eigenvalues that the rows carry."""

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.curvature.low_rank import LowRank

NULL = 9
"""The parameters of the softmax's sum: three columns of the head and its biases sum to nothing in each example."""


def _both(examples: int) -> tuple[LowRank, lw.ParamMatrix]:
    """The float32 rows, and the dense matrix of the same model in float64; inputs of very different sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(examples, 6) * torch.logspace(0, -2.5, 6), torch.randint(3, (examples,))
    rows = lw.fisher(model, (x, y), structure="lowrank", estimator="empirical")
    assert isinstance(rows, LowRank)
    dense = lw.fisher(model.double(), (x.double(), y), structure="dense", estimator="empirical")
    return rows, dense


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def _agree(rows: LowRank, dense: lw.ParamMatrix, rank: int) -> None:
    d = dense.numel()
    expected = dense.eigenvalues()
    found = rows.eigenvalues()
    assert found.dtype == torch.float32
    assert int((found > 0).sum()) == rank
    real = slice(d - rank, None)
    assert float((found[real].double() / expected[real] - 1).abs().max()) < 1e-3
    values, vectors = rows.eigh()
    assert torch.allclose(values, found, rtol=1e-4, atol=0)
    assert _error(vectors.mT @ vectors, torch.eye(d)) < 1e-5
    g = torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).float().double()
    for damping in (1e-2, 1e-4, 1e-6):
        assert _error(rows.solve(g.float(), damping), dense.solve(g, damping)) < 1e-5
        assert _error(rows.power(g.float(), -0.5, damping), dense.power(g, -0.5, damping)) < 1e-5
        assert abs(float(rows.logdet(damping)) / float(dense.logdet(damping)) - 1) < 1e-5
    assert _error(rows.to_dense(), dense.to_dense()) < 1e-6
    assert abs(float(rows.frobenius()) / float(dense.frobenius()) - 1) < 1e-6


def test_many_rows():
    rows, dense = _both(4000)
    _agree(rows, dense, dense.numel() - NULL)


@pytest.mark.slow
def test_a_hundred_thousand_rows():
    rows, dense = _both(100_000)
    _agree(rows, dense, dense.numel() - NULL)


def test_fewer_rows_than_parameters():
    rows, dense = _both(40)
    _agree(rows, dense, 40)


def test_a_matrix_of_full_rank_is_solved_without_damping():
    """And with little: what lies outside of the range is nothing, however large ``1/λ``."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -4, 12)
    R = torch.randn(3000, 12, generator=generator) * scales / 3000**0.5
    M, wide = LowRank(R, {"w": (12,)}), R.double()
    g = torch.randn(12, generator=generator)
    for damping in (0.0, 1e-20, 1e-12):
        expected = torch.linalg.solve(wide.mT @ wide + damping * torch.eye(12).double(), g.double())
        assert _error(M.solve(g, damping), expected) < 1e-6


@pytest.mark.parametrize("shape", [(30, 500), (500, 30)])
def test_rows_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]):
    R = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    g = torch.randn(shape[1], generator=torch.Generator().manual_seed(1))
    whole = LowRank(R, {"w": (shape[1],)}).solve(g, 1e-2)
    monkeypatch.setattr("layerwise.curvature.low_rank.PART", 100)
    assert _error(LowRank(R, {"w": (shape[1],)}).solve(g, 1e-2), whole.double()) < 1e-6


def test_a_matrix_of_zeros():
    M = LowRank(torch.zeros(5, 3), {"w": (3,)})
    assert M.eigenvalues().tolist() == [0, 0, 0]
    assert M.solve(torch.ones(3), 0.5).tolist() == [2, 2, 2]
