"""Triton kernels, run by Triton's interpreter on the CPU: small matrices whose sizes are no multiple of a tile."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise.foundations.errors import InputError
from layerwise.foundations.linalg import half_pairs, triton_products
from layerwise.foundations.linalg.triton_products import Tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NUMPY = tuple(int(part) for part in np.__version__.split(".")[:2])
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton")
old_numpy = pytest.mark.skipif(NUMPY >= (2, 4), reason="Triton's interpreter needs numpy < 2.4 (loops of its range)")
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by `test_kernels_in_the_interpreter`")


def test_not_available_on_a_cpu():
    assert not triton_products.available(torch.device("cpu"))


def test_rows_are_cut_only_when_few_tiles_fill_the_processors():
    tiles = triton_products.Tiles()
    assert triton_products._parts(21, 8192, tiles) > 1
    assert triton_products._parts(21, 128, tiles) == 1
    assert triton_products._parts(3600, 8192, tiles) == 1


@needs_triton
@old_numpy
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_kernels_in_the_interpreter():
    """In a process of its own, because Triton reads the variable when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


SMALL = Tiles(m=16, n=16, depth=16, warps=4, stages=1, group=2)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@interpreted
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("n", [1, 15, 48, 50])
def test_gram_update(n: int, parts: int):
    wide = randn(2, 37, n + 5).half()  # float16: the interpreter cannot multiply bfloat16
    X = wide[..., 3 : n + 3]
    total = half_pairs.product(half_pairs.split(randn(2, n, n)), half_pairs.split(torch.eye(n).expand(2, n, n)))
    total = total + total.mT
    weight = torch.tensor([0.25, 1.0])
    expected = total.double().lerp(0.1 * X.double().mT @ X.double(), weight.double()[:, None, None])
    total[1] = torch.nan  # of weight 1: replaced
    found = triton_products.gram_update_(total, X, weight, 0.1, tiles=SMALL, parts=parts)
    assert found is total
    assert torch.equal(total, total.mT)
    torch.testing.assert_close(total.double(), expected, rtol=0, atol=2e-5)


@interpreted
@pytest.mark.parametrize("parts", [1, 2])
def test_weight_zero_leaves_the_total_alone(parts: int):
    X = torch.full((40, 20), torch.nan).half()
    total = randn(20, 20)
    before = total.clone()
    triton_products.gram_update_(total, X, torch.tensor(0.0), tiles=SMALL, parts=parts)
    assert torch.equal(total, before)


@interpreted
@pytest.mark.parametrize("parts", [1, 2])
def test_gram_update_of_separate_matrices(parts: int):
    X = [randn(40, 30, seed=seed).half()[:, :20] for seed in range(3)]
    total, weight = torch.ones(3, 20, 20), torch.tensor([0.5, 0.0, 1.0])
    expected = total.lerp(torch.stack([x.float().mT @ x.float() for x in X]), weight[:, None, None])
    triton_products.gram_update_(total, X, weight, tiles=SMALL, parts=parts)
    torch.testing.assert_close(total, expected, rtol=0, atol=2e-5)


@interpreted
def test_gram_update_of_part_of_a_larger_store():
    store = torch.zeros(3, 32, 40)
    X = randn(3, 20, 24).half()
    triton_products.gram_update_(store[:, :24, :24], X, torch.ones(3), tiles=SMALL)
    torch.testing.assert_close(store[:, :24, :24], X.float().mT @ X.float(), rtol=0, atol=2e-5)
    assert not store[:, 24:].any()
    assert not store[:, :, 24:].any()


@interpreted
@pytest.mark.parametrize("shape", [(16, 32, 16), (33, 50, 20), (1, 7, 70)])
@pytest.mark.parametrize("transposed", ["neither", "left", "right"])
def test_pair_product(shape: tuple[int, int, int], transposed: str):
    m, depth, n = shape
    A = half_pairs.split(1e-12 * randn(2, m, depth))
    B = half_pairs.split(1e9 * randn(2, depth, n, seed=1))
    if transposed == "left":
        A = half_pairs.split(A.value().mT.contiguous()).mT
    if transposed == "right":
        B = half_pairs.split(B.value().mT.contiguous()).mT
    C = triton_products.pair_product(A, B, tiles=SMALL)
    exact = A.value().double() @ B.value().double()
    assert float((C.double() - exact).norm()) < 1e-6 * float(A.value().norm() * B.value().norm())
    one = triton_products.pair_product(A[1], B[1], tiles=SMALL)
    assert torch.equal(one, C[1])


