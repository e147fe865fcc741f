"""Tracked eigenbases against eigh: one sweep after a drift, many on one matrix, roots, orthogonality, moments."""

import pytest
import torch

from layerwise.foundations.errors import InputError
from layerwise.optim.cuda.linalg.jacobi import carried, rotation, tracked_basis
from layerwise.optim.cuda.linalg.products import HALF_PAIRS, TORCH, TorchProducts
from random_tensors import randn64 as normal

N = 48


def generator(seed):
    return torch.Generator().manual_seed(seed)


def orthogonal(n, seed=0):
    return torch.linalg.qr(normal(n, n, seed=seed))[0]


def spectrum(kind, n=N):
    third = n // 3
    return {
        "geometric": torch.logspace(0, -6, n, dtype=torch.float64),
        "clusters": torch.tensor([1, 1e-2, 1e-4], dtype=torch.float64).repeat_interleave(third),
        "low rank": torch.cat([torch.logspace(0, -3, third), torch.zeros(n - third)]).double(),
        "identity": torch.ones(n, dtype=torch.float64),
    }[kind]


def with_values(values, Q):
    return Q * values @ Q.mT


def covariance(values, Q, samples, seed):
    A = Q * values.sqrt() @ normal(len(Q), samples, seed=seed)
    return A @ A.mT / samples


def drifted(kind="geometric", samples=10.0, weight=0.05, n=N):
    """A sample covariance, and the same after a running mean took in another of the same population."""
    values, Q = spectrum(kind, n), orthogonal(n, 1)
    last = covariance(values, Q, 10 * n, 2)
    return last, (1 - weight) * last + weight * covariance(values, Q, int(samples * n), 3)


def eigenbasis(M):
    return torch.linalg.eigh(M)[1]


def exact_root(M, root, damping=1e-3):
    values, Q = torch.linalg.eigh(M)
    return with_values((values.clamp(min=0) + damping * values.mean()).pow(-1 / root), Q)


def applied_error(X, M, root, damping=1e-3):
    """The larger of two: on random columns, and on columns like gradients, whose covariance is M."""
    Z, truth = normal(len(M), 32, seed=9), exact_root(M, root, damping)
    values, Q = torch.linalg.eigh(M)
    both = [Z, with_values(values.clamp(min=0).sqrt(), Q) @ Z]
    return max(float((X.double() @ G - truth @ G).norm() / (truth @ G).norm()) for G in both)


def left_in(M, U):
    [left] = tracked_basis(M, U, 0, measured=True)[2]
    return float(left)


def departure(U):
    return float((U.mT @ U - torch.eye(U.shape[-1], dtype=U.dtype)).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("samples", "fall"), [(10.0, 10), (0.25, 4)])
def test_a_sweep_follows_a_drift(dtype, samples, fall):
    last, M = drifted(samples=samples)
    U, values, [before] = tracked_basis(M.to(dtype), eigenbasis(last).to(dtype))
    assert before == pytest.approx(left_in(M, eigenbasis(last)), rel=1e-2)
    assert left_in(M.to(dtype), U) < before / fall
    shift = 1e-3 * M.diagonal().mean()
    truth = torch.linalg.eigvalsh(M) + shift
    assert ((values.double().sort()[0] + shift) / truth - 1).abs().max() < 0.03


def test_couplings_are_those_before_each_sweep():
    """Of a stack, the first one first; with `measured` that of the basis that is returned comes last."""
    last, M = (X.expand(2, N, N).clone() for X in drifted(samples=0.25))
    M[1] = last[1]
    U, _, couplings = tracked_basis(M, eigenbasis(last), 2, measured=True)
    one, _, first = tracked_basis(M, eigenbasis(last))
    assert couplings.shape == (3, 2)
    assert torch.equal(couplings[0], first[0])
    assert torch.equal(couplings[1], tracked_basis(M, one)[2][0])
    assert torch.equal(couplings[2], tracked_basis(M, U, 0, measured=True)[2][0])
    assert (couplings[1:, 0] < couplings[:-1, 0] / 4).all()
    assert (couplings[:, 1] < 1e-10).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("kind", ["geometric", "clusters", "low rank", "identity"])
