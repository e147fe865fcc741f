import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from error_sentences import THREE
from layerwise.foundations.errors import InputError, NumericalError
from layerwise.foundations.linalg import guarded_cholesky, guarded_eigh, guarded_inverse

F64 = torch.float64


def spd(n, *batch, seed=0, dtype=F64, low=-2.0, high=1.0):
    """Random positive definite matrices with eigenvalues 10**low … 10**high."""
    g = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(*batch, n, n, generator=g, dtype=F64)).Q
    s = torch.logspace(low, high, n, dtype=F64)
    return ((Q * s) @ Q.mT).to(dtype), s


@given(n=st.integers(0, 7), batch=st.lists(st.integers(0, 3), max_size=2), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_eigh_reconstructs_the_symmetric_part(n, batch, seed):
    M = torch.randn(*batch, n, n, generator=torch.Generator().manual_seed(seed), dtype=F64)
    s, U = guarded_eigh(M, clamp=False)
    torch.testing.assert_close((U * s[..., None, :]) @ U.mT, (M + M.mT) / 2)
    torch.testing.assert_close(U.mT @ U, torch.eye(n, dtype=F64).expand(*batch, n, n))
    assert (s.diff(dim=-1) >= 0).all()


def test_eigh_ill_conditioned_float32_is_clamped():
    M, s = spd(40, dtype=torch.float32, low=-12, high=3)
    values, U = guarded_eigh(M)
    assert values.dtype == torch.float32
    assert (values >= 0).all()
    assert (guarded_eigh(M, clamp=False)[0] < 0).any()  # the clamp had something to do
    torch.testing.assert_close(values.double(), s, rtol=0, atol=1e-6 * 1e3)
    torch.testing.assert_close(U.mT @ U, torch.eye(40), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_eigh_of_half_types_is_float32(dtype):
    s, U = guarded_eigh(torch.eye(3, dtype=dtype))
    assert s.dtype == U.dtype == torch.float32
    assert guarded_cholesky(torch.eye(3, dtype=dtype)).dtype == torch.float32


def test_eigh_of_entries_near_overflow():
    big = torch.full((2, 2), 3e38).fill_diagonal_(0.0)
    s, _ = guarded_eigh(big, clamp=False)
    torch.testing.assert_close(s, torch.tensor([-3e38, 3e38]))


@pytest.mark.parametrize("decompose", [guarded_eigh, guarded_cholesky])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_entries_are_counted_and_named(decompose, value):
    M = torch.eye(3)
    M[0, 1] = M[1, 2] = value
    with pytest.raises(NumericalError, match=r"factor A of `fc1`.*2 of 9 entries not finite") as error:
        decompose(M, name="factor A of `fc1`")
    assert re.search(THREE, str(error.value))


@pytest.mark.parametrize("decompose", [guarded_eigh, guarded_cholesky])
def test_a_matrix_that_is_not_square_is_refused(decompose):
    with pytest.raises((InputError, TypeError)):  # TypeError where shapes are checked at the call
        decompose(torch.zeros(2, 3))


@pytest.mark.parametrize("how", ["raises", "nan"])
def test_eigh_falls_back_to_float64(monkeypatch, how):
    eigh, seen = torch.linalg.eigh, []

    def fails_in_float32(M):
        seen.append(M.dtype)
        if M.dtype == torch.float32:
            if how == "raises":
                raise torch.linalg.LinAlgError("did not converge")
            return torch.full(M.shape[:-1], float("nan")), torch.full(M.shape, float("nan"))
        return eigh(M)

    monkeypatch.setattr(torch.linalg, "eigh", fails_in_float32)
    M, s = spd(5, dtype=torch.float32)
    values, U = guarded_eigh(M)
    assert seen == [torch.float32, F64]
    assert values.dtype == U.dtype == torch.float32
    torch.testing.assert_close(values, s.float())


def test_eigh_that_never_converges_says_so(monkeypatch):
    def fails(M):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.raises(NumericalError, match=r"factor G .*did not converge.*damping"):
        guarded_eigh(torch.eye(2), name="factor G")


@given(n=st.integers(0, 6), batch=st.lists(st.integers(0, 2), max_size=2), damping=st.sampled_from([0.0, 0.3]))
@settings(max_examples=30, deadline=None)
def test_cholesky_is_the_root(n, batch, damping):
    M, _ = spd(n, *batch)
    kept = M.clone()
    L = guarded_cholesky(M, damping=damping)
    torch.testing.assert_close(L @ L.mT, M + damping * torch.eye(n, dtype=F64))
    assert torch.equal(L, L.tril())
    assert torch.equal(M, kept)


def test_cholesky_succeeds_in_float64_where_float32_fails():
    """In float32 the damping vanishes beside M, and the second pivot is 0 or rounding noise, whatever LAPACK says."""
    L = guarded_cholesky(torch.ones(2, 2), damping=1e-9)
    assert L.dtype == torch.float32
    assert L[1, 1].item() == pytest.approx((2e-9) ** 0.5, rel=1e-5)


def test_cholesky_does_not_trust_a_pivot_that_is_rounding_noise(monkeypatch):
    """As MKL has it with some instruction sets: success, and a pivot of the size of the rounding errors."""
    cholesky = torch.linalg.cholesky_ex

    def lenient(A, **options):
        if A.dtype == torch.float32:
            return torch.tensor([[1.0, 0.0], [1.0, 2e-4]]), torch.zeros((), dtype=torch.int32)
        return cholesky(A, **options)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", lenient)
    L = guarded_cholesky(torch.ones(2, 2), damping=1e-9)
    assert L[1, 1].item() == pytest.approx((2e-9) ** 0.5, rel=1e-5)


def test_cholesky_of_an_indefinite_matrix_names_the_eigenvalue():
    with pytest.raises(NumericalError, match=r"factor A .*eigenvalue before damping -2.*Pass damping > 0"):
        guarded_cholesky(torch.diag(torch.tensor([1.0, -2.0])), name="factor A")
    with pytest.raises(NumericalError, match=r"damping=1,.*larger than this"):
        guarded_cholesky(torch.diag(torch.tensor([1.0, -2.0])), damping=1.0)
    with pytest.raises(InputError, match="damping=-1"):
        guarded_cholesky(torch.eye(2), damping=-1.0)


def test_inverses_of_damped_matrices():
    X = torch.randn(3, 9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    M, shift = X.mT @ X, torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    given = M.clone()
    found = guarded_inverse(M, shift)
    torch.testing.assert_close(found, torch.linalg.inv(M + shift.view(-1, 1, 1) * torch.eye(5, dtype=torch.float64)))
    assert torch.equal(M, given)


def test_an_inverse_whose_pivot_is_rounding_noise_is_found_in_float64():
    M, shift = torch.ones(1, 2, 2), torch.tensor([2.0**-23])
    exact = torch.linalg.inv(M.double() + float(shift) * torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(guarded_inverse(M, shift).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 0)])
def test_an_inverse_of_what_is_not_finite_is_refused(place):
    M = torch.eye(2).unsqueeze(0)
    M[0, place[0], place[1]] = torch.nan
    with pytest.raises(NumericalError):
        guarded_inverse((M + M.mT) / 2, torch.ones(1))
