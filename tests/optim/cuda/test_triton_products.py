"""Triton kernels, run by Triton's interpreter on the CPU: small matrices whose sizes are no multiple of a tile."""

import pytest
import torch

from interpreter import only_interpreted
from layerwise.foundations.errors import InputError
from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.linalg.split_fp16 import Half, HalfPair
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton.products import Tiles
from random_tensors import randn

pytestmark = pytest.mark.interpreted


def test_not_available_on_a_cpu():
    assert not triton_products.available(torch.device("cpu"))


def test_rows_are_cut_only_when_few_tiles_fill_the_processors():
    tiles = triton_products.Tiles()
    assert triton_products._parts(21, 8192, tiles, 132) > 1
    assert triton_products._parts(21, 128, tiles, 132) == 1
    assert triton_products._parts(3600, 8192, tiles, 132) == 1


SMALL = Tiles(m=16, n=16, depth=16, warps=4, stages=1, group=2)


@only_interpreted
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("n", [1, 15, 48, 50])
def test_gram_update(n: int, parts: int):
    wide = randn(2, 37, n + 5).half()  # float16: the interpreter cannot multiply bfloat16
    X = wide[..., 3 : n + 3]
    total = split_fp16.product(split_fp16.split(randn(2, n, n)), split_fp16.split(torch.eye(n).expand(2, n, n)))
    total = total + total.mT
    weight = torch.tensor([0.25, 1.0])
    expected = total.double().lerp(0.1 * X.double().mT @ X.double(), weight.double()[:, None, None])
    total[1] = torch.nan  # of weight 1: replaced
    found = triton_products.gram_update_(total, X, weight, 0.1, tiles=SMALL, parts=parts)
    assert found is total
    assert torch.equal(total, total.mT)
    torch.testing.assert_close(total.double(), expected, rtol=0, atol=2e-5)


@only_interpreted
@pytest.mark.parametrize("parts", [1, 2])
def test_weight_zero_leaves_the_total_alone(parts: int):
    X = torch.full((40, 20), torch.nan).half()
    total = randn(20, 20)
    before = total.clone()
    triton_products.gram_update_(total, X, torch.tensor(0.0), tiles=SMALL, parts=parts)
    assert torch.equal(total, before)


@only_interpreted
@pytest.mark.parametrize("parts", [1, 2])
def test_gram_update_of_separate_matrices(parts: int):
    X = [randn(40, 30, seed=seed).half()[:, :20] for seed in range(3)]
    total, weight = torch.ones(3, 20, 20), torch.tensor([0.5, 0.0, 1.0])
    expected = total.lerp(torch.stack([x.float().mT @ x.float() for x in X]), weight[:, None, None])
    triton_products.gram_update_(total, X, weight, tiles=SMALL, parts=parts)
    torch.testing.assert_close(total, expected, rtol=0, atol=2e-5)


@only_interpreted
def test_gram_update_of_part_of_a_larger_store():
    store = torch.zeros(3, 32, 40)
    X = randn(3, 20, 24).half()
    triton_products.gram_update_(store[:, :24, :24], X, torch.ones(3), tiles=SMALL)
    torch.testing.assert_close(store[:, :24, :24], X.float().mT @ X.float(), rtol=0, atol=2e-5)
    assert not store[:, 24:].any()
    assert not store[:, :, 24:].any()


@only_interpreted
@pytest.mark.parametrize("shape", [(16, 32, 16), (33, 50, 20), (1, 7, 70)])
@pytest.mark.parametrize("transposed", ["neither", "left", "right"])
def test_pair_product(shape: tuple[int, int, int], transposed: str):
    m, depth, n = shape
    A = split_fp16.split(1e-12 * randn(2, m, depth))
    B = split_fp16.split(1e9 * randn(2, depth, n, seed=1))
    if transposed == "left":
        A = split_fp16.split(A.value().mT.contiguous()).mT
    if transposed == "right":
        B = split_fp16.split(B.value().mT.contiguous()).mT
    C = triton_products.pair_product(A, B, tiles=SMALL)
    exact = A.value().double() @ B.value().double()
    assert float((C.double() - exact).norm()) < 1e-6 * float(A.value().norm() * B.value().norm())
    one = triton_products.pair_product(A[1], B[1], tiles=SMALL)
    assert torch.equal(one, C[1])


@only_interpreted
def test_pair_product_with_an_addend():
    A, B = split_fp16.split(randn(2, 20, 30)), split_fp16.split(randn(2, 30, 24, seed=1))
    D = randn(2, 20, 24, seed=2)
    alpha, beta = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.0])
    expected = beta[:, None, None] * D + alpha[:, None, None] * split_fp16.product(A, B)
    D[1] = torch.nan  # of beta 0: ignored
    C = triton_products.pair_product(A, B, add=D, alpha=alpha, beta=beta, tiles=SMALL)
    torch.testing.assert_close(C, expected, rtol=0, atol=2e-5)
    D = randn(2, 20, 24, seed=2)
    expected = D + split_fp16.product(A, B)
    found = triton_products.pair_product(A, B, add=D, out=D, tiles=SMALL)
    assert found is D
    torch.testing.assert_close(D, expected, rtol=0, atol=2e-5)


