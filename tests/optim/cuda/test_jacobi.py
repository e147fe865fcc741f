"""Tracked eigenbases: sweeps against those in float64 and against eigh, and moments that turn along."""

from collections.abc import Callable

import pytest
import torch
from test_triton_jacobi import drifted, randn
from torch import Tensor

from interpreter import INTERPRETED
from layerwise.optim.cuda.linalg import orthogonal
from layerwise.optim.cuda.linalg.jacobi import coupling, rotation, tracked_basis
from layerwise.optim.cuda.linalg.moments_in_new_basis import put_, rotate_moments_, rotation_between, squared_rows
from layerwise.optim.cuda.linalg.orthogonal import BASIS_SCALE, basis_half, between
from layerwise.optim.cuda.linalg.split_fp16 import Half, halved, split, whole_product
from layerwise.optim.cuda.triton import products as triton_products
from random_tensors import randn64
from sweeps_in_double import carried, coupled, swept

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
    expected = swept(M.double(), U.double(), 2)
    V, values, couplings = tracked_basis(M, basis_half(U), 2)
    assert ((couplings[0] - expected[2][0]).abs() < 2e-3).all()
    assert (couplings[1] < 0.02).all()  # the rounding of a basis leaves about 0.007, at this condition
    assert (torch.linalg.matrix_norm(value(V).mT @ value(V) - torch.eye(n)) < 5e-4 * n**0.5).all()
    torch.testing.assert_close(values.double(), expected[1], rtol=2e-2, atol=0)


def spectrum(kind: str, n: int = 48) -> Tensor:
    third = n // 3
    return {
        "geometric": torch.logspace(0, -6, n, dtype=torch.float64),
        "clusters": torch.tensor([1, 1e-2, 1e-4], dtype=torch.float64).repeat_interleave(third),
        "low rank": torch.cat([torch.logspace(0, -3, third), torch.zeros(n - third)]).double(),
        "identity": torch.ones(n, dtype=torch.float64),
    }[kind]


def orthogonal_64(seed: int, n: int = 48) -> Tensor:
    return torch.linalg.qr(randn64(n, n, seed=seed))[0]


@pytest.mark.parametrize("kind", ["geometric", "clusters", "low rank", "identity"])
def test_sweeps_converge(kind: str):
    """In float64 to rounding; equal eigenvalues, nothing to tell apart, need `still`, separate ones do not."""
    values, Q = spectrum(kind), orthogonal_64(1)
    M = Q * values @ Q.mT
    start = torch.linalg.qr(Q + 0.01 * randn64(48, 48, seed=4))[0]
    U, found, _ = swept(M, start, 30, damping=0, still=0 if kind == "geometric" else 0.05)
    S = U.mT @ M @ U
    assert (S - torch.diag(found)).norm() < 1e-10 * S.norm()
    assert (found.sort()[0] - values.sort()[0]).abs().max() < 1e-10
    assert (U.mT @ U - torch.eye(48)).norm() < 1e-13


def test_sweeps_converge_from_an_unrelated_basis():
    Q = orthogonal_64(1)
    M = Q * spectrum("geometric") @ Q.mT
    _, found, _ = swept(M, orthogonal_64(5), 40, damping=0, still=0)
    assert (found.sort()[0] - torch.linalg.eigvalsh(M)).abs().max() < 1e-10
    U, _, _ = tracked_basis(M.float(), basis_half(orthogonal_64(5).float()), 40)
    assert float(coupled(M, value(U))) < 0.02


@pytest.mark.parametrize("kind", ["identity", "clusters", "low rank"])
def test_what_is_diagonal_already_does_not_move(kind: str):
    Q = orthogonal_64(1)
    U, _, couplings = tracked_basis((Q * spectrum(kind) @ Q.mT).float(), basis_half(Q.float()), 3)
    assert (value(U) - Q).abs().max() < 5e-4
    assert (couplings < 2e-2).all()


def test_orthogonality_does_not_wear_off():
    """Fifty drifts."""
    Q, values = orthogonal_64(1), spectrum("geometric")

    def covariance(samples: int, seed: int) -> Tensor:
        A = Q * values.sqrt() @ randn64(48, samples, seed=seed)
        return (A @ A.mT / samples).float()

    M = covariance(480, 2)
    U = basis_half(torch.linalg.eigh(M)[1])
    for step in range(50):
        M = 0.95 * M + 0.05 * covariance(480, 10 + step)
        U, _, [before] = tracked_basis(M, U)
        assert before < 0.05
    assert (value(U).mT @ value(U) - torch.eye(48)).norm() < 5e-3
    assert float(coupled(M.double(), value(U))) < 0.03


