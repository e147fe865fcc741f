"""Products of half-precision pairs and symmetric products on a GPU: torch's calls and Triton's kernels agree."""

import pytest
import torch
from torch import Tensor

from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.triton import products as triton_products
from random_tensors import cuda_randn as randn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run `make test-gpu` on one"),
]
needs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() and triton_products.available(torch.device("cuda"))),
    reason="needs triton and a GPU of capability 8.0",
)
SIZES = [769, 2304, 3073]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def product_error(A: Tensor, B: Tensor, C: Tensor) -> float:
    A, B = A.double(), B.double()
    return float(((C.double() - A @ B).norm(dim=(-2, -1)) / (A.norm(dim=(-2, -1)) * B.norm(dim=(-2, -1)))).max())


@pytest.mark.parametrize("n", SIZES)
def test_torch_products_of_pairs(n: int):
    A, B = 1e-9 * randn(2, 200, n), 1e7 * randn(2, n, 129, seed=1)
    left, right = split_fp16.split(A), split_fp16.split(B.mT).mT
    assert product_error(A, B, split_fp16.product(left, right)) < 1e-6
    assert product_error(A[0], B[0], split_fp16.product(left[0], right[0])) < 1e-6
    assert product_error(A, B[:1].expand_as(B), split_fp16.product(left, B[0])) < 1e-6
    assert torch.equal(left.value().cpu(), split_fp16.split(A.cpu()).value())


def test_scales_are_powers_of_two_on_the_device():
    amax = torch.exp2(torch.arange(-126, 128, device="cuda").double()).float()
    assert torch.equal(split_fp16.power_of_two_scale(amax).cpu(), split_fp16.power_of_two_scale(amax.cpu()))
    bad = torch.tensor([0.0, torch.inf, torch.nan]).cuda()
    assert split_fp16.power_of_two_scale(bad).isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("kernel", ["torch", pytest.param("triton", marks=needs_kernels)])
@pytest.mark.parametrize("d", [768, 2304])
def test_direction_of_ill_conditioned_factors(d: int, kernel: str):
    """Condition number 1e6, damping 1e-3 of the mean eigenvalue, a gradient-like matrix: error below 1e-2."""
    values = torch.logspace(0, -6, d, dtype=torch.float64, device="cuda")
    values = values / values.mean()
    U, V = (torch.linalg.qr(randn(d, d, seed=s).double()).Q for s in (1, 2))
    G = ((U * values.sqrt()) @ U.mT @ randn(d, d, seed=3).double() @ (V * values.sqrt()) @ V.mT).float()
    P_inverse, Q_inverse = (U / (values + 1e-3)) @ U.mT, (V / (values + 1e-3)) @ V.mT
    left, right = split_fp16.split(P_inverse.float()), split_fp16.split(Q_inverse.float())
    product = split_fp16.product if kernel == "torch" else triton_products.pair_product
    found = product(split_fp16.split(product(left, split_fp16.split(G))), right)
    assert relative(found, P_inverse @ G.double() @ Q_inverse) < 1e-2


@needs_kernels
@pytest.mark.parametrize(
    ("n", "dtype", "parts"),
    [
        (769, torch.bfloat16, None),
        (769, torch.float16, 3),
        (2304, torch.bfloat16, 3),
        (2304, torch.float16, 1),
        (3073, torch.bfloat16, 1),
        (3073, torch.float16, None),
    ],
)
def test_gram_update(n: int, dtype: torch.dtype, parts: int | None):
    X = randn(2, 700, n + 15).to(dtype)[..., 7 : n + 7]
    total = randn(2, n, n, seed=1)
    total += total.mT.clone()
    weight = torch.tensor([0.25, 1.0], device="cuda")
    expected = total.double().lerp(0.01 * X.double().mT @ X.double(), weight.double()[:, None, None])
    triton_products.gram_update_(total, X, weight, 0.01, parts=parts)
    assert relative(total, expected) < 1e-6
    assert torch.equal(total, total.mT)


@needs_kernels
@pytest.mark.parametrize("n", [768, 769])
def test_gram_update_of_separate_matrices(n: int):
    X = [randn(600, n, seed=seed).bfloat16() for seed in range(5)]
    total, weight = torch.ones(5, n, n, device="cuda"), randn(5).abs()
    weight[2] = 0.0
    expected = total.lerp(torch.stack([x.float().mT @ x.float() for x in X]), weight[:, None, None])
    triton_products.gram_update_(total, X, weight)
    assert relative(total, expected) < 1e-5


