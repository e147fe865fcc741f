"""Pairs of float16: their errors, their products, and why one float16 matrix is not enough."""

import pytest
import torch
from torch import Tensor

from layerwise.foundations.errors import InputError
from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.linalg.split_fp16 import HalfPair

ENTRY, FLOOR = 2.0**-22, 2.0**-39  # |error| ≤ ENTRY·|x| + FLOOR·max|X|, as the module states
PRODUCT = 1e-6  # ‖error‖_F ≤ PRODUCT·‖A‖_F ‖B‖_F


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def product_error(A: Tensor, B: Tensor, C: Tensor) -> float:
    A, B = A.double(), B.double()
    return float(((C.double() - A @ B).norm(dim=(-2, -1)) / (A.norm(dim=(-2, -1)) * B.norm(dim=(-2, -1)))).max())


@pytest.mark.parametrize("size", [1e-29, 1e-5, 1.0, 3e4, 1e30])
def test_entries_keep_22_bits(size: float):
    spread = torch.exp2(-30 * torch.rand(40, 50, generator=torch.Generator().manual_seed(1)))
    X = size * randn(40, 50) * spread
    pair = split_fp16.split(X)
    error = (pair.value().double() - X.double()).abs()
    assert (error <= ENTRY * X.abs() + FLOOR * X.abs().max()).all()
    large = X.abs() > 2.0**-17 * X.abs().max()
    assert large.any()
    assert (error[large] <= 2.0**-21 * X[large].abs()).all()
    assert 2.0**14 <= float(X.abs().max() * pair.scale) < 2.0**15


@pytest.mark.parametrize("amax", [0.75, 1.0, 1.9999999, 2.0, 3.0, 2.0**-100, 2.0**100, 3.3e38, 1.2e-38, 1e-42])
def test_scale_is_an_exact_power_of_two(amax: float):
    scale = split_fp16.pair_scale(torch.tensor([[amax, -amax / 3]]))
    mantissa, exponent = torch.frexp(scale)
    assert float(mantissa) == 0.5
    assert int(exponent) - 1 <= split_fp16.LARGEST_EXPONENT
    assert float(scale.reciprocal()) * float(scale) == 1
    scaled = amax * float(scale)
    assert scaled < 2.0**15
    assert scaled >= 2.0**14 or float(scale) == 2.0**split_fp16.LARGEST_EXPONENT
    assert torch.isfinite(split_fp16.split(torch.tensor([[amax]])).value()).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_are_split_too(dtype: torch.dtype):
    X = randn(5, 7, dtype=dtype)
    error = (split_fp16.split(X).value().double() - X.double()).abs()
    assert (error <= ENTRY * X.double().abs() + FLOOR * X.double().abs().max()).all()


def test_a_given_scale_is_used():
    X = randn(3, 4, 5)
    scale = torch.full((3,), 2.0**8)
    pair = split_fp16.split(X, scale)
    assert pair.scale is scale
    assert torch.allclose(pair.value(), X, rtol=2.0**-20, atol=2.0**-31)
    assert torch.isnan(split_fp16.split(torch.full((1, 1), 1e6), torch.tensor(1.0)).value()).all()


def test_the_input_is_not_changed():
    X = randn(4, 4)
    before = X.clone()
    split_fp16.split(X)
    split_fp16.product(X, X)
    assert torch.equal(X, before)


