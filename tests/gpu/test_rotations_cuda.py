"""Steps in a basis on a GPU: written in fp16, rotated back without searches or splits, captured as a CUDA graph."""

import pytest
import torch
from torch import Tensor

from layerwise.optim.cuda import elementwise
from layerwise.optim.cuda.eigenbasis_elementwise import damped_quotient, scaled, squares_ema_
from layerwise.optim.cuda.fp16_steps import damped_half, scaled_half
from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.orthogonal import BASIS_SCALE, basis_half, between, rough_between, with_room
from layerwise.optim.cuda.scaled import Scaled, unscaled
from layerwise.optim.cuda.triton.products import available
from random_tensors import cuda_randn as randn
from stacked_layers import Passes, stack_of
from waiting import nothing_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and available(torch.device("cuda"))),
        reason="needs triton and a GPU of capability 8.0; run `make test-gpu` on one",
    ),
]
SIZES = [(3, 784, 256), (3, 64, 320), (2, 33, 18)]  # the last with rows that do not begin on 16 bytes


def basis(K: int, n: int, seed: int) -> Tensor:
    return torch.linalg.qr(randn(K, n, n, seed=seed))[0]


def error(found: Scaled, expected: Tensor) -> float:
    D = unscaled(found).double()
    return float(((D - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max())


@pytest.mark.parametrize("size", SIZES)
def test_there_and_back(size: tuple[int, int, int]):
    K, O, I = size
    U, V, X = basis(K, O, 1), basis(K, I, 2), randn(*size, seed=3) * torch.logspace(0, -4, I, device="cuda")
    P, Q = basis_half(U), basis_half(V)
    assert P.scale.tolist() == [2.0**14] * K
    R = between(P.mT, split_fp16.split(X), Q)
    exact = [half.hi.double() / BASIS_SCALE for half in (P, Q)]  # they are taken for it
    assert error(R, exact[0].mT @ X.double() @ exact[1]) < 3e-6
    found = rough_between(P, with_room(X), Q.mT)
    assert error(found, U.double() @ X.double() @ V.double().mT) < 1e-3


@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_large_results_are_written_in_float16(spread: float):
    """By cuBLAS, both products; also of one entry alone, and where one entry of the result has nearly all."""
    K, O, I = 12, 768, 784
    U, V = basis(K, O, 1), basis(K, I, 2)
    P, Q = basis_half(U), basis_half(V)
    X = randn(K, O, I, seed=3) * torch.logspace(0, -spread, I, device="cuda")
    X[1] = 0
    X[1, 3, 5] = 1e-3
    X[2] = U[2, 7].sign()[:, None] * V[2, 9].sign()
    X[3] = 0
    found = rough_between(P, with_room(X), Q.mT)
    assert found.C.dtype == torch.float16
    assert bool(found.C.isfinite().all())
    expected = U.double() @ X.double() @ V.double().mT
    size = expected.flatten(1).norm(dim=1)
    left = (unscaled(found).double() - expected).flatten(1).norm(dim=1)
    assert bool((left <= 1e-3 * size).all())


@pytest.mark.parametrize("sizes", [(1.0, 1.2, 0.7), (1.0, 1e4, 1e9), (1.0, 1e-5, 0.0, 1.0)])
def test_steps_with_scales_foreseen(sizes: tuple[float, ...], no_synchronisation: None):
    shape, before = (5, 300, 257), [torch.zeros(5, device="cuda") for _ in range(2)]
    s, a, one = randn(*shape, seed=1).square(), randn(5, 300, seed=2), torch.ones(5, device="cuda")
    added, errors = (None, None, None, None, one), []
    for t, size in enumerate(sizes):
        R = size * randn(*shape, seed=10 + t)
        for half, expected in (
            (damped_half(R, s, added, before[0]), R / (s + 1)),
            (scaled_half(R, a, None, before[1]), R * a.unsqueeze(-1)),
        ):
            value = half.hi.float() / half.scale.view(-1, 1, 1)
            errors.append((value - expected).norm() - 3e-4 * expected.norm())
            errors.append(half.hi.abs().amax().float() - 2.0**7)
    torch.cuda.set_sync_debug_mode("default")
    assert float(torch.stack(errors).max()) <= 0


def test_largest_entries_and_what_is_not_divided():
    R, s, a = randn(5, 300, 257), randn(5, 300, 257, seed=1).square(), randn(5, 300, seed=2)
    R[3, 7, 9] = torch.nan
    scale, one = torch.tensor([2.0**e for e in (-9, 0, 3, 5, 30)], device="cuda"), torch.ones(5, device="cuda")
    held = Scaled(R * scale.view(-1, 1, 1), (scale,))
    for make in (
        lambda X, largest: damped_quotient(X, s, None, None, None, None, one, largest=largest),
        lambda X, largest: scaled(X, a, None, largest=largest),
    ):
        largest = torch.zeros(5, device="cuda")
        Y = make(held, largest)
        torch.testing.assert_close(Y, make(R, None), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(largest, Y.abs().amax((1, 2)), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(squares_ema_(s.clone(), held, 0.5 * one), squares_ema_(s.clone(), R, 0.5 * one))


def test_float16_is_cut_off_and_nan_stays():
    one = torch.ones(2, device="cuda")
    M, V = torch.full((2, 64, 64), 1e9, device="cuda"), torch.ones(2, 64, 64, device="cuda")
    M[1, 0, 0] = torch.nan
    out = torch.empty(2, 64, 64, dtype=torch.float16, device="cuda")
    options = {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "correction1": one, "correction2": one}
    Y = elementwise.rotated_adam_(M, V, torch.zeros_like(M), out=out, factor=64.0, **options)
    assert Y[0].unique().tolist() == [65504.0]
    U = Half(torch.full_like(out, 6e4), 2.0**14 * one)
    found = rough_between(U, Half(Y, one), U)
    assert found.C.isfinite().flatten(1).all(1).tolist() == [True, False]


def test_a_step_is_captured_without_synchronization():
    K, O, I = 2, 96, 64
    P, Q, G = basis_half(basis(K, O, 1)), basis_half(basis(K, I, 2)), randn(K, O, I)
    s, one, W = torch.ones_like(G), torch.ones(K, device="cuda"), [torch.zeros(O, I, device="cuda") for _ in range(K)]
    passes, taken = Passes(stack_of(W, lr=1.0)), torch.ones((), dtype=torch.bool, device="cuda")
    assert passes.tables.pieces

    def step() -> None:
        R = between(P.mT, split_fp16.split(G), Q)
        largest = torch.zeros(K, device="cuda")
        Y = damped_quotient(R, s, None, None, None, None, one, out=R.C, largest=largest)
        passes.finish_(rough_between(P, with_room(Y, largest), Q.mT), taken)

    step()
    torch.cuda.synchronize()
    with nothing_waits():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        graph.replay()
    torch.testing.assert_close(torch.stack(W), -4 * G / 2, rtol=0, atol=2e-2)