@only_interpreted
@pytest.mark.parametrize("n", [5, 17, 48, 64, 70, 101])
def test_symmetric_pair_product(n: int):
    X = split_fp16.split(randn(3, 21, n))
    D = randn(3, n, n, seed=1)
    D = D + D.mT
    beta = torch.full((3,), 3.0)
    expected = 3 * D + split_fp16.product(X.mT, X) + 2 * torch.eye(n)
    lower = torch.where(torch.ones(n, n, dtype=torch.bool).tril(), D, torch.nan)  # what is above is ignored
    C = triton_products.pair_product(X.mT, X, symmetric=True, add=lower, beta=beta, identity=2, tiles=SMALL)
    assert torch.equal(C, C.mT)
    torch.testing.assert_close(C, expected, rtol=0, atol=5e-5)
    triton_products.pair_product(X.mT, X, symmetric=True, add=D, beta=beta, identity=2, out=D, tiles=SMALL)
    assert torch.equal(D, C)


@only_interpreted
@pytest.mark.parametrize("n", [5, 48, 64, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_symmetric_product_with_an_antisymmetric_addend(n: int, dtype: torch.dtype):
    """``βE + αE²`` of an antisymmetric E, of which only the lower triangle is read."""
    X = randn(3, n, n)
    E = split_fp16.split(X - X.mT).half
    alpha, beta = torch.tensor([0.5, 0.125, 1.0]), torch.tensor([1.0, 0.5, 0.0])
    expected = beta[:, None, None] * E.hi.float() + alpha[:, None, None] * split_fp16.rough_product(E, E)
    lower = E.hi.tril().clone()
    lower[2] = torch.nan  # of beta 0: ignored
    out = torch.empty(3, n, n, dtype=dtype)
    C = triton_products.pair_product(
        E, E, symmetric=True, skew=True, add=lower, alpha=alpha, beta=beta, out=out, tiles=SMALL
    )
    rtol = 1e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(C.float(), expected, rtol=rtol, atol=1e-3)
    out = E.hi.clone()
    triton_products.pair_product(E, E, symmetric=True, skew=True, add=out, alpha=alpha, beta=beta, out=out, tiles=SMALL)
    assert dtype == torch.float32 or torch.equal(out, C)


@only_interpreted
@pytest.mark.parametrize("n", [5, 48])
def test_both_halves_of_a_symmetric_product_are_cut(n: int):
    X = Half((300 * randn(2, n, n)).half(), torch.ones(2))
    out = torch.empty(2, n, n, dtype=torch.float16)
    C = triton_products.pair_product(X, X.mT, symmetric=True, out=out, cut=True, tiles=SMALL)
    expected = (X.hi.float() @ X.hi.float().mT).clamp(-65504, 65504)
    torch.testing.assert_close(C.float(), expected, rtol=1e-3, atol=1.0)


def assert_same(found: HalfPair, expected: HalfPair) -> None:
    assert torch.equal(found.hi, expected.hi)
    assert torch.equal(found.lo, expected.lo)
    assert torch.equal(found.scale, expected.scale)


@only_interpreted
@pytest.mark.parametrize("shape", [(70, 90), (3, 5, 7), (2, 3, 4, 5), (2, 1, 9), (2, 9, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_split(shape: tuple[int, ...], dtype: torch.dtype):
    X = (1e-3 * randn(*shape)).to(dtype)
    expected = split_fp16.split(X)
    assert_same(triton_products.split(X), expected)
    assert_same(triton_products.split(X.mT.contiguous().mT), expected)
    assert torch.equal(triton_products.halved(X).hi, expected.hi)
    amax = X.abs().amax((-2, -1))
    assert_same(triton_products.split(X, amax=amax), expected)
    assert_same(triton_products.split(X, bound=3.0), split_fp16.split(X, torch.full(shape[:-2], 2.0**13)))
    X[..., 0, 0] = torch.nan
    assert torch.isnan(triton_products.split(X).value()).all()


@only_interpreted
def test_split_of_a_part():
    X = randn(5, 12, 20)
    for part in (X[1:4], X[:, 2:7], X[:, :, 3:11], X[0], X[1:4, 2:9].mT, X[..., ::2], X[:1].expand(3, 12, 20)):
        assert_same(triton_products.split(part), split_fp16.split(part))
    transposed = triton_products.split(X.mT)
    assert transposed.mT.hi.is_contiguous()


@only_interpreted
def test_split_into_what_is_kept():
    X, kept = randn(4, 6, 8), torch.ones(4, 2, 6, 8).half()
    scale, where = torch.full((4,), 3.0), torch.tensor([True, False, True, True])
    out = HalfPair(kept[:, 0], kept[:, 1], scale)
    for source in (X, X.mT.contiguous().mT):
        assert triton_products.split(source, out=out, where=where) is out
        expected = split_fp16.split(X)
        assert torch.equal(out.value()[where], expected.value()[where])
        assert scale[1] == 3
        assert (kept[1] == 1).all()
    triton_products.split(X, out=out)
    assert_same(out, split_fp16.split(X))
    with pytest.raises(InputError, match="contiguous matrices"):
        triton_products.split(X, out=HalfPair(kept[:, 0, :, ::2], kept[:, 1, :, ::2], scale))
    with pytest.raises(InputError, match="shape of X"):
        triton_products.split(X[:, :3], out=out)


@only_interpreted
@pytest.mark.parametrize("amax", [0.0, 1e-42, 1.2e-38, 2.0**-100, 1.0, 1.9999999, 2.0, 3.3e38, torch.inf, torch.nan])
def test_scale_in_the_kernel(amax: float):
    found, expected = triton_products.split(torch.tensor([[amax]])), split_fp16.pair_scale(torch.tensor([[amax]]))
    torch.testing.assert_close(found.scale, expected, rtol=0, atol=0, equal_nan=True)


@only_interpreted
@pytest.mark.parametrize("symmetric", [False, True])
def test_rough_product(symmetric: bool):
    X = split_fp16.split(1e-5 * randn(2, 21, 40))
    D = torch.eye(40).expand(2, 40, 40)
    expected = 2 * D - 0.5e9 * split_fp16.rough_product(X.mT, X) + 3 * torch.eye(40)
    C = triton_products.pair_product(
        X.half.mT, X, symmetric=symmetric, add=D, beta=2, alpha=-0.5e9, identity=3, tiles=SMALL
    )
    torch.testing.assert_close(C, expected, rtol=1e-5, atol=1e-5)
    out = torch.empty(2, 40, 40).half()
    triton_products.pair_product(X.half.mT, X.half, add=D.half(), alpha=1e9, symmetric=symmetric, out=out, tiles=SMALL)
    torch.testing.assert_close(out.float(), D + 1e9 * split_fp16.rough_product(X.mT, X), rtol=1e-3, atol=1e-4)


@only_interpreted
def test_the_kernels_are_chosen(monkeypatch: pytest.MonkeyPatch):
    X, Y = randn(2, 16, 24), randn(2, 24, 16, seed=1)
    expected, rough = split_fp16.product(X, Y), split_fp16.rough_product(X, Y)
    used = []
    product = triton_products.pair_product
    monkeypatch.setattr(triton_products, "available", lambda _: True)
    monkeypatch.setattr(triton_products, "pair_product", lambda *a, **k: used.append(a) or product(*a, **k))
    torch.testing.assert_close(split_fp16.product(X, Y), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(split_fp16.rough_product(X, Y.mT.contiguous().mT), rough, rtol=0, atol=1e-4)
    assert len(used) == 2
    split_fp16.product(X[..., :20].contiguous(), Y[:, :20])  # rows of 40 bytes
    split_fp16.product(X, Y[0])
    split_fp16.product(X[None], Y[None])
    split_fp16.split(X.double())
    assert len(used) == 2


@only_interpreted
@pytest.mark.parametrize("n", [200, 210, 224])
def test_lower_tiles_count_the_triangle(n: int):
    """Through the product of a column with itself, which no tile that is left out or taken for another can give."""
    x = split_fp16.split(torch.arange(float(n))[:, None])
    out = torch.full((n, n), torch.nan)
    C = triton_products.pair_product(x, x.mT, symmetric=True, out=out, tiles=SMALL)
    assert torch.equal(C, torch.outer(torch.arange(float(n)), torch.arange(float(n))))


def test_what_the_kernels_do_not_take():
    half = torch.ones(4, 4).half()
    pair = split_fp16.split(torch.ones(4, 3))
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
        triton_products.pair_product(pair.mT, pair, symmetric=True, tiles=Tiles(n=64))
    with pytest.raises(InputError, match="last stride"):
        triton_products.pair_product(pair, pair.mT, out=torch.ones(4, 8)[:, ::2])
    with pytest.raises(InputError, match="Flatten"):
        triton_products.pair_product(split_fp16.split(torch.ones(1, 1, 2, 2)), pair)


@only_interpreted
@pytest.mark.parametrize("columns", [1, 16, 17, 32])
def test_thin_products(columns: int):
    A, B = randn(2, 40, 136), randn(2, 136, columns, seed=1)
    found = triton_products.pair_product(split_fp16.split(A), split_fp16.split(B))
    torch.testing.assert_close(found.double(), A.double() @ B.double(), rtol=1e-5, atol=1e-4)


@only_interpreted
def test_small_symmetric_products():
    A = split_fp16.split(randn(2, 8, 40))
    found = triton_products.pair_product(A, A.mT, symmetric=True)
    torch.testing.assert_close(found, A.value() @ A.value().mT, rtol=1e-5, atol=1e-4)
