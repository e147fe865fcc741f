"""Packed halves against whole ones, bit for bit: by torch, and by Triton's kernels, in its interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

from interpreter import only_interpreted
from layerwise.foundations.errors import InputError
from layerwise.optim.cuda.linalg import packed_fp16, split_fp16
from layerwise.optim.cuda.triton import packed as triton_packed

pytestmark = pytest.mark.interpreted


@pytest.fixture(params=["torch", pytest.param("kernels", marks=only_interpreted)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Torch, or the kernels, which then take the CPU's matrices."""
    monkeypatch.setattr(triton_packed, "BLOCK", 32)
    monkeypatch.setattr(triton_packed, "MIRROR_BLOCK", 32)
    monkeypatch.setattr(packed_fp16, "available", lambda _: request.param == "kernels")
    return request.param


def symmetric(K: int, n: int, seed: int = 0) -> Tensor:
    X = torch.randn(K, n, n, generator=torch.Generator().manual_seed(seed))
    return (X + X.mT) * torch.logspace(-12, 9, K).view(-1, 1, 1)


def squares(X: Tensor, halves: int) -> tuple[Tensor, Tensor]:
    pair = split_fp16.split(X)
    return torch.stack([pair.hi, pair.lo][:halves], 1), pair.scale


def kept(X: Tensor, halves: int) -> tuple[Tensor, Tensor]:
    H, scale = packed_fp16.zeros(len(X), halves, X.shape[-1]), torch.ones(len(X))
    packed_fp16.put_(H, scale, X)
    return H, scale


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("n", [16, 48, 80])
def test_there_and_back(n: int, halves: int, way: str):
    X = symmetric(3, n)
    (H, scale), (whole, expected) = kept(X, halves), squares(X, halves)
    assert H.shape == (3, halves, n // 16 * (n // 16 + 1) // 2, 16, 16)
    assert packed_fp16.is_packed(H)
    assert torch.equal(scale, expected)
    assert torch.equal(packed_fp16.unpack(H), whole)
    assert torch.equal(packed_fp16.unpack(H[1:2]), whole[1:2])  # some groups


@pytest.mark.parametrize("halves", [1, 2])
def test_what_is_not_good_stays(halves: int, way: str):
    X, new = symmetric(4, 48), symmetric(4, 48, seed=1)
    new[1] = torch.nan  # not looked at
    new[2, 40, 3] = torch.inf  # seen
    store, scales = kept(X.repeat_interleave(2, 0), halves)
    H, scale = store[::2], scales[:4].copy_(scales[::2].clone())  # matrices apart
    where = torch.tensor([True, False, True, False])
    packed_fp16.put_(H, scale, new, where)
    (whole, numbers), (old, before) = squares(new, halves), squares(X, halves)
    found = packed_fp16.unpack(H)
    for k, on in enumerate(where.tolist()):
        torch.testing.assert_close(found[k], (whole if on else old)[k], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scale, torch.where(where, numbers, before), rtol=0, atol=0, equal_nan=True)
    assert bool(found[2].isnan().all())


@only_interpreted
@pytest.mark.parametrize(("tile", "block"), [(32, 32), (32, 64), (64, 32), (16, 64)])
def test_tiles_of_other_sizes(tile: int, block: int, way: str, monkeypatch: pytest.MonkeyPatch):
    """They may be smaller or larger than the blocks of a program, and reach beyond the matrix."""
    monkeypatch.setattr(triton_packed, "MIRROR_BLOCK", block)
    X, across = symmetric(2, 80), -(-80 // tile)
    H = torch.full((2, 2, across * (across + 1) // 2, tile, tile), torch.nan).half()
    scale = torch.ones(2)
    triton_packed.put_(H, scale, X)
    assert torch.equal(triton_packed.mirrored(H, 80), squares(X, 2)[0])


@only_interpreted
def test_rows_that_are_apart(way: str):
    X = torch.zeros(2, 48, 64)
    X[..., :48] = symmetric(2, 48)
    assert torch.equal(kept(X[..., :48], 2)[0], kept(X[..., :48].contiguous(), 2)[0])


def test_sizes_that_do_not_fit():
    with pytest.raises(InputError, match="multiple of 16"):
        packed_fp16.zeros(1, 2, 33)
    with pytest.raises(InputError, match="of that size"):
        packed_fp16.put_(packed_fp16.zeros(1, 2, 32), torch.ones(1), torch.zeros(1, 16, 16))
