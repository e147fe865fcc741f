"""Splits, products and passes of a sweep by Triton's kernels on a GPU, against float64."""

import pytest
import torch
from torch import Tensor

from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.linalg.block_inverse import block_inverse
from layerwise.optim.cuda.linalg.jacobi import coupling, rotation, second_order, tracked_basis
from layerwise.optim.cuda.linalg.orthogonal import basis_half
from layerwise.optim.cuda.linalg.split_fp16 import HalfPair
from layerwise.optim.cuda.triton import jacobi as triton_sweeps
from layerwise.optim.cuda.triton import products as triton_products
from random_tensors import cuda_randn as randn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and triton_products.available(torch.device("cuda"))),
        reason="needs triton and a GPU of capability 8.0; run `make test-gpu` on one",
    ),
]
SIZES = [64, 784, 3088]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def assert_same(found: HalfPair, X: Tensor) -> None:
    expected = split_fp16.split(X.cpu())
    for name in ("hi", "lo", "scale"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), rtol=0, atol=0, equal_nan=True)


def drifted(n: int, K: int = 2, samples: int = 0, weight: float = 0.05) -> tuple[Tensor, Tensor]:
    """Factors after a drift, and the eigenbases of before."""
    root = torch.linalg.qr(randn(n, n)).Q * torch.logspace(0, -3, n, device="cuda")
    X, Y = root @ randn(K, n, 10 * n, seed=1), root @ randn(K, n, samples or n, seed=2)
    last = X @ X.mT / (10 * n)
    return (1 - weight) * last + weight * Y @ Y.mT / (samples or n), torch.linalg.eigh(last)[1].contiguous()


@pytest.mark.parametrize("n", SIZES)
def test_split(n: int):
    X = 1e-7 * randn(3, n, n)
    X[1, 5, 7], X[2] = torch.inf, 0
    assert_same(split_fp16.split(X), X)
    assert_same(split_fp16.split(X.mT).mT, X)
    assert_same(split_fp16.split(X[1:, 2:9]), X[1:, 2:9])
    assert_same(split_fp16.split(X[0, :, 3:40]), X[0, :, 3:40])
    assert torch.equal(split_fp16.halved(X[::2]).hi, split_fp16.split(X[::2]).hi)
    kept, scale = torch.zeros(3, 2, n, n, device="cuda").half(), torch.zeros(3, device="cuda")
    where = torch.tensor([True, False, True], device="cuda")
    out = HalfPair(kept[:, 0], kept[:, 1], scale)
    triton_products.split(X, out=out, where=where)
    assert_same(out[0], X[0])
    assert not kept[1].any()


@pytest.mark.parametrize("amax", [0.0, 1e-42, 1.2e-38, 2.0**-100, 1.0, 1.9999999, 2.0, 3.3e38, torch.inf, torch.nan])
def test_scale_in_the_kernel(amax: float):
    X = torch.full((1, 1), amax, device="cuda")
    expected = split_fp16.pair_scale(X.cpu())
    torch.testing.assert_close(split_fp16.split(X).scale.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_products(n: int, symmetric: bool):
    A, D = randn(2, 304, n), randn(2, n, n, seed=1)
    D = D + D.mT
    exact = A.double().mT @ A.double()
    pair = split_fp16.split(A)
    assert relative(split_fp16.product(pair.mT, pair, symmetric=symmetric), exact) < 1e-5
    assert 1e-6 < relative(split_fp16.rough_product(A.mT, A, symmetric=symmetric), exact) < 1e-3
    found = split_fp16.product(pair.mT, pair, add=D, alpha=-1, identity=2, symmetric=symmetric)
    assert relative(found, D - exact + 2 * torch.eye(n, device="cuda")) < 1e-5
    if symmetric:
        assert torch.equal(found, found.mT)
    out = torch.empty(2, n, n, dtype=torch.float16, device="cuda")
    triton_products.pair_product(pair.half.mT, pair.half, add=D.half(), symmetric=symmetric, out=out)
    assert relative(out, D + exact) < 1e-3


@pytest.mark.parametrize("n", SIZES)
def test_rotation(n: int):
    M, U = drifted(n)
    S = U.mT @ M @ U
    S = (S + S.mT) / 2
    found = triton_sweeps.rotation(S, 1e-3, 0.05)
    mean = S.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None]
    S = S / mean[..., None]
    E = rotation(S, 1e-3, 0.05)
    assert relative(found.beta[:, None, None] * found.E.hi.float() / triton_sweeps.UNIT, E) < 2e-3
    torch.testing.assert_close(found.left, coupling(S, 1e-3), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.values, mean * second_order(S, E), rtol=1e-3, atol=1e-8)
    assert relative(-found.E.hi.mT, found.E.hi) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("n", [*SIZES, 769])
def test_products_of_columns(n: int, dtype: torch.dtype):
    C, V = randn(2, n, n).to(dtype), randn(2, n, n, seed=1).half()
    dots, squares = triton_sweeps.column_dots(C, V)
    product = C.double() * V.double()
    assert bool(((dots - product.sum(-2)).abs() < 1e-5 * product.abs().sum(-2)).all())
    assert relative(squares, V.double().square().sum(-2)) < 1e-6
    for found, again in zip((dots, squares), triton_sweeps.column_dots(C, V), strict=True):
        assert torch.equal(found, again)


@pytest.mark.usefixtures("no_synchronisation")
def test_nothing_waits():
    M, U = torch.eye(128, device="cuda").expand(2, 128, 128), torch.eye(128, device="cuda").repeat(2, 1, 1)
    tracked_basis(M, basis_half(U), 2)
    block_inverse(M.clone())
    split_fp16.rough_product(M, U)


def test_launches_of_a_sweep_and_of_an_inverse():
    """Counted by the profiler: kernels, copies and fills."""
    M, U = drifted(784)
    damped, basis = M + torch.eye(784, device="cuda"), basis_half(U)
    for name, call, most in (
        ("sweep", lambda: tracked_basis(M, basis, 1), 40),
        ("inverse", lambda: block_inverse(damped.clone()), 120),
    ):
        call()
        torch.cuda.synchronize()
        # torch warns of further cycles, though there is one alone, unless events are kept over all of them.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            call()
            torch.cuda.synchronize()
        launched = [event for event in profile.events() or [] if "CUDA" in str(event.device_type)]
        print(name, len(launched), *sorted(event.name[:60] for event in launched), sep="\n  ")
        assert 0 < len(launched) <= most
