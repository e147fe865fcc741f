"""A matrix that has grown in a few directions: its last inverse, made fit for a step of Newton's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layerwise.optim.cuda.linalg.newton_inverse import accepted, refined_inverse
from layerwise.optim.cuda.linalg.outliers import without_outliers
from layerwise.optim.cuda.linalg.products import HALF_PAIRS, TORCH, Products

N = 96


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthonormal(n: int, k: int, seed: int) -> Tensor:
    return torch.linalg.qr(torch.randn(n, k, generator=generator(seed), dtype=torch.float64))[0]


def damped(condition: float, seed: int, n: int = N) -> Tensor:
    """Random basis, log-spaced eigenvalues of mean 1, damping 1e-2 added."""
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)), n, dtype=torch.float64)
    U = orthonormal(n, n, seed)
    return (U * (values / values.mean() + 1e-2)) @ U.mT


def grown(M: Tensor, k: int, times: float, seed: int) -> Tensor:
    """``M^½ (I + (times − 1) W Wᵀ) M^½``: k directions, in M's own measure, have grown by a factor."""
    values, vectors = torch.linalg.eigh(M)
    half = (vectors * values.sqrt()) @ vectors.mT
    W = orthonormal(len(M), k, seed)
    return half @ (torch.eye(len(M), dtype=M.dtype) + (times - 1) * W @ W.mT) @ half


def is_accepted(M: Tensor, X: Tensor) -> bool:
    _, residual, radius = refined_inverse(M, X)
    return bool(accepted(residual, radius).all())


@settings(max_examples=40, deadline=None)
@given(
    k=st.integers(1, 20),
    times=st.sampled_from([10.0, 100.0, 1000.0]),
    condition=st.sampled_from([1e2, 1e4, 1e6]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)  # float32 does not keep enough of what is small where a matrix grows by much
def test_growth_in_a_few_directions_is_taken_in(k: int, times: float, condition: float, seed: int, dtype: torch.dtype):
    """Newton's step from the last inverse is refused; from the one without outliers it is accepted, and right."""
    old, times = damped(condition, seed), 10.0 if dtype == torch.float32 else times
    M = grown(old, k, times, seed + 1)
    last, now = torch.linalg.inv(old).to(dtype)[None], M.to(dtype)[None]
    assert not is_accepted(now, last)
    X = without_outliers(now, last)[0]
    refined, residual, radius = refined_inverse(now, X)
    assert bool(accepted(residual, radius).all())
    z = torch.randn(N, 8, generator=generator(seed + 2), dtype=torch.float64)
    truth = torch.linalg.solve(M, z)
    assert float((refined[0].double() @ z - truth).norm() / truth.norm()) < 2e-2


@pytest.mark.parametrize("products", [TORCH, HALF_PAIRS])
def test_directions_that_have_hardly_doubled_are_found(products: Products):
    """Among seven times as many that stayed: the power method would not part them without its shift."""
    old = damped(1e3, 1, 224)
    M, X = grown(old, 32, 2.5, 2).float()[None], torch.linalg.inv(old).float()[None]
    found, drift = without_outliers(M, X, columns=32, products=products)
    _, residual, radius = refined_inverse(M, found, products=products)
    assert bool(accepted(residual, radius).all()), (residual, radius)
    assert 0.5 < float(drift.grown) < 3
    assert float(drift.typical) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("times", [1.0, 1.3, 30.0])
def test_symmetric_and_positive_definite(times: float, dtype: torch.dtype):
    old = torch.stack([damped(1e3, seed) for seed in (1, 2)])
    M = torch.stack([grown(A, 8, times, 5) for A in old]).to(dtype)
    X = without_outliers(M, torch.linalg.inv(old).to(dtype))[0]
    assert X.shape == M.shape
    assert X.dtype == dtype
    assert torch.allclose(X, X.mT, rtol=0, atol=1e-6 * float(X.abs().max()))
    assert float(torch.linalg.eigvalsh(X.double()).min()) > 0


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-10), (torch.float32, 1e-3)])
def test_an_inverse_that_is_right_stays(dtype: torch.dtype, tol: float):
    M = damped(1e3, 4)
    X = torch.linalg.inv(M).to(dtype)[None]
    found = without_outliers(M.to(dtype)[None], X)[0]
    assert float((found - X).norm() / X.norm()) < tol


def test_exact_on_the_directions_that_grew():
    """``X' M w = w`` where the growth stands out clearly."""
    old, w = damped(1e2, 7), orthonormal(N, 4, 8)
    M = old + 1e3 * (w @ w.mT)
    X = without_outliers(M[None], torch.linalg.inv(old)[None])[0][0]
    v = torch.linalg.solve(old, w)  # the directions in which X M is largest
    assert float((X @ (M @ v) - v).norm() / v.norm()) < 1e-3


def test_each_of_a_batch_alone():
    old = torch.stack([damped(1e3, seed) for seed in range(3)])
    M = torch.stack([grown(A, 5, t, 3) for A, t in zip(old, (1.0, 20.0, 500.0), strict=True)])
    X = torch.linalg.inv(old)
    together = without_outliers(M, X)[0]
    for k in range(3):
        alone = without_outliers(M[k : k + 1], X[k : k + 1])[0][0]
        assert torch.allclose(together[k], alone, rtol=0, atol=1e-8 * float(alone.abs().max()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["M", "X"])
def test_what_is_not_finite_stays_so_and_is_alone(value: float, which: str):
    old = torch.stack([damped(1e2, seed) for seed in (1, 2)]).float()
    given_ = {"M": old.clone(), "X": torch.linalg.inv(old)}
    given_[which][1, 2, 3] = given_[which][1, 3, 2] = value
    found = without_outliers(given_["M"], given_["X"])[0]
    assert bool(torch.isfinite(found[0]).all())
    assert not bool(torch.isfinite(found[1]).all())


def test_what_is_not_definite_raises_nothing():
    M = damped(1e2, 1)
    found = without_outliers(-M[None], torch.linalg.inv(M)[None])[0]
    assert not bool(torch.isfinite(found).all())


@pytest.mark.parametrize("n", [1, 2, 7, 31, 33])
def test_smaller_than_the_columns(n: int):
    """All directions are taken in: the inverse is exact."""
    old = damped(1e2, 3, n)
    M = grown(old, n, 50.0, 4)
    X = without_outliers(M[None], torch.linalg.inv(old)[None])[0][0]
    if n <= 32:
        assert float((X @ M - torch.eye(n, dtype=M.dtype)).abs().max()) < 1e-6
    assert bool(torch.isfinite(X).all())
