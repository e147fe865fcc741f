"""Packed symmetric matrices against whole ones: by torch, and by Triton's kernels, in its interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

from interpreter import only_interpreted
from layerwise.foundations.errors import InputError
from layerwise.optim.cuda.linalg import packed, split_fp16
from layerwise.optim.cuda.triton import packed as triton_packed
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton.columns import average_grams_
from layerwise.optim.cuda.triton.products import Tiles
from random_tensors import randn

pytestmark = pytest.mark.interpreted
SMALL = Tiles(m=32, n=32, depth=16, warps=1, stages=1)


@pytest.fixture(params=["torch", pytest.param("kernels", marks=only_interpreted)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Torch, or the kernels, which then take the CPU's matrices."""
    monkeypatch.setattr(triton_packed, "BLOCK", 32)
    monkeypatch.setattr(packed, "available", lambda _: request.param == "kernels")
    return request.param


def definite(K: int, n: int, seed: int = 0) -> Tensor:
    X = randn(K, n, n + 5, seed=seed)
    M = X @ X.mT / n
    return (M + M.mT) / 2


@pytest.mark.parametrize("n", [16, 48, 80])
def test_there_and_back(n: int, way: str):
    M = definite(2, n)
    P = packed.pack(M)
    assert P.shape == (2, n // 16 * (n // 16 + 1) // 2, 16, 16)
    assert packed.size(P) == n
    assert torch.equal(packed.unpack(P), M)
    assert torch.equal(packed.diagonal(P), M.diagonal(dim1=1, dim2=2))
    assert torch.equal(packed.unpack(P[1:]), M[1:])  # some groups


def test_a_smaller_matrix_is_continued_by_zeros(way: str):
    M = definite(2, 33)
    whole = packed.unpack(packed.pack(M, 48))
    assert torch.equal(whole[:, :33, :33], M)
    assert not whole[:, 33:].any()
    assert not whole[:, :, 33:].any()


@pytest.mark.parametrize("kind", ["whole", "packed"])
def test_means(kind: str, way: str):
    M, new = definite(4, 48), definite(4, 41, seed=1)
    weight = torch.tensor([0.25, 0.0, 1.0, 0.5])
    new[1], M[2] = torch.nan, torch.nan  # not looked at
    padded = torch.nn.functional.pad(new, (0, 7, 0, 7))
    expected = torch.lerp(M, padded, weight.view(-1, 1, 1))
    expected[1], expected[2] = M[1], padded[2]
    store = packed.zeros(8, 48)[::2]  # matrices apart
    P = packed.ema_(store, M, torch.ones(4))
    packed.ema_(P, new if kind == "whole" else packed.pack(new, 48), weight)
    torch.testing.assert_close(packed.unpack(P), expected, rtol=1e-6, atol=1e-7)


def test_a_shifted_diagonal_and_pairs(way: str):
    """The pairs are those of the whole matrices, bit for bit."""
    M = torch.nn.functional.pad(definite(3, 35), (0, 13, 0, 13)) * torch.tensor([1e-12, 1.0, 1e9]).view(-1, 1, 1)
    mean = M.diagonal(dim1=1, dim2=2).mean(-1)
    shift = 1e-3 * mean
    damped = M.clone()
    damped.diagonal(dim1=1, dim2=2).add_(shift.unsqueeze(-1))
    damped.diagonal(dim1=1, dim2=2)[:, 35:] = mean.unsqueeze(-1)
    P = packed.pack(M)
    assert torch.equal(packed.unpack(P, shift, 35, mean), damped)
    expected = split_fp16.split(M)
    for found, names in ((packed.split(P), ("hi", "lo", "scale")), (packed.split(P, 1), ("hi", "scale"))):
        for name in names:
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_what_is_not_finite_stays_visible(way: str):
    M = definite(2, 32)
    M[1, 20, 20] = torch.inf
    pair = packed.split(packed.pack(M))
    assert bool(torch.isfinite(pair.value()[0]).all())
    assert not bool(torch.isfinite(pair.value()[1]).any())


@only_interpreted
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("n", [48, 40])
def test_gram_update(n: int, parts: int):
    """Into all of the totals, or into their leading blocks."""
    X, total, weight = randn(3, 70, n, seed=2).half(), definite(3, 48), torch.tensor([0.25, 0.0, 1.0])
    X[1] = torch.nan
    P = packed.pack(total)
    triton_products.gram_update_(P, list(X) if parts == 3 else X, weight, 0.1, tiles=SMALL, parts=parts)
    moment = 0.1 * X.float().mT @ X.float()
    total[0, :n, :n] = torch.lerp(total[0, :n, :n], moment[0], 0.25)
    total[2, :n, :n] = moment[2]
    torch.testing.assert_close(packed.unpack(P), total, rtol=1e-5, atol=1e-5)


@only_interpreted
@pytest.mark.parametrize("border", [True, False])
def test_means_of_listed_matrices(border: bool):
    """The same whether they are packed or not, bit for bit: a bias's row in the last tile, or in one of its own."""
    for n, m in ((48, 70), (40, 33)):
        X, whole = [randn(m, n, seed=k).half() for k in range(3)], definite(3, 64)
        X[2][3, 5] = torch.inf
        P, counts = packed.pack(whole), [torch.tensor([0.0, 1.0, 7.0]) for _ in range(2)]
        for mean, count in zip((whole, P), counts, strict=True):
            average_grams_(mean, count, X, 1 / m, 0.9, border=border, parts=2)
        assert torch.equal(packed.unpack(P), whole)
        assert torch.equal(*counts)


@only_interpreted
def test_what_the_kernels_do_not_take():
    P = packed.zeros(2, 32)
    for X in (torch.zeros(2, 8, 32), torch.zeros(2, 8, 33).half(), [torch.zeros(8, 32).half()] * 3):
        with pytest.raises(InputError, match="Expected matrices alike"):
            triton_products.gram_update_(P, X, torch.ones(2))
    with pytest.raises(InputError, match="one piece"):
        triton_packed.unpack(P.mT, 32, None, None, None)


def test_sizes_that_do_not_fit():
    with pytest.raises(InputError, match="multiple of 16"):
        packed.zeros(1, 33)
    with pytest.raises(InputError, match="no larger"):
        packed.ema_(packed.zeros(1, 32), torch.zeros(1, 33, 33), torch.ones(1))