def test_sweeps_converge(kind, dtype, tolerance):
    """Equal eigenvalues, nothing to tell apart, need `still`; separate ones converge to rounding without."""
    values, Q = spectrum(kind), orthogonal(N, 1)
    M = with_values(values, Q).to(dtype)
    start = torch.linalg.qr(Q + 0.01 * normal(N, N, seed=4))[0].to(dtype)
    still = 0 if kind == "geometric" else 0.05
    U, found, _ = tracked_basis(M, start, 30, damping=0, still=still)
    S = U.mT @ M @ U
    assert (S - torch.diag(found)).norm() < tolerance * S.norm()
    assert (found.double().sort()[0] - values.sort()[0]).abs().max() < tolerance
    assert departure(U) < 100 * torch.finfo(dtype).eps


def test_sweeps_converge_from_an_unrelated_basis():
    M = with_values(spectrum("geometric"), orthogonal(N, 1))
    U, found, _ = tracked_basis(M, orthogonal(N, 5), 40, damping=0, still=0)
    assert (found.sort()[0] - torch.linalg.eigvalsh(M)).abs().max() < 1e-10
    assert departure(U) < 1e-12


def test_what_is_diagonal_already_does_not_move():
    Q = orthogonal(N, 1)
    for kind in ("identity", "clusters", "low rank"):
        U, _, couplings = tracked_basis(with_values(spectrum(kind), Q), Q, 3)
        assert torch.allclose(U, Q, atol=1e-12)
        assert (couplings < 1e-10).all()


def test_equal_eigenvalues_that_drift_apart_hardly_turn():
    """Within a cluster rotation would gain nothing and cost orthogonality: a sweep must not make it worse."""
    values, Q = spectrum("clusters"), orthogonal(N, 1)
    M = 0.95 * with_values(values, Q) + 0.05 * covariance(values, Q, 10 * N, 3)
    U, _, [before] = tracked_basis(M, Q)
    assert left_in(M, U) < before
    assert departure(U) < 1e-7  # less than float32 could tell


@pytest.mark.parametrize("rounded", [False, True])
def test_orthogonality_does_not_wear_off(rounded):
    """Fifty drifts, float32, and a basis that is kept in half precision or not."""
    values, Q = spectrum("geometric"), orthogonal(N, 1)
    M = covariance(values, Q, 10 * N, 2).float()
    U = eigenbasis(M)
    for step in range(50):
        M = 0.95 * M + 0.05 * covariance(values, Q, 10 * N, 10 + step).float()
        U, _, [before] = tracked_basis(M, U.half().float() if rounded else U)
        assert before < 0.05
    assert departure(U) < 1e-5
    assert left_in(M, U) < 0.01


def test_corrections_may_be_rough():
    last, M = drifted(samples=0.25)

    def rough(A, B):
        return A.bfloat16().float() @ B.bfloat16().float()

    U, _, [before] = tracked_basis(M.float(), eigenbasis(last).float(), products=TorchProducts(roughly=rough))
    assert left_in(M.float(), U) < before / 4
    assert departure(U) < 1e-4


def test_pairs_of_halves_follow_a_drift():
    last, M = (X.float() for X in drifted(samples=0.25))
    U, values, [before] = tracked_basis(M, eigenbasis(last), products=HALF_PAIRS)
    expected = tracked_basis(M, eigenbasis(last))
    assert torch.allclose(U, expected[0], atol=1e-3)
    assert torch.allclose(values, expected[1], atol=1e-6)
    assert before == pytest.approx(float(expected[2]), rel=1e-3)
    assert left_in(M, U) < before / 4
    assert departure(U) < 1e-4


@pytest.mark.parametrize("root", [1, 2, 4])
@pytest.mark.parametrize("samples", [10.0, 1.0, 0.25])
def test_roots_after_a_drift(root, samples):
    last, M = drifted(samples=samples)
    U, values, _ = tracked_basis(M, eigenbasis(last))
    turned = with_values((values + 1e-3 * M.diagonal().mean()).pow(-1 / root), U)
    assert applied_error(turned, M, root) < 2e-2


def test_products_are_counted():
    last, M = drifted()
    calls = []

    def matmul(A, B):
        calls.append(A.shape)
        return A @ B

    for sweeps, measured, count in [(1, False, 6), (3, False, 18), (1, True, 8), (0, True, 2)]:
        calls.clear()
        tracked_basis(M, eigenbasis(last), sweeps, TorchProducts(matmul), measured=measured)
        assert len(calls) == count


