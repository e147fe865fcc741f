import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.foundations.errors import InputError
from layerwise.foundations.linalg import accumulate_gram, gram, mirror_, symmetric_product

F64 = torch.float64


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


@pytest.mark.parametrize("n", [1, 2, 256, 257, 384, 385, 512, 785])
def test_gram_is_the_product_and_exactly_symmetric(n):
    X = draw(60, n)
    G = gram(X)
    torch.testing.assert_close(G, X.T @ X)
    assert torch.equal(G, G.T)


@given(
    n=st.integers(0, 9),
    m=st.integers(0, 9),
    batch=st.lists(st.integers(0, 3), max_size=3),
    wide=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_gram_of_any_shape(n, m, batch, wide):
    limits = symmetric_product.PANEL_ROWS, symmetric_product.PLAIN_COLUMNS
    if wide:  # panels of 2 columns, so that small shapes take the path of large ones
        symmetric_product.PANEL_ROWS, symmetric_product.PLAIN_COLUMNS = 2, 0
    try:
        X = draw(*batch, m, n)
        G = gram(X)
    finally:
        symmetric_product.PANEL_ROWS, symmetric_product.PLAIN_COLUMNS = limits
    torch.testing.assert_close(G, X.mT @ X)
    assert torch.equal(G, G.mT)


@pytest.mark.parametrize("n", [5, 500, 600])
def test_gram_of_strided_input(n):
    X = draw(n, 2 * 30)[:, ::2].T
    torch.testing.assert_close(gram(X), X.T @ X)
    stack = torch.stack([X, 2 * X]).mT.contiguous().mT
    torch.testing.assert_close(gram(stack), stack.mT @ stack)


@pytest.mark.parametrize("n", [20, 400])
def test_accumulation_equals_the_product_of_all_rows(n):
    X = draw(90, n)
    total = torch.zeros(n, n, dtype=F64)
    for part in X.split(40):
        assert accumulate_gram(total, part) is total
    torch.testing.assert_close(mirror_(total), X.T @ X)
    moving = mirror_(accumulate_gram(total.clone(), X, alpha=0.25, beta=0.5))
    torch.testing.assert_close(moving, 0.75 * X.T @ X)
    fresh = mirror_(accumulate_gram(torch.full_like(total, float("nan")), X, beta=0.0))
    torch.testing.assert_close(fresh, X.T @ X)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [7, 400])
def test_half_types_accumulate_in_float32(monkeypatch, dtype, n):
    monkeypatch.setattr(symmetric_product, "CAST_ENTRIES", 16 * n)  # several chunks
    X = draw(100, n, dtype=dtype)
    G = gram(X)
    assert G.dtype == torch.float32
    torch.testing.assert_close(G, X.float().T @ X.float())
    stacked = gram(X.view(2, 50, n))
    torch.testing.assert_close(stacked.sum(0), G, rtol=1e-4, atol=1e-4)


def test_a_total_of_lower_precision_is_refused():
    with pytest.raises(InputError, match="float32"):
        accumulate_gram(torch.zeros(2, 2), draw(3, 2))
    wide = accumulate_gram(torch.zeros(2, 2, dtype=F64), draw(3, 2, dtype=torch.float32))
    assert wide.dtype == F64


def test_gram_is_differentiable():
    X = draw(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(gram, X)