def test_zeros_and_empty_matrices():
    X = torch.zeros(2, 3, 4)
    X[1, 0, 0] = 5.0
    pair = split_fp16.split(X)
    assert pair.scale.tolist() == [1.0, 2.0**12]
    assert torch.equal(pair.value(), X)
    empty = split_fp16.split(torch.zeros(2, 0, 4))
    assert split_fp16.product(empty.mT, empty).shape == (2, 4, 4)
    assert split_fp16.split(torch.zeros(0, 3, 4)).value().shape == (0, 3, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_becomes_nan_and_stays_in_its_matrix(bad: float):
    X = randn(3, 4, 4)
    X[1, 2, 3] = bad
    value = split_fp16.split(X).value()
    assert torch.isnan(value[1]).all()
    assert torch.isfinite(value[[0, 2]]).all()
    C = split_fp16.product(X, randn(3, 4, 4, seed=1))
    assert torch.isnan(C[1]).all()
    assert torch.isfinite(C[[0, 2]]).all()


def test_views_and_parts_of_a_stack():
    X = randn(5, 3, 4)
    pair = split_fp16.split(X)
    assert torch.equal(pair.mT.value(), pair.value().mT)
    assert torch.equal(pair[1:3].value(), pair.value()[1:3])
    assert torch.equal(pair[2].value(), pair.value()[2])
    assert pair.mT.hi.data_ptr() == pair.hi.data_ptr()
    with pytest.raises(InputError, match="stack of matrices"):
        pair[2][0]


@pytest.mark.parametrize("left", [1e-30, 1e-12, 1.0, 1e15, 1e30])
def test_products_keep_float32_accuracy(left: float):
    A, B = left * randn(3, 20, 65), randn(3, 65, 33, seed=1) / left
    assert product_error(A, B, split_fp16.product(A, B)) < PRODUCT
    C, scale = split_fp16.scaled_product(split_fp16.split(A), split_fp16.split(B))
    assert product_error(A, B, C / scale[:, None, None]) < PRODUCT


def test_products_of_two_small_or_two_large_matrices():
    small, large = 1e-16 * randn(8, 8), 1e17 * randn(8, 8, seed=1)
    for X in (small, large):
        assert product_error(X, X, split_fp16.product(X, X)) < PRODUCT
    assert torch.equal(split_fp16.product(1e-10 * small, 1e-10 * small), torch.zeros(8, 8))  # 1e-52 in float32


def test_products_of_views_and_of_broadcast_stacks():
    A, B = randn(2, 3, 12, 20)[..., ::2].mT, randn(12, 7, seed=2)
    assert product_error(A, B.expand(2, 3, 12, 7), split_fp16.product(A, B)) < PRODUCT
    pair = split_fp16.split(A)
    assert product_error(A.mT, A, split_fp16.product(pair.mT, A)) < PRODUCT
    G = split_fp16.product(pair.mT, pair)
    assert torch.allclose(G, G.mT, rtol=0, atol=1e-6 * float(G.abs().max()))


@pytest.mark.parametrize("symmetric", [False, True])
def test_what_is_added_to_products(symmetric: bool):
    X, D = randn(2, 9, 6), randn(2, 6, 6, seed=1)
    D = D + D.mT
    X_, out = split_fp16.prepared(X), D.clone()
    expected = D - 2 * X.mT @ X + 3 * torch.eye(6)
    found = split_fp16.product(X_.mT, X_, add=D, alpha=-2, identity=3, symmetric=symmetric)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert split_fp16.product(X_.mT, X_, add=out, alpha=-2, identity=3, symmetric=symmetric, out=out) is out
    assert torch.equal(out, found)
    assert not symmetric or torch.equal(found, found.mT)
    torch.testing.assert_close(split_fp16.product(X, X.mT), X @ X.mT, rtol=0, atol=1e-4)
    assert split_fp16.prepared(X_) is X_
    gram = X.mT @ X
    torch.testing.assert_close(split_fp16.prepared(gram, definite=True).value(), gram, rtol=1e-5, atol=1e-5)


def test_rough_products_keep_11_bits():
    A, B = 1e-9 * randn(3, 20, 65), randn(3, 65, 33, seed=1)
    C = split_fp16.rough_product(A, B)
    assert 1e-6 < product_error(A, B, C) < 2.0**-11
    pair = split_fp16.split(A)
    assert torch.equal(split_fp16.rough_product(pair, split_fp16.halved(B)), C)
    assert torch.equal(split_fp16.rough_product(B.mT, pair.half.mT), split_fp16.rough_product(B.mT, A.mT))
    assert split_fp16.halved(A).device == A.device


def test_axes_that_do_not_fit():
    with pytest.raises(InputError, match="as many columns"):
        split_fp16.rough_product(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(InputError, match="as many columns"):
        split_fp16.product(torch.ones(2, 3), torch.ones(2, 3))


def spectrum(d: int, seed: int, condition: float = 1e6) -> tuple[Tensor, Tensor]:
    """Eigenvalues of mean 1 in geometric progression, and a random basis."""
    values = torch.logspace(0, -float(torch.log10(torch.tensor(condition))), d, dtype=torch.float64)
    basis = torch.linalg.qr(randn(d, d, seed=seed, dtype=torch.float64)).Q
    return values / values.mean(), basis


def function(values: Tensor, basis: Tensor) -> Tensor:
    return (basis * values) @ basis.mT


def only_hi(X: Tensor) -> HalfPair:
    pair = split_fp16.split(X)
    return HalfPair(pair.hi, torch.zeros_like(pair.lo), pair.scale)


@pytest.mark.parametrize(("m", "n"), [(96, 160), (256, 128)])
@pytest.mark.parametrize("kind", ["random", "gradient"])
def test_direction_of_ill_conditioned_factors(m: int, n: int, kind: str):
    (p, U), (q, V) = spectrum(m, 1), spectrum(n, 2)
    G = randn(m, n, seed=3, dtype=torch.float64)
    if kind == "gradient":
        G = function(p.sqrt(), U) @ G @ function(q.sqrt(), V)
    P_inverse, Q_inverse = function(1 / (p + 1e-3), U), function(1 / (q + 1e-3), V)
    # The gradient and what the optimizer holds are float32; the reference starts from that same gradient.
    G = G.float()
    D = P_inverse @ G.double() @ Q_inverse

    def error(split) -> float:
        left, right = split(P_inverse.float()), split(Q_inverse.float())
        half = split_fp16.product(left, split(G))
        found = split_fp16.product(split(half), right)
        return float((found.double() - D).norm() / D.norm())

    assert error(split_fp16.split) < 1e-3
    if kind == "gradient":
        assert error(only_hi) > 1e-2  # why pairs
