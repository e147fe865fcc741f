"""Tracked bases on a GPU: kernels and cuBLAS's large products, against torch in double precision."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from layerwise.optim.cuda.linalg.jacobi import LARGE, coupling, tracked_basis
from layerwise.optim.cuda.linalg.moments_in_new_basis import put_, rotate_moments_, rotation_between
from layerwise.optim.cuda.linalg.orthogonal import BASIS_SCALE, basis_half
from layerwise.optim.cuda.linalg.split_fp16 import Half, halved
from random_tensors import cuda_randn64 as randn
from sweeps_in_double import carried, coupled, swept

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SIZES = [72, 784, LARGE + 16, 3088]


def drifted(n: int) -> tuple[Tensor, Tensor]:
    root = torch.linalg.qr(randn(2, n, n)).Q * torch.logspace(0, -3, n, dtype=torch.float64, device="cuda")
    X, Y = root @ randn(2, n, 4 * n, seed=1), root @ randn(2, n, n // 4, seed=2)
    last = X @ X.mT / (4 * n)
    return (0.95 * last + 0.05 * Y @ Y.mT / (n // 4)).float(), torch.linalg.eigh(last)[1].float().contiguous()


@pytest.mark.parametrize("n", SIZES)
def test_sweeps(n: int):
    M, U = drifted(n)
    V, values, couplings = tracked_basis(M, basis_half(U), 2)
    expected = swept(M.double(), U.double(), 2)
    assert ((couplings - expected[2]).abs() < 0.02).all(), (couplings, expected[2])
    W = V.hi.double() / BASIS_SCALE
    assert (torch.linalg.matrix_norm(W.mT @ W - torch.eye(n, device="cuda")) < 5e-4 * n**0.5).all()
    torch.testing.assert_close(values.double(), expected[1], rtol=5e-2, atol=1e-7)
    left = coupled(M.double(), W)
    assert (left < 0.03).all(), left


@pytest.mark.parametrize("n", SIZES)
def test_a_rounded_matrix_is_followed_as_far(n: int):
    before, other = (torch.linalg.qr(randn(2, n, n, seed=seed)).Q for seed in (1, 2))
    turned = torch.linalg.qr(before + 0.3 * other).Q
    values = torch.arange(1, n + 1, device="cuda") ** -1.0
    M, U = ((turned * values) @ turned.mT).float(), basis_half(before.float())
    exact, rough = (tracked_basis(form, U, 2)[0].hi.double() / BASIS_SCALE for form in (M, halved(M)))
    left, found = (coupling(V.mT @ M.double() @ V) for V in (exact, rough))
    torch.testing.assert_close(found, left, rtol=0.02, atol=2e-3)
    torch.testing.assert_close(rough.mT @ rough, exact.mT @ exact, rtol=0, atol=2e-3)


@pytest.mark.parametrize("form", [lambda M: M, halved])
def test_bad_matrices(form: Callable[[Tensor], Tensor | Half]):
    M, U = drifted(784)
    M[1, 3, 3] = torch.inf
    _, _, couplings = tracked_basis(form(M), basis_half(U), 2)
    assert torch.isfinite(couplings[-1]).tolist() == [True, False]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("n", SIZES[1:])
def test_moments(n: int, side: str):
    shape = (2, n, 48) if side == "left" else (2, 48, n)
    M, V = randn(*shape, seed=3).float(), randn(*shape, seed=4).square().float()
    old, new = (basis_half(torch.linalg.qr(randn(2, n, n, seed=seed)).Q.float().contiguous()) for seed in (5, 6))
    turn = new.hi.double().mT @ old.hi.double() / BASIS_SCALE**2
    expected = turn @ M.double() if side == "left" else M.double() @ turn.mT
    squares = carried(V.double(), turn, side)
    rotate_moments_(M, V, rotation_between(new, old), side)  # type: ignore[arg-type]
    assert (M - expected).norm() < 1e-3 * expected.norm()
    torch.testing.assert_close(V.double(), squares, rtol=3e-3, atol=0)


@pytest.mark.usefixtures("no_synchronisation")
def test_nothing_waits():
    U = basis_half(torch.eye(128, device="cuda").repeat(2, 1, 1))
    V, _, couplings = tracked_basis(torch.eye(128, device="cuda").repeat(2, 1, 1), U)
    rotate_moments_(
        torch.ones(2, 128, 64, device="cuda"), torch.ones(2, 128, 64, device="cuda"), rotation_between(V, U), "left"
    )
    put_(U.hi, V.hi, torch.isfinite(couplings[-1]))
