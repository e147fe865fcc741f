"""A sweep by Triton's kernels, run by its interpreter on the CPU, against the same by torch."""

import pytest
import torch
from torch import Tensor

from interpreter import only_interpreted
from layerwise.optim.cuda.linalg.jacobi import coupling, rotation, second_order, tracked_basis
from layerwise.optim.cuda.linalg.products import HALF_PAIRS
from layerwise.optim.cuda.triton import jacobi as triton_sweeps
from layerwise.optim.cuda.triton import products as triton_products
from random_tensors import randn64 as randn

pytestmark = pytest.mark.interpreted


def drifted(n: int, samples: int, K: int = 2) -> tuple[Tensor, Tensor]:
    """Factors after a drift, and the eigenbases of before."""
    root = torch.linalg.qr(randn(K, n, n)).Q * torch.logspace(0, -3, n, dtype=torch.float64)
    X, Y = root @ randn(K, n, 10 * n, seed=1), root @ randn(K, n, samples, seed=2)
    last = X @ X.mT / (10 * n)
    return (0.95 * last + 0.05 * Y @ Y.mT / samples).float(), torch.linalg.eigh(last)[1].float()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels take the CPU's matrices; the names of those of sweeps that were called."""
    called: list[str] = []
    monkeypatch.setattr(triton_products, "available", lambda _: True)
    sweep = triton_sweeps.sweep
    monkeypatch.setattr(triton_sweeps, "sweep", lambda *a: called.append("sweep") or sweep(*a))
    return called


@only_interpreted
@pytest.mark.parametrize("n", [64, 150])
@pytest.mark.parametrize("far", [False, True])
def test_rotation(n: int, far: bool):
    M, U = drifted(n, n // 4)
    S = 1e-5 * M if far else U.mT @ M @ U
    S = (S + S.mT) / 2
    found = triton_sweeps.rotation(S, 1e-3, 0.05)
    mean = S.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None]
    S = S / mean[..., None]
    E = rotation(S, 1e-3, 0.05)
    E_found = found.beta[:, None, None] * found.E.hi.float() / triton_sweeps.UNIT
    assert (torch.linalg.matrix_norm(E_found, ord=2) < 1.5).all()
    assert not far or (found.beta < 1).all()
    torch.testing.assert_close(E_found, E, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(found.alpha, found.beta.square() / 2 * triton_sweeps.UNIT)
    torch.testing.assert_close(found.left, coupling(S, 1e-3))
    assert torch.equal(found.E.hi, -found.E.hi.mT)
    torch.testing.assert_close(found.values, mean * second_order(S, E), rtol=1e-3, atol=1e-3 * float(mean.max()))


@only_interpreted
@pytest.mark.parametrize("sweeps", [1, 3])
def test_tracked_basis(kernels: list[str], monkeypatch: pytest.MonkeyPatch, sweeps: int):
    M, U = drifted(72, 20)
    before = U.clone()
    V, values, couplings = tracked_basis(M, U, sweeps, HALF_PAIRS)
    assert kernels == ["sweep"] * sweeps
    assert couplings.shape == (sweeps, 2)
    assert torch.equal(U, before)
    monkeypatch.setattr(triton_products, "available", lambda _: False)
    expected = tracked_basis(M, U, sweeps)
    torch.testing.assert_close(V, expected[0], rtol=0, atol=1e-3)
    torch.testing.assert_close(values, expected[1], rtol=1e-3, atol=1e-7)
    # The third, c = 2.6e-4, is near rounding. What S errs by is a coupling r of 5e-5 in float32, and 8e-5 here, where
    # pairs are multiplied and one triangle of UᵀMU is computed, not the mean of both (6e-5): it adds r²/2c = 1.2e-5 to
    # c; and the basis after two sweeps, turned in 11 bits, is itself coupled by 7e-6 more.
    torch.testing.assert_close(couplings, expected[2], rtol=1e-2, atol=3e-5)
    assert float((V.mT @ V - torch.eye(72)).norm()) < 1e-4
    assert (tracked_basis(M, V, 0, measured=True)[2] < tracked_basis(M, U, 0, measured=True)[2] / 4).all()


@only_interpreted
def test_bad_matrices_keep_their_basis(kernels: list[str]):
    M, U = drifted(64, 20, K=1)
    M, U = M.repeat(6, 1, 1), U.repeat(6, 1, 1)
    M[1, 0, 0], M[2, 3, 4], M[3] = torch.nan, torch.inf, 0
    U[4] *= 5
    U[5, 3, 3] = torch.nan
    V, values, couplings = tracked_basis(M, U, 2, HALF_PAIRS)
    assert kernels
    assert torch.isfinite(couplings[-1]).tolist() == [True, False, False, True, False, False]
    torch.testing.assert_close(V[[1, 2, 4, 5]], U[[1, 2, 4, 5]], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(V[3], U[3], rtol=0, atol=1e-6)
    assert values[1:3].isnan().all()
    assert (values[3] == 0).all()
    assert torch.equal(V[0], tracked_basis(M[:1], U[:1], 2, HALF_PAIRS)[0][0])


@only_interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("n", [40, 300])
def test_products_of_columns(n: int, dtype: torch.dtype):
    """Over more rows than one program takes, and columns that fill no tile."""
    C, V = randn(2, n, n).to(dtype), randn(2, n, n, seed=1).half()
    dots, squares = triton_sweeps.column_dots(C, V)
    torch.testing.assert_close(dots.double(), (C.double() * V.double()).sum(-2), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(squares.double(), V.double().square().sum(-2), rtol=1e-5, atol=0)
