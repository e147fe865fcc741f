"""The orders of contraction agree with the sum as it is written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import close, gaussian, relative
from torch import Tensor

from layerwise.kernel.contraction import ORDERS, contract
from layerwise.layers.io.one_hot import OneHot
from layerwise.layers.io.standard import Gradients, Standard

SIZE = st.integers(1, 4)


def _expected(left: Tensor, g: Tensor, right: Tensor, g2: Tensor) -> Tensor:
    """Θ[n v, m w] = ⟨Σ_s g aᵀ, Σ_t g′ a′ᵀ⟩, as it is written."""
    R = torch.einsum("vnsko,nski->nvkoi", g, left)
    R2 = torch.einsum("wmtko,mtki->mwkoi", g2, right)
    return torch.einsum("nvkoi,mwkoi->nvmw", R, R2)


@settings(max_examples=40, deadline=None)
@given(V=SIZE, W=SIZE, N=SIZE, M=SIZE, S=SIZE, T=SIZE, K=st.integers(1, 3), O=SIZE, I=SIZE, seed=st.integers(0, 99))
def test_orders_agree(V: int, W: int, N: int, M: int, S: int, T: int, K: int, O: int, I: int, seed: int):
    a, g = gaussian(N, S, K, I, seed=seed), gaussian(V, N, S, K, O, seed=seed + 1)
    a2, g2 = gaussian(M, T, K, I, seed=seed + 2), gaussian(W, M, T, K, O, seed=seed + 3)
    expected = _expected(a, g, a2, g2)
    for order in ORDERS:
        assert relative(contract(order, Standard(a, g), Standard(a2, g2)), expected) < 1e-12, order


def _dense(index: Tensor, size: int) -> Tensor:
    """One-hot vectors, zero for padding."""
    return torch.stack([(index == token).double() for token in range(size)], dim=-1).unsqueeze(2)


@settings(max_examples=40, deadline=None)
@given(
    V=SIZE,
    W=SIZE,
    N=SIZE,
    M=SIZE,
    S=SIZE,
    T=SIZE,
    O=SIZE,
    size=st.integers(1, 6),
    least=st.sampled_from([-1, 0]),
    seed=st.integers(0, 99),
)
def test_orders_agree_on_indices(
    V: int, W: int, N: int, M: int, S: int, T: int, O: int, size: int, least: int, seed: int
):
    """An index of −1 is padding, and may be all there is."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(least, size, (N, S), generator=generator)
    index2 = torch.randint(least, size, (M, T), generator=generator)
    g, g2 = gaussian(V, N, S, 1, O, seed=seed), gaussian(W, M, T, 1, O, seed=seed + 1)
    expected = _expected(_dense(index, size), g, _dense(index2, size), g2)
    for order in ORDERS:
        found = contract(order, Standard(OneHot(index, size), g), Standard(OneHot(index2, size), g2))
        assert relative(found, expected, scale=1.0) < 1e-12, order


@pytest.mark.parametrize("order", ORDERS)
def test_padding_alone_gives_zero(order: str):
    index, g = torch.full((2, 3), -1), gaussian(2, 2, 3, 1, 4)
    side = Standard(OneHot(index, 5), g)
    assert not contract(order, side, side).any()


@pytest.mark.parametrize("order", ORDERS)
def test_a_large_vocabulary_is_never_written_out(order: str):
    """A row of 10¹² tokens could not be."""
    index = torch.tensor([[3, 10**12 - 1], [10**12 - 1, -1]])
    side = Standard(OneHot(index, 10**12), gaussian(2, 2, 2, 1, 3))
    small = Standard(OneHot(torch.tensor([[0, 1], [1, -1]]), 2), side.g)
    close(contract(order, side, side), contract("rows", small, small))


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_without_inputs_are_rows_whatever_the_order(order: str):
    rows, rows2 = gaussian(2, 3, 1, 4, 5), gaussian(3, 2, 1, 4, 5, seed=1)
    expected = torch.einsum("vnkoi,wmkoi->nvmw", rows, rows2)
    close(contract(order, Gradients(rows), Gradients(rows2)), expected)


@pytest.mark.parametrize("order", ORDERS)
def test_bfloat16_parts_are_contracted_in_their_own_precision(order: str):
    a, g = gaussian(2, 3, 1, 4), gaussian(2, 2, 3, 1, 5)
    side = Standard(a.bfloat16(), g.bfloat16())
    exact = _expected(a, g, a, g)
    assert relative(contract(order, side, side), exact) < 5e-2