@interpreted
def test_pair_product_with_an_addend():
    A, B = half_pairs.split(randn(2, 20, 30)), half_pairs.split(randn(2, 30, 24, seed=1))
    D = randn(2, 20, 24, seed=2)
    alpha, beta = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.0])
    expected = beta[:, None, None] * D + alpha[:, None, None] * half_pairs.product(A, B)
    D[1] = torch.nan  # of beta 0: ignored
    C = triton_products.pair_product(A, B, add=D, alpha=alpha, beta=beta, tiles=SMALL)
    torch.testing.assert_close(C, expected, rtol=0, atol=2e-5)
    D = randn(2, 20, 24, seed=2)
    expected = D + half_pairs.product(A, B)
    found = triton_products.pair_product(A, B, add=D, out=D, tiles=SMALL)
    assert found is D
    torch.testing.assert_close(D, expected, rtol=0, atol=2e-5)


@interpreted
@pytest.mark.parametrize("n", [5, 48, 70])
def test_symmetric_pair_product(n: int):
    X = half_pairs.split(randn(3, 21, n))
    D = torch.eye(n).expand(3, n, n).contiguous()
    beta = torch.full((3,), 3.0)
    C = triton_products.pair_product(X.mT, X, symmetric=True, add=D, beta=beta, tiles=SMALL)
    assert torch.equal(C, C.mT)
    torch.testing.assert_close(C, 3 * D + half_pairs.product(X.mT, X), rtol=0, atol=2e-5)


@interpreted
@pytest.mark.parametrize("shape", [(70, 90), (3, 5, 7)])
def test_split(shape: tuple[int, ...]):
    X = 1e-7 * randn(*shape)
    expected, found = half_pairs.split(X), triton_products.split(X)
    assert torch.equal(found.hi, expected.hi)
    assert torch.equal(found.lo, expected.lo)
    assert torch.equal(found.scale, expected.scale)
    kept = half_pairs.split(torch.zeros_like(X))
    assert triton_products.split(X.mT.contiguous().mT, out=kept) is kept
    assert torch.equal(kept.value(), expected.value())
    X[..., 0, 0] = torch.nan
    assert torch.isnan(triton_products.split(X).value()).all()


@interpreted
def test_lower_tiles_count_the_triangle():
    """Through the product of a column with itself, which no tile that is left out or done twice can give."""
    x = half_pairs.split(torch.arange(200.0)[:, None])
    C = triton_products.pair_product(x, x.mT, symmetric=True, tiles=SMALL)
    assert torch.equal(C, torch.outer(torch.arange(200.0), torch.arange(200.0)))


def test_what_the_kernels_do_not_take():
    half = torch.ones(4, 4).half()
    pair = half_pairs.split(torch.ones(4, 3))
    with pytest.raises(InputError, match="float16 or bfloat16"):
        triton_products.gram_update_(torch.zeros(4, 4), half.float(), torch.tensor(1.0))
    with pytest.raises(InputError, match="last stride of 1"):
        triton_products.gram_update_(torch.zeros(4, 4), torch.ones(4, 8).half()[:, ::2], torch.tensor(1.0))
    with pytest.raises(InputError, match="alike"):
        triton_products.gram_update_(torch.zeros(2, 4, 4), [half, half[:2]], torch.ones(2))
    with pytest.raises(InputError, match="one for each total"):
        triton_products.gram_update_(torch.zeros(3, 4, 4), [half, half], torch.ones(3))
    with pytest.raises(InputError, match="one for each total"):
        triton_products.gram_update_(torch.zeros(3, 4, 4), [], torch.ones(3))
    with pytest.raises(InputError, match="inner axes"):
        triton_products.pair_product(pair, pair)
    with pytest.raises(InputError, match="square tiles"):
        triton_products.pair_product(pair.mT, pair, symmetric=True, tiles=Tiles(m=64))
    with pytest.raises(InputError, match="last stride"):
        triton_products.pair_product(pair, pair.mT, out=torch.ones(4, 8)[:, ::2])
    with pytest.raises(InputError, match="flatten"):
        triton_products.pair_product(half_pairs.split(torch.ones(1, 1, 2, 2)), pair)