@needs_kernels
def test_gram_update_of_padded_columns_and_weight_zero():
    """Tensor cores add 16 products at a time, and cut off what is beneath the last of 24 bits.

    That is up to ``2⁻²³`` of the sum so far, half of the last one on average: ``2⁻²³ · rows/16 · ½`` together.
    """
    X = torch.zeros(1000, 784, device="cuda", dtype=torch.bfloat16)
    X[:, :769] = randn(1000, 769).bfloat16()
    total = torch.zeros(784, 784, device="cuda")
    triton_products.gram_update_(total, X, torch.ones((), device="cuda"))
    assert relative(total, X.double().mT @ X.double()) < 2**-23 * len(X) / 16 / 2  # 3.7e-6
    before = total.clone()
    triton_products.gram_update_(total, X * torch.nan, torch.zeros((), device="cuda"))
    assert torch.equal(total, before)


@needs_kernels
@pytest.mark.parametrize("n", SIZES)
def test_pair_product(n: int):
    A, B = 1e-9 * randn(2, 200, n), 1e7 * randn(2, n, 131, seed=1)
    for left, right in (
        (split_fp16.split(A), split_fp16.split(B)),
        (split_fp16.split(A.mT.contiguous()).mT, split_fp16.split(B.mT.contiguous()).mT),
    ):
        C = triton_products.pair_product(left, right)
        assert product_error(A, B, C) < 1e-6
        assert relative(C, split_fp16.product(left, right)) < 1e-5
    D, alpha, beta = randn(2, 200, 131, seed=2), randn(2, seed=3), randn(2, seed=4)
    expected = beta[:, None, None] * D + alpha[:, None, None] * split_fp16.product(left, right)
    assert relative(triton_products.pair_product(left, right, add=D, alpha=alpha, beta=beta), expected) < 1e-5


@needs_kernels
@pytest.mark.parametrize("n", SIZES)
def test_symmetric_pair_product(n: int):
    X = split_fp16.split(randn(2, 300, n))
    C = triton_products.pair_product(X.mT, X, symmetric=True)
    assert relative(C, split_fp16.product(X.mT, X)) < 1e-5
    assert torch.equal(C, C.mT)


@needs_kernels
@pytest.mark.parametrize("n", [64, 769, 784, 2304, 3073])
def test_symmetric_products_of_halves(n: int):
    X = split_fp16.split(randn(2, n, n)).half
    exact = (X.hi.double().mT @ X.hi.double()) / X.scale[:, None, None] ** 2
    D = randn(2, n, n, seed=1)
    D = D + D.mT
    out = D.clone()
    C = triton_products.pair_product(X.mT, X, symmetric=True, add=out, beta=-1.0, identity=3.0, out=out)
    assert C is out
    assert torch.equal(C, C.mT)
    # Tensor cores cut off what they add, 2⁻²³ at each of n/16 additions.
    assert relative(C, exact - D + 3 * torch.eye(n, device="cuda")) < 5e-5
    E = split_fp16.split(X.hi.float() - X.hi.float().mT).half
    product = (E.hi.double() @ E.hi.double()) / E.scale[:, None, None] ** 2
    lower = torch.where(torch.ones(n, n, device="cuda").tril() > 0, E.hi, torch.nan)  # what is above is ignored
    how = {"symmetric": True, "skew": True, "add": lower, "alpha": torch.full((2,), 2.0, device="cuda")}
    C = triton_products.pair_product(E, E, **how, beta=1e-3, out=torch.empty_like(E.hi), cut=True)
    expected = (2 * product + 1e-3 * E.hi.double()).clamp(-65504, 65504)
    assert relative(C, expected) < 1e-3


@needs_kernels
@pytest.mark.parametrize("shape", [(769, 3073), (3, 768, 784)])
def test_split(shape: tuple[int, ...]):
    X = 1e-4 * randn(*shape)
    expected, found = split_fp16.split(X), triton_products.split(X)
    assert torch.equal(found.hi, expected.hi)
    assert torch.equal(found.lo, expected.lo)
    assert torch.equal(found.scale, expected.scale)


@needs_kernels
def test_nothing_waits_for_the_device(no_synchronisation):
    X, total = randn(256, 128), torch.zeros(128, 128, device="cuda")
    pair = split_fp16.split(X)
    split_fp16.product(pair.mT, pair)
    triton_products.gram_update_(total, X.half(), torch.ones((), device="cuda"))
    triton_products.pair_product(pair.mT, triton_products.split(X), symmetric=True, add=total)
