"""Inverses by products of blocks on a GPU: against float64, captured, whatever TF32 is set to."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from layerwise.optim.cuda.linalg import block_inverse as blocks
from layerwise.optim.cuda.linalg.block_inverse import block_inverse, leaf_inverse
from layerwise.optim.cuda.triton import products as triton_products
from random_tensors import cuda_randn as randn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and triton_products.available(torch.device("cuda"))),
        reason="needs triton and a GPU of capability 8.0; run `make test-gpu` on one",
    ),
]
SIZES = [7, 64, 200, 784, 2320, 3088]


def factor(n: int, K: int = 2) -> Tensor:
    """Second moments with spectra from 1 to 1e-4, and a direction a hundred times as large."""
    values = torch.logspace(0, -4, n, device="cuda", dtype=torch.float64)
    values[0] *= 100
    U = torch.linalg.qr(randn(K, n, n).double())[0]
    M = (U * values) @ U.mT
    return ((M + M.mT) / 2).float()


def damped(n: int, damping: float = 0.1) -> Tensor:
    M = factor(n)
    return M + damping * M.diagonal(dim1=-2, dim2=-1).mean(-1).view(-1, 1, 1) * torch.eye(n, device="cuda")


def error(found: Tensor, M: Tensor) -> float:
    truth = torch.linalg.inv(M.double())
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("damping", [1e-1, 1e-3])
def test_nearly_as_accurate_as_cholesky(n: int, damping: float):
    """Large blocks are multiplied in 22 bits, relative to the largest entry: ten times float32's error was measured
    for these factors, whose first direction is a hundred times the others."""
    M = damped(n, damping)
    X, good = block_inverse(M.clone())
    assert good.all()
    assert error(X, M) < 15 * error(torch.cholesky_inverse(torch.linalg.cholesky(M)), M) + 1e-5


@pytest.mark.parametrize("n", [1, 16, 50, 64])
def test_the_kernel_of_a_leaf(n: int, monkeypatch: pytest.MonkeyPatch):
    M, found = damped(n), []
    for way in (True, False):
        monkeypatch.setattr(blocks, "available", lambda _, way=way: way)
        X, good = torch.zeros_like(M), torch.ones(2, dtype=torch.int8, device="cuda")
        leaf_inverse(M, X, good)
        assert good.all()
        found.append(X)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5 * float(found[0].abs().max()))


def test_what_has_no_inverse_is_said_and_costs_no_other():
    M = damped(784)[:1].repeat(5, 1, 1)
    M[1, 700, 3] = M[1, 3, 700] = torch.nan
    M[2, 783, 783], M[3] = -1.0, 0.0
    X, good = block_inverse(M.clone())
    assert good.tolist() == [True, False, False, False, True]
    assert error(X[[0, 4]], M[[0, 4]]) < 1e-4


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_tf32_is_not_used_and_stays_as_it_is(tf32: None):
    M = damped(300, 1e-3)
    assert error(block_inverse(M.clone())[0], M) < 3e-3  # 1e-3 was measured; TF32 would leave nothing
    assert torch.get_float32_matmul_precision() == "high"


def test_captured_as_a_graph():
    """Twice the same launches: another factor in the same memory has its own inverse."""
    held, out = damped(784), torch.empty(2, 784, 784, device="cuda")
    call = lambda: out.copy_(block_inverse(held.clone())[0])  # noqa: E731
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    held.copy_(3 * damped(784, 1e-2))
    graph.replay()
    torch.cuda.synchronize()
    assert error(out, held) < 1e-3  # 4e-4 was measured
