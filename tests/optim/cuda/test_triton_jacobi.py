"""Passes of a sweep by Triton's kernels, run by its interpreter on the CPU, against the same by torch."""

import pytest
import torch
from torch import Tensor

from interpreter import only_interpreted
from layerwise.optim.cuda.linalg.jacobi import coupling, rotation, second_order
from layerwise.optim.cuda.triton import jacobi as triton_sweeps
from random_tensors import randn64 as randn

pytestmark = pytest.mark.interpreted


def drifted(n: int, samples: int, K: int = 2) -> tuple[Tensor, Tensor]:
    """Factors after a drift, and the eigenbases of before."""
    root = torch.linalg.qr(randn(K, n, n)).Q * torch.logspace(0, -3, n, dtype=torch.float64)
    X, Y = root @ randn(K, n, 10 * n, seed=1), root @ randn(K, n, samples, seed=2)
    last = X @ X.mT / (10 * n)
    return (0.95 * last + 0.05 * Y @ Y.mT / samples).float(), torch.linalg.eigh(last)[1].float()


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
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("n", [40, 300])
def test_products_of_columns(n: int, dtype: torch.dtype):
    """Over more rows than one program takes, and columns that fill no tile."""
    C, V = randn(2, n, n).to(dtype), randn(2, n, n, seed=1).half()
    dots, squares = triton_sweeps.column_dots(C, V)
    torch.testing.assert_close(dots.double(), (C.double() * V.double()).sum(-2), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(squares.double(), V.double().square().sum(-2), rtol=1e-5, atol=0)
