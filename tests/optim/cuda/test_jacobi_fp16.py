"""Bases kept as one half: sweeps against those in float64, and moments that turn along."""

from collections.abc import Callable

import pytest
import torch
from test_triton_jacobi import drifted, randn
from torch import Tensor

from interpreter import INTERPRETED
from layerwise.optim.cuda.linalg import orthogonal
from layerwise.optim.cuda.linalg.jacobi import carried, coupling, tracked_basis
from layerwise.optim.cuda.linalg.jacobi_fp16 import tracked_half
from layerwise.optim.cuda.linalg.moments_in_new_basis import put_, squared_rows, turn_between, turn_moments_
from layerwise.optim.cuda.linalg.orthogonal import BASIS_SCALE, basis_half, between
from layerwise.optim.cuda.linalg.split_fp16 import Half, halved, split, whole_product
from layerwise.optim.cuda.triton import products as triton_products

pytestmark = pytest.mark.interpreted


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter the kernels take the CPU's matrices."""
    if INTERPRETED:
        monkeypatch.setattr(triton_products, "available", lambda _: True)
        monkeypatch.setattr(orthogonal, "available", lambda _: True)


def value(U: Half) -> Tensor:
    return U.hi.double() / BASIS_SCALE


@pytest.mark.parametrize("n", [24, 80])
def test_sweeps_follow_a_drift_like_those_in_double_precision(n: int):
    M, U = drifted(n, n // 4)
    expected = tracked_basis(M.double(), U.double(), 2)
    V, values, couplings = tracked_half(M, basis_half(U), 2)
    assert ((couplings[0] - expected[2][0]).abs() < 2e-3).all()
    assert (couplings[1] < 0.02).all()  # the rounding of a basis leaves about 0.007, at this condition
    assert (torch.linalg.matrix_norm(value(V).mT @ value(V) - torch.eye(n)) < 5e-4 * n**0.5).all()
    torch.testing.assert_close(values.double(), expected[1], rtol=2e-2, atol=0)


@pytest.mark.parametrize("n", [24, 80])
def test_a_rounded_matrix_is_followed_as_far(n: int):
    """Where it turns as fast as in training, what sweeps leave is far more than what rounding does."""
    before, other = (torch.linalg.qr(randn(2, n, n, seed=seed)).Q for seed in (1, 2))
    turned = torch.linalg.qr(before + 0.3 * other).Q
    values = torch.arange(1, n + 1) ** -1.0
    M, U = ((turned * values) @ turned.mT).float(), basis_half(before.float())
    for sweeps in (1, 2, 3):
        exact, rough = (value(tracked_half(form, U, sweeps)[0]) for form in (M, halved(M)))
        left, found = (coupling(V.mT @ M.double() @ V) for V in (exact, rough))
        torch.testing.assert_close(found, left, rtol=0.02, atol=2e-3)
        torch.testing.assert_close(rough.mT @ rough, exact.mT @ exact, rtol=0, atol=2e-3)


def test_no_matrix_is_too_large_for_half_precision():
    """The products of a rounded matrix with its basis are halves: all entries alike make the largest there are."""
    M = torch.ones(1, 96, 96) + 1e-3 * torch.eye(96)
    U = torch.linalg.qr(torch.ones(96, 1) @ torch.eye(96)[:1] + 0.1 * randn(96, 96).float()).Q[None]
    for sweeps in (1, 2, 3):
        V, values, couplings = tracked_half(halved(M), basis_half(U), sweeps)
        assert torch.isfinite(couplings).all()
        assert abs(float(values.max()) / 96 - 1) < 0.01
        assert torch.isfinite(V.hi).all()


@pytest.mark.parametrize("form", [lambda M: M, halved])
def test_the_scale_of_a_matrix_is_no_matter(form: Callable[[Tensor], Tensor | Half]):
    M, U = drifted(24, 6)
    _, values, couplings = tracked_half(form(M), basis_half(U))
    for factor in (2.0**-60, 2.0**40):
        _, scaled, same = tracked_half(form(factor * M), basis_half(U))
        assert torch.equal(scaled, factor * values)
        assert torch.equal(same, couplings)


def test_a_bad_matrix_spoils_no_other():
    M, U = drifted(24, 6)
    expected = tracked_half(M, basis_half(U))
    M[1, 0, 0] = torch.nan
    V, values, couplings = tracked_half(M, basis_half(U))
    assert torch.isfinite(couplings[-1]).tolist() == [True, False]
    assert torch.equal(V.hi[0], expected[0].hi[0])
    assert torch.equal(values[0], expected[1][0])


def test_a_pair_turned_by_a_half_keeps_both_halves():
    """The basis is taken for exact: the error is that of pairs, a thousand times below that of halves."""
    U, X = basis_half(torch.linalg.qr(randn(2, 40, 40)).Q.float()), randn(2, 40, 40, seed=1).float()
    exact = value(U).mT @ X.double() @ value(U)
    found = between(U.mT, split(X), U)
    turned = found.C.double()
    for scale in found.scales:
        turned = turned / scale[:, None, None]
    assert (turned - exact).norm() < 2e-6 * exact.norm()
    C, scale = whole_product(split(X), U)
    assert (C.double() / scale[:, None, None] - X.double() @ value(U)).norm() < 1e-6 * X.norm()


@pytest.mark.parametrize("side", ["left", "right"])
def test_moments_turn_along(side: str):
    M, V = randn(2, 24, 24, seed=3).float(), randn(2, 24, 24, seed=4).square().float()
    old, new = (basis_half(torch.linalg.qr(randn(2, 24, 24, seed=seed)).Q.float()) for seed in (5, 6))
    turn = value(new).mT @ value(old)
    expected = turn @ M.double() if side == "left" else M.double() @ turn.mT
    squares = carried(V.double(), turn, side)  # type: ignore[arg-type]
    found = turn_between(new, old)
    turn_moments_(M, V, found, side)  # type: ignore[arg-type]
    assert (M - expected).norm() < 1e-3 * expected.norm()
    torch.testing.assert_close(V.double(), squares, rtol=2e-3, atol=0)
    rows = squared_rows(found).hi.double().sum(-1) / BASIS_SCALE
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=1e-3, atol=0)


def test_zero_moments_stay_zero():
    M, V = torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
    turn_moments_(M, V, basis_half(torch.eye(4).flip(0)[None]), "left")
    assert not M.any()
    assert not V.any()


@pytest.mark.parametrize("n", [4, 6])
@pytest.mark.parametrize("transposed", [True, False])
def test_matrices_are_replaced_where_wanted(transposed: bool, n: int):
    """Part of a larger tensor, by matrices in either order in memory."""
    out, V = torch.zeros(3, 2, n, n).half()[:, 0], torch.arange(3.0 * n * n).view(3, n, n).half() + 1
    V = V.mT if transposed else V
    put_(out, V, torch.tensor([True, False, True]))
    assert torch.equal(out, V * torch.tensor([1, 0, 1]).half()[:, None, None])
    put_(out, V, None)
    assert out.all()