def test_rotation_is_antisymmetric_and_bounded():
    Q = orthogonal_64(7)
    E = rotation(Q * spectrum("geometric") @ Q.mT, still=0)
    assert torch.allclose(E, -E.mT)
    assert torch.linalg.matrix_norm(E, ord=2) < 1.5


def test_a_basis_stays_one_where_all_of_it_turns():
    """A factor of few examples, most of it new at every refresh: many vectors turn at once, by large angles."""
    n, m = 256, 64
    sizes, draws = torch.logspace(0, -3, m), torch.Generator().manual_seed(0)

    def normals(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws) / m**0.5

    M, features, U = torch.zeros(n, n), normals(n, m), basis_half(torch.eye(n)[None])
    for turn in range(9):
        for _ in range(10):
            features = 0.97 * features + 0.25 * normals(n, m)
            G = (features * sizes) @ normals(m, m)
            M = 0.95 * M + 0.05 * G @ G.mT
        U = basis_half(torch.linalg.eigh(M)[1][None]) if turn == 0 else tracked_basis(M[None], U)[0]
    stretched = torch.linalg.svdvals(value(U)[0])
    assert 0.97 < float(stretched.min()) <= float(stretched.max()) < 1.01


@pytest.mark.parametrize("n", [24, 80])
def test_a_rounded_matrix_is_followed_as_far(n: int):
    """Where it turns as fast as in training, what sweeps leave is far more than what rounding does."""
    before, other = (torch.linalg.qr(randn(2, n, n, seed=seed)).Q for seed in (1, 2))
    turned = torch.linalg.qr(before + 0.3 * other).Q
    values = torch.arange(1, n + 1) ** -1.0
    M, U = ((turned * values) @ turned.mT).float(), basis_half(before.float())
    for sweeps in (1, 2, 3):
        exact, rough = (value(tracked_basis(form, U, sweeps)[0]) for form in (M, halved(M)))
        left, found = (coupling(V.mT @ M.double() @ V) for V in (exact, rough))
        torch.testing.assert_close(found, left, rtol=0.02, atol=2e-3)
        torch.testing.assert_close(rough.mT @ rough, exact.mT @ exact, rtol=0, atol=2e-3)


def test_no_matrix_is_too_large_for_half_precision():
    """The products of a rounded matrix with its basis are halves: all entries alike make the largest there are."""
    M = torch.ones(1, 96, 96) + 1e-3 * torch.eye(96)
    U = torch.linalg.qr(torch.ones(96, 1) @ torch.eye(96)[:1] + 0.1 * randn(96, 96).float()).Q[None]
    for sweeps in (1, 2, 3):
        V, values, couplings = tracked_basis(halved(M), basis_half(U), sweeps)
        assert torch.isfinite(couplings).all()
        assert abs(float(values.max()) / 96 - 1) < 0.01
        assert torch.isfinite(V.hi).all()


@pytest.mark.parametrize("form", [lambda M: M, halved])
def test_the_scale_of_a_matrix_is_no_matter(form: Callable[[Tensor], Tensor | Half]):
    M, U = drifted(24, 6)
    _, values, couplings = tracked_basis(form(M), basis_half(U))
    for factor in (2.0**-60, 2.0**40):
        _, scaled, same = tracked_basis(form(factor * M), basis_half(U))
        assert torch.equal(scaled, factor * values)
        assert torch.equal(same, couplings)


def test_a_bad_matrix_spoils_no_other():
    M, U = drifted(24, 6)
    expected = tracked_basis(M, basis_half(U))
    M[1, 0, 0] = torch.nan
    V, values, couplings = tracked_basis(M, basis_half(U))
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
    squares = carried(V.double(), turn, side)
    found = rotation_between(new, old)
    rotate_moments_(M, V, found, side)  # type: ignore[arg-type]
    assert (M - expected).norm() < 1e-3 * expected.norm()
    torch.testing.assert_close(V.double(), squares, rtol=2e-3, atol=0)
    rows = squared_rows(found).hi.double().sum(-1) / BASIS_SCALE
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=1e-3, atol=0)


def test_zero_moments_stay_zero():
    M, V = torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
    rotate_moments_(M, V, basis_half(torch.eye(4).flip(0)[None]), "left")
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
