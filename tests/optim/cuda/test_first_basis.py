"""First bases by orthogonal iteration against eigh: near enough to be followed, whatever the factor is."""

import pytest
import torch
from torch import Tensor

from layerwise.optim.cuda.linalg.first_basis import first_basis
from layerwise.optim.cuda.linalg.jacobi import tracked_basis
from layerwise.optim.cuda.linalg.products import HALF_PAIRS, TORCH, Products
from random_tensors import randn64 as randn

N = 96
COUPLED = 0.9
"""Of a first basis, before any sweep; that of the identity is 2 to 16."""


def factor(kind: str, n: int = N) -> Tensor:
    """Second moments with random bases."""
    U = torch.linalg.qr(randn(2, n, n))[0]
    values = {
        "geometric": torch.logspace(0, -4, n),
        "one large": torch.cat([torch.tensor([1e3]), torch.logspace(0, -3, n - 1)]),
        "few rows": torch.cat([torch.logspace(0, -2, n // 8), torch.zeros(n - n // 8)]),
        "equal": torch.ones(n),
    }[kind]
    M = (U * values.double()) @ U.mT
    return ((M + M.mT) / 2).float()


def coupling(M: Tensor, U: Tensor) -> float:
    return float(tracked_basis(M.double(), U.double(), 0, measured=True)[2].max())


def departure(U: Tensor) -> float:
    return float(torch.linalg.matrix_norm(U.mT @ U - torch.eye(U.shape[-1]), ord=2).max())


@pytest.mark.parametrize("products", [TORCH, HALF_PAIRS])
@pytest.mark.parametrize("kind", ["geometric", "one large", "few rows", "equal"])
def test_a_basis_that_sweeps_can_follow(kind: str, products: Products):
    """Nearly orthogonal and nearly diagonal; one sweep makes it more so, a few more make it eigh's."""
    M = factor(kind)
    U, good = first_basis(M, products)
    assert good.all()
    assert departure(U) < 0.3
    assert coupling(M, U) < COUPLED
    if kind != "equal":
        assert coupling(M, torch.eye(N).expand_as(M)) > 2 * COUPLED
    V, values, _ = tracked_basis(M, U, 1, products)
    assert departure(V) < 0.1
    assert coupling(M, V) < 0.8 * coupling(M, U) + 0.01
    W, values, _ = tracked_basis(M, U, 8, products)
    truth = torch.linalg.eigvalsh(M.double())
    torch.testing.assert_close(values.double().sort(-1).values, truth, rtol=2e-2, atol=2e-3 * float(truth.mean()))
    assert departure(W) < 1e-3


def test_padding_keeps_its_place():
    """Vectors of rows that are zero are the last ones, and nobody else's."""
    M = torch.zeros(2, 40, 40)
    M[:, :33, :33] = factor("geometric", 33)
    M[1, :, 5] = M[1, 5, :] = 0.0  # a dead row of the factor itself
    U, good = first_basis(M)
    assert good.all()
    torch.testing.assert_close(U[:, 33:], torch.eye(40)[33:].expand(2, 7, 40), rtol=0, atol=1e-4)
    torch.testing.assert_close(U[:, :33, 33:], torch.zeros(2, 33, 7))
    assert coupling(M[:, :33, :33], U[:, :33, :33]) < COUPLED


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_units_do_not_matter(size: float):
    M = factor("geometric")
    torch.testing.assert_close(first_basis(size * M)[0], first_basis(M)[0], rtol=0, atol=1e-3)


def test_what_has_no_basis_is_said_and_costs_no_other():
    M = factor("geometric").repeat(2, 1, 1)
    M[1, 3, 3], M[2], M[3, 0, 1] = torch.inf, 0.0, torch.nan
    U, good = first_basis(M)
    assert good.tolist() == [True, False, True, False]
    assert torch.equal(U[2], torch.eye(N)) or departure(U[2:3]) < 1e-3
    torch.testing.assert_close(U[0], first_basis(M[:1])[0][0])