def test_one_bad_matrix_leaves_the_others_alone():
    last, M = drifted()
    U = eigenbasis(last).expand(4, N, N)
    M = M.repeat(4, 1, 1)
    M[1, 0, 0], M[2, 3, 4], M[3] = torch.nan, torch.inf, 0
    found, values, couplings = tracked_basis(M, U, 2)
    assert couplings.shape == (2, 4)
    assert couplings[:, 1:3].tolist() == [[torch.inf] * 2] * 2
    assert couplings[:, [0, 3]].isfinite().all()
    assert torch.equal(found[1:3], U[1:3])
    assert torch.equal(found[0], tracked_basis(M[0], U[0], 2)[0])
    assert torch.allclose(found[3], U[3])
    assert (values[3] == 0).all()


@pytest.mark.parametrize("size", [2.0**-40, 2.0**40])
def test_units_do_not_matter(size):
    last, M = drifted()
    found = tracked_basis(M.float(), eigenbasis(last).float())
    scaled = tracked_basis(M.float() * size, eigenbasis(last).float())
    assert torch.allclose(scaled[0], found[0], atol=1e-6)
    assert torch.allclose(scaled[1] / size, found[1], atol=1e-8)
    assert torch.allclose(scaled[2], found[2])


def test_rotation_is_antisymmetric_and_bounded():
    E = rotation(with_values(spectrum("geometric"), orthogonal(N, 7)), still=0)
    assert torch.allclose(E, -E.mT)
    assert torch.linalg.matrix_norm(E, ord=2) < 1.5


@pytest.mark.parametrize("side", ["left", "right"])
def test_moments_are_carried(side):
    V, n = normal(2, 6, 9).square(), 6 if side == "left" else 9
    U = torch.stack([orthogonal(n, 1), orthogonal(n, 2)])
    axis = 1 if side == "left" else 2
    order = torch.randperm(n, generator=generator(3))
    assert torch.allclose(carried(V, U.mT @ U, side), V)
    assert torch.allclose(carried(V, -U[..., order].mT @ U, side), V.index_select(axis, order))
    new = torch.stack([orthogonal(n, 4), orthogonal(n, 5)])
    found = carried(V, new.mT @ U, side)
    assert torch.allclose(found.sum(axis), V.sum(axis))
    assert torch.allclose(carried(torch.ones_like(V), new.mT @ U.half().double(), side), torch.ones_like(V))


@pytest.mark.parametrize("side", ["left", "right"])
def test_small_moments_are_carried_as_precisely_as_large_ones(side):
    """By a rough product of first halves: eleven bits of each entry, though they differ by eight orders."""
    sizes = torch.logspace(-5, 0, 40).view(1, -1, 1) * torch.logspace(0, -2, 40)
    V = (normal(1, 40, 40).square().clamp(0.1, 1.0) * sizes).float()
    turn = torch.linalg.matrix_exp(0.01 * (normal(1, 40, 40) - normal(1, 40, 40).mT)).float()
    found, exact = carried(V, turn, side, HALF_PAIRS), carried(V.double(), turn.double(), side)
    assert float(((found - exact).abs() / exact).max()) < 2e-3


def test_arguments_are_checked():
    eye = torch.eye(2)
    with pytest.raises(InputError, match="sweeps=0"):
        tracked_basis(eye, eye, 0)


@pytest.mark.parametrize("products", [TORCH, HALF_PAIRS])
def test_a_basis_stays_one_where_all_of_it_turns(products):
    """A factor of few examples, most of it new at every refresh: many vectors turn at once, by large angles."""
    n, m = 256, 64
    sizes, draws = torch.logspace(0, -3, m), generator(0)

    def normals(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws) / m**0.5

    M, features = torch.zeros(n, n), normals(n, m)
    U = torch.eye(n)[None]
    for turn in range(9):
        for _ in range(10):
            features = 0.97 * features + 0.25 * normals(n, m)
            G = (features * sizes) @ normals(m, m)
            M = 0.95 * M + 0.05 * G @ G.mT
        U = torch.linalg.eigh(M)[1][None] if turn == 0 else tracked_basis(M[None], U, products=products)[0]
    stretched = torch.linalg.svdvals(U[0])
    assert 0.97 < float(stretched.min()) <= float(stretched.max()) < 1.01
