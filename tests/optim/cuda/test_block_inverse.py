"""Inverses by products of blocks against float64, and which matrices are said to have none."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interpreter import only_interpreted
from layerwise.optim.cuda.linalg import block_inverse as blocks
from layerwise.optim.cuda.linalg.block_inverse import block_inverse, inverse_factor, leaf_inverse
from layerwise.optim.cuda.triton import products as triton_products
from random_tensors import randn64 as randn

SIZES = [1, 5, 16, 31, 32, 33, 48, 100, 144]
LEAF = 16
"""So that small matrices have several levels."""


def definite(n: int, damping: float = 0.1, K: int = 3) -> Tensor:
    """Spectra from 1 to 1e-4, and a direction a hundred times as large, in float64."""
    U = torch.linalg.qr(randn(K, n, n))[0]
    values = torch.logspace(0, -4, n, dtype=torch.float64)
    values[0] *= 100
    M = (U * values) @ U.mT
    shift = damping * values.mean() * torch.eye(n, dtype=torch.float64)
    return (M + M.mT) / 2 + shift


def error(found: Tensor, M: Tensor) -> float:
    """The largest relative one of a stack, by Frobenius norms."""
    truth = torch.linalg.inv(M.double())
    return float(((found.double() - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)).max())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("large", [1000, 64, 1])
def test_against_float64(n: int, large: int):
    M = definite(n).float()
    X, good = block_inverse(M.clone(), leaf=LEAF, large=large)
    assert good.all()
    assert error(X, M) < 2e-5
    torch.testing.assert_close(X, X.mT, rtol=0, atol=1e-6 * float(X.abs().max()))


@pytest.mark.parametrize("damping", [1e-1, 1e-3, 1e-5])
def test_as_accurate_as_cholesky(damping: float):
    """Whatever the condition: by explicit inverses of blocks errors would grow with its square."""
    M = definite(200, damping).float()
    X, good = block_inverse(M.clone(), large=100)
    assert good.all()
    assert error(X, M) < 4 * error(torch.cholesky_inverse(torch.linalg.cholesky(M)), M) + 1e-6


def test_float64_stays_float64():
    M = definite(100)
    X, good = block_inverse(M.clone(), leaf=LEAF)
    assert (X.dtype, good.tolist()) == (torch.float64, [True] * 3)
    assert error(X, M) < 1e-11


@pytest.mark.parametrize("height", [16, 48, 1024])
def test_strips_of_the_last_product(height: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blocks, "STRIP", height)
    M = definite(144).float()
    assert error(block_inverse(M.clone(), leaf=LEAF, large=1)[0], M) < 2e-5


def test_a_triangular_factor():
    M = definite(70).float()
    good = torch.ones(3, dtype=torch.int8)
    X = inverse_factor(M.clone(), good, leaf=LEAF)
    assert torch.equal(X, X.tril())
    torch.testing.assert_close(X @ M @ X.mT, torch.eye(70).expand(3, 70, 70), rtol=0, atol=1e-4)


def spoilt(n: int) -> tuple[Tensor, list[bool]]:
    """A matrix for each way to have no inverse, and good ones in between."""
    M = definite(n, K=1).float().repeat(9, 1, 1)
    M[1, n - 1, 2] = M[1, 2, n - 1] = torch.nan
    M[2, n // 2, n // 2] = torch.inf
    M[3, n - 1, n - 1] = -1.0
    M[4, n - 1, 0] = M[4, 0, n - 1] = torch.inf
    M[5, 0, 0] = 0.0
    M[6] = 0.0
    M[7, 0, 0] = torch.nan
    return M, [place in (0, 8) for place in range(9)]


@pytest.mark.parametrize("large", [1000, 1])
def test_what_has_no_inverse_is_said_and_costs_no_other(large: int):
    M, expected = spoilt(50)
    X, good = block_inverse(M.clone(), leaf=LEAF, large=large)
    assert good.tolist() == expected
    assert error(X[[0, 8]], M[[0, 8]]) < 2e-5


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_units_do_not_matter(size: float):
    M = definite(60).float()
    X, good = block_inverse(size * M, leaf=LEAF, large=1)
    assert good.all()
    assert error(X * size, M) < 2e-5


# --- the kernel --------------------------------------------------------------------------------------------


def within(X: Tensor, n: int) -> Tensor:
    """A block in the middle of larger matrices."""
    whole = torch.full((len(X), n + 9, n + 30), 7.0)
    whole[:, 4 : 4 + n, 5 : 5 + n] = X
    return whole[:, 4 : 4 + n, 5 : 5 + n]


@only_interpreted
@pytest.mark.interpreted
@pytest.mark.parametrize("n", [1, 3, 16, 37, 64])
def test_the_kernel_of_a_leaf(n: int, monkeypatch: pytest.MonkeyPatch):
    """The same as Cholesky's, in blocks of larger matrices, of which nothing else is read or written."""
    M, found = within(definite(n).float(), n), []
    for way in (False, True):
        monkeypatch.setattr(blocks, "available", lambda _, way=way: way)
        X, good = within(torch.zeros(3, n, n), n), torch.ones(3, dtype=torch.int8)
        leaf_inverse(M, X, good)
        assert good.tolist() == [1, 1, 1]
        found.append(X)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5 * float(found[0].abs().max()))
    around = found[1]._base
    assert around is not None
    assert float(around.sum()) - float(found[1].sum()) == pytest.approx(7.0 * 3 * ((n + 9) * (n + 30) - n * n))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels take the CPU's matrices."""
    for module in (blocks, triton_products):
        monkeypatch.setattr(module, "available", lambda _: True)


@only_interpreted
@pytest.mark.interpreted
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("n", [64, 80])
def test_inverses_by_kernels(n: int):
    M = definite(n).float()
    X, good = block_inverse(M.clone(), leaf=LEAF, large=32)
    assert good.all()
    assert error(X, M) < 2e-5


@only_interpreted
@pytest.mark.interpreted
@pytest.mark.usefixtures("kernels")
def test_kernels_say_what_has_no_inverse():
    M, expected = spoilt(48)
    X, good = block_inverse(M.clone(), leaf=LEAF, large=32)
    assert good.tolist() == expected
    assert error(X[[0, 8]], M[[0, 8]]) < 2e-5


def test_a_leaf_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Pivots without their roots, as of a factorization L D Lᵀ."""
    own: Callable[..., None] = blocks.leaf_inverse

    def wrong(M: Tensor, X: Tensor, good: Tensor, leaf: int) -> None:
        own(M, X, good, leaf)
        X.mul_(X.diagonal(dim1=-2, dim2=-1).unsqueeze(-1))

    monkeypatch.setattr(blocks, "leaf_inverse", wrong)
    M = definite(50).float()
    assert error(block_inverse(M.clone(), leaf=LEAF)[0], M) > 0.1
