import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.foundations.errors import InputError
from layerwise.foundations.linalg import lanczos_top

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def symmetric(s, seed=1, dtype=F64):
    Q = torch.linalg.qr(torch.randn(len(s), len(s), generator=generator(seed), dtype=F64)).Q
    return ((Q * s) @ Q.T).to(dtype)


SPECTRA = {
    "decaying": torch.arange(1, 161, dtype=F64) ** -1.0,
    "cluster at the edge": torch.cat([torch.linspace(0, 1, 159, dtype=F64), torch.tensor([1.001], dtype=F64)]),
    "indefinite": torch.linspace(-30, 2, 160, dtype=F64),
    "all negative": -torch.linspace(1, 2, 160, dtype=F64),
    "degenerate": torch.cat([torch.full((4,), 5.0, dtype=F64), torch.linspace(0, 4, 156, dtype=F64)]),
    "low rank": torch.cat([torch.tensor([3.0, 3.0], dtype=F64), torch.zeros(158, dtype=F64)]),
    "identity": torch.ones(160, dtype=F64),
    "zero": torch.zeros(160, dtype=F64),
}


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("name", SPECTRA)
def test_finds_the_top_with_multiplicities(name, k):
    s = SPECTRA[name]
    M = symmetric(s)
    values, U, residuals = lanczos_top(lambda X: M @ X, 160, k, generator=generator(), dtype=F64)
    torch.testing.assert_close(values, s.sort().values[-k:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(U.T @ U, torch.eye(k, dtype=F64), rtol=0, atol=1e-10)
    true = torch.linalg.vector_norm(M @ U - U * values, dim=0)
    torch.testing.assert_close(residuals, true, rtol=1e-3, atol=1e-12)
    assert (residuals <= 1e-8 * max(abs(values[-1]), 1e-5)).all()


def test_float32_ill_conditioned():
    s = torch.logspace(-9, 3, 200, dtype=F64)
    M = symmetric(s, dtype=torch.float32)
    values, _, residuals = lanczos_top(lambda X: M @ X, 200, 5, generator=generator())
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), s[-5:], rtol=1e-5, atol=1e-2)
    assert (residuals <= 1e-5 * values[-1]).all()


@given(d=st.integers(1, 9), data=st.data(), seed=st.integers(0, 30))
@settings(max_examples=40, deadline=None)
def test_small_dimensions_are_exact(d, data, seed):
    k = data.draw(st.integers(1, d))
    s = torch.randint(-2, 3, (d,), generator=generator(seed)).to(F64)  # repeats and zeros
    M = symmetric(s, seed)
    values, U, _ = lanczos_top(lambda X: M @ X, d, k, generator=generator(), dtype=F64)
    torch.testing.assert_close(values, s.sort().values[-k:])
    torch.testing.assert_close(M @ U, U * values)


def test_stopping_short_is_visible_in_the_residuals():
    M = symmetric(torch.linspace(0, 1, 160, dtype=F64))
    _, _, residuals = lanczos_top(lambda X: M @ X, 160, 2, generator=generator(), dtype=F64, max_steps=2)
    assert (residuals > 1e-3).all()


def test_same_seed_same_result_and_the_global_state_is_untouched():
    M = symmetric(SPECTRA["degenerate"])
    before = torch.get_rng_state()
    one, two = (lanczos_top(lambda X: M @ X, 160, 2, generator=generator(3), dtype=F64) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("k", [0, 4])
def test_wrong_k(k):
    with pytest.raises(InputError, match=f"k={k}"):
        lanczos_top(lambda X: X, 3, k, generator=generator())


@pytest.mark.parametrize("name", ["decaying", "indefinite", "low rank", "zero"])
def test_narrow_blocks_find_the_same(name):
    s, columns = SPECTRA[name], []
    M = symmetric(s)

    def product(X):
        columns.append(X.shape[1])
        return M @ X

    values, U, residuals = lanczos_top(product, 160, 12, generator=generator(), dtype=F64, block=3)
    torch.testing.assert_close(values, s.sort().values[-12:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(U.T @ U, torch.eye(12, dtype=F64), rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.linalg.vector_norm(M @ U - U * values, dim=0), residuals, rtol=0, atol=1e-10)
    assert max(columns) == 3


def test_pairs_at_the_precision_of_the_products_are_not_asked_for_more():
    """Residuals stop falling where products are rounded; a goal below that is not reached by further products."""
    M = symmetric(torch.logspace(0, -4, 300, dtype=F64), dtype=torch.float32)
    products, step = [], 2.0**-20

    def product(X):
        products.append(1)
        return (M @ X / step).round() * step

    _, _, residuals = lanczos_top(product, 300, 20, generator=generator(), tol=1e-9)
    assert len(products) < 60  # of 200
    assert (residuals <= 2e-5).all()


def test_a_block_of_no_columns():
    with pytest.raises(InputError, match="block"):
        lanczos_top(lambda X: X, 3, 1, generator=generator(), block=0)
