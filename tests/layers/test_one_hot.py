"""`OneHot` answers as the dense vectors would."""

import pytest
import torch

from layerwise.layers.io.one_hot import OneHot, _pairs_by_sorting
from layerwise.layers.io.standard import Standard

INDEX = torch.tensor([[1, 1, -1, 4], [0, 4, 4, 4], [-1, -1, -1, 2]])


@pytest.fixture
def one_hot() -> OneHot:
    return OneHot(INDEX, 5)


def test_dense_vectors_and_padding(one_hot: OneHot):
    dense = one_hot.dense(torch.float64)
    assert dense.shape == (3, 4, 1, 5) == one_hot.shape
    assert dense[0, 0, 0].tolist() == [0, 1, 0, 0, 0]
    assert not dense[0, 2].any()


@pytest.mark.parametrize("masked", [False, True])
def test_counts_are_the_diagonal_of_the_moment(one_hot: OneHot, masked: bool):
    keep = INDEX != 4 if masked else None
    a = one_hot.dense(torch.float64)[:, :, 0]
    rows = a.flatten(0, 1) if keep is None else a[keep]
    counts = one_hot.counts(keep, torch.float64)
    assert torch.equal(torch.diag(counts), rows.mT @ rows)
    assert counts.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_counts_are_exact(dtype: torch.dtype):
    index = torch.randint(-1, 7, (5, 400), generator=torch.Generator().manual_seed(0))
    expected = torch.bincount(index.flatten() + 1, minlength=8)[1:].to(dtype)
    for given in (index, index.int()):
        assert torch.equal(OneHot(given, 7).counts(None, dtype), expected)


def test_rows_are_added_where_their_token_is(one_hot: OneHot):
    g = torch.randn(12, 2, dtype=torch.float64)
    expected = g.mT @ one_hot.dense(torch.float64).reshape(12, 5)
    assert (one_hot.add_rows(g) - expected).abs().max() < 1e-14


def test_pairs_of_example_and_token(one_hot: OneHot):
    token, pair = one_hot.example_tokens()
    assert torch.equal(token[pair], INDEX.flatten())
    pairs = {(n, int(t)) for n in range(3) for t in INDEX[n]}
    assert len(token) == len(pairs)
    example = torch.arange(3).repeat_interleave(4)
    seen = {(int(p), int(n)) for p, n in zip(pair, example, strict=True)}
    assert len(seen) == len(pairs)  # no pair is shared by two examples


@pytest.mark.parametrize("shape", [(3, 4), (1, 9), (5, 1)])
def test_pairs_are_the_same_without_waiting(shape: tuple[int, int]):
    """As many as positions; those left over have no token, and squares are the same."""
    index = torch.randint(-1, 4, shape, generator=torch.Generator().manual_seed(0))
    token, pair = _pairs_by_sorting(index)
    assert len(token) == len(pair) == index.numel()
    assert torch.equal(token[pair], index.flatten())
    used = torch.zeros_like(token, dtype=torch.bool).index_fill_(0, pair, True)
    assert bool((token[~used] == -1).all())
    fewer, same = OneHot(index, 4).example_tokens()
    assert int(used.sum()) == len(fewer)
    apart = {(int(p), int(q)) for p, q in zip(pair, same, strict=True)}
    assert len(apart) == len(fewer)  # the two ways name the same pairs


def test_squares_by_both_ways(monkeypatch: pytest.MonkeyPatch):
    chunk = Standard(OneHot(INDEX, 5), torch.randn(2, 3, 4, 1, 6, dtype=torch.float64))
    expected = chunk.per_example_grads().square().sum((0, 1))
    assert (chunk.squared_sum() - expected).abs().max() < 1e-13
    monkeypatch.setattr(OneHot, "example_tokens", lambda one_hot: _pairs_by_sorting(one_hot.index))
    assert (chunk.squared_sum() - expected).abs().max() < 1e-13
