"""Products with what is added to them: plain and of pairs, precise and rough, say the same."""

import pytest
import torch

from layerwise.optim.cuda.linalg.products import HALF_PAIRS, TORCH, Products, TorchProducts
from layerwise.optim.cuda.linalg.split_fp16 import HalfPair, split
from random_tensors import randn


@pytest.mark.parametrize("products", [TORCH, HALF_PAIRS])
@pytest.mark.parametrize("symmetric", [False, True])
def test_what_is_added(products: Products, symmetric: bool):
    assert isinstance(products, Products)
    X, D = randn(2, 9, 6), randn(2, 6, 6, seed=1)
    D = D + D.mT
    X_ = products.prepared(X)
    found = products.precise(X_.mT, X_, add=D, alpha=-2, identity=3, symmetric=symmetric)
    torch.testing.assert_close(found, D - 2 * X.mT @ X + 3 * torch.eye(6), rtol=0, atol=1e-4)
    rough = products.rough(X_.mT, X_, add=D, alpha=0.5, symmetric=symmetric)
    torch.testing.assert_close(rough, D + X.mT @ X / 2, rtol=0, atol=1e-2)
    if symmetric:
        assert torch.equal(found, found.mT)
        assert torch.equal(rough, rough.mT)
    torch.testing.assert_close(products.precise(X, X.mT), X @ X.mT, rtol=0, atol=1e-4)


def test_a_rough_product_is_the_given_one():
    products = TorchProducts(roughly=lambda A, B: 0 * A @ B)
    assert not products.rough(torch.eye(2), torch.eye(2)).any()
    assert products.precise(torch.eye(2), torch.eye(2)).any()


def test_pairs_are_prepared_already():
    pair = split(randn(3, 3))
    assert HALF_PAIRS.prepared(pair) is pair
    assert isinstance(HALF_PAIRS.prepared(randn(3, 3), definite=True), HalfPair)
    assert torch.equal(TORCH.prepared(pair), pair.value())
