"""Means of second moments by Triton's kernels, in its interpreter on the CPU, against torch in float64."""

import pytest
import torch
from torch import Tensor

from interpreter import only_interpreted
from layerwise.foundations.errors import InputError
from layerwise.optim.cuda.linalg import packed
from layerwise.optim.cuda.triton import columns as triton_columns
from layerwise.optim.cuda.triton.columns import average_grams_
from layerwise.optim.reference import running_weight
from random_tensors import randn

pytestmark = pytest.mark.interpreted


def expected_mean(mean: Tensor, X: list[Tensor], alpha: float, weight: Tensor, border: bool) -> Tensor:
    n, found = X[0].shape[1], mean.double()
    for k, x in enumerate(X):
        rows = torch.cat([x.double(), torch.ones(len(x), 1).double()], 1) if border else x.double()
        moment = alpha * rows.mT @ rows
        if border:
            moment[n, n] = 1
        found[k, : len(moment), : len(moment)] = found[k, : len(moment), : len(moment)].lerp(moment, weight[k])
    return found


def symmetric(*shape: int) -> Tensor:
    M = randn(*shape, seed=9)
    return (M + M.mT).float()


@only_interpreted
@pytest.mark.parametrize(("border", "parts"), [(True, 1), (True, 3), (False, 2)])
@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_means_of_listed_matrices(border: bool, parts: int, kind: torch.dtype):
    n, m = 48, 70
    X = [
        randn(m, n + 16, seed=k).to(kind)[:, 16:] for k in range(3)
    ]  # float16: the interpreter has no bfloat16 product
    mean, count = symmetric(3, 64, 64), torch.tensor([0.0, 1.0, 7.0])
    weight = running_weight(count + 1, 0.9)
    expected = expected_mean(mean, [x.half() for x in X], 1 / m, weight, border)
    skipped = average_grams_(mean, count, X, 1 / m, 0.9, border=border, half=torch.float16, parts=parts)
    assert int(skipped) == 0
    assert count.tolist() == [1, 2, 8]
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=1e-5)


@only_interpreted
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e20])
def test_what_is_not_finite_is_left_out(bad: float):
    X = [randn(40, 16, seed=k) for k in range(3)]
    X[1][5, 3] = bad  # 1e20: not in float16, and its square not in float32
    mean, count = symmetric(3, 32, 32), torch.tensor([2.0, 2.0, 2.0])
    before, weight = mean.clone(), running_weight(count + 1, 0.5)
    weight[1] = 0
    X_half = [x.half() for x in X]
    expected = expected_mean(mean, [*X_half[:1], torch.zeros(40, 16), *X_half[2:]], 0.1, weight, True)
    skipped = average_grams_(mean, count, X, 0.1, 0.5, border=True, half=torch.float16, all_finite=torch.tensor(True))
    assert int(skipped) == 1
    assert count.tolist() == [3, 2, 3]
    assert torch.equal(mean[1], before[1])
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=1e-5)


@only_interpreted
def test_nothing_changes_in_a_step_that_is_left_out():
    X = [torch.full((20, 16), torch.nan).half(), randn(20, 16).half()]
    mean, count = symmetric(2, 32, 32), torch.ones(2)
    before = mean.clone()
    skipped = average_grams_(mean, count, X, 1.0, 0.9, border=True, all_finite=torch.tensor(False))
    assert int(skipped) == 0
    assert torch.equal(mean, before)
    assert count.tolist() == [1, 1]


@only_interpreted
@pytest.mark.parametrize("decay", [0.0, 0.95, 0.9999])
def test_the_first_replaces_and_later_weights_are_exact(decay: float):
    X = [torch.ones(16, 16).half()] * 3
    mean, count = torch.zeros(3, 32, 32), torch.tensor([0.0, 1.0, 1e5])
    mean[0] = torch.nan
    average_grams_(mean, count, X, 1 / 16, decay, border=True)
    weight = running_weight(count, decay)
    torch.testing.assert_close(mean[:, 16, 16].double(), weight, rtol=3e-7, atol=0)
    torch.testing.assert_close(mean[:, 3, 16].double(), weight, rtol=3e-7, atol=0)
    assert torch.equal(mean[0, :17, :17], torch.ones(17, 17))


@only_interpreted
def test_more_matrices_than_one_launch_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_columns, "LISTED", 2)
    X = [randn(33, 16, seed=k) for k in range(5)]
    mean, count = torch.zeros(5, 17, 17), torch.zeros(5)
    expected = expected_mean(mean, [x.half() for x in X], 1.0, torch.ones(5).double(), True)
    average_grams_(mean, count, X, 1.0, 0.9, border=True, half=torch.float16)
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=1e-4)


@only_interpreted
@pytest.mark.parametrize("layers", [1, 2, 12, 16, 17])
@pytest.mark.parametrize("packs", [False, True])
def test_lists_of_any_length(layers: int, packs: bool):
    """Lists are filled up, so that few lengths are compiled: what stands in for a matrix changes nothing."""
    n, m, K = 16, 20, layers
    X = [randn(m, n, seed=k).half() for k in range(K)]
    square, count, by = symmetric(K, 32, 32), torch.arange(float(K)), torch.tensor(0.37)
    weight = running_weight(count + 1, 0.9)
    expected = expected_mean(square, X, 0.37 / m, weight, False)
    mean = packed.pack(square) if packs else square.clone()
    skipped = average_grams_(mean, count, X, 1 / m, 0.9, by=by)
    assert int(skipped) == 0
    assert torch.equal(count, torch.arange(1.0, K + 1))
    found = packed.unpack(mean) if packs else mean
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    alone = packed.pack(square) if packs else square.clone()
    for k in range(K):  # each in a list of its own
        average_grams_(alone[k : k + 1], torch.tensor([float(k)]), X[k : k + 1], 1 / m, 0.9, by=by)
    torch.testing.assert_close(mean, alone, rtol=1e-6, atol=1e-6)


@only_interpreted
@pytest.mark.parametrize("by", [0.25, 4.0])
@pytest.mark.parametrize("border", [False, True])
def test_a_factor_on_the_device_is_one_of_the_host(by: float, border: bool):
    """Also of double precision, as the loss's scale is measured; powers of two are not rounded."""
    X = [randn(20, 16, seed=k).half() for k in range(3)]
    means = [symmetric(3, 32, 32) for _ in range(2)]
    counts = [torch.tensor([0.0, 1.0, 5.0]) for _ in range(2)]
    average_grams_(means[0], counts[0], X, 0.1, 0.9, border=border, by=torch.tensor(by, dtype=torch.float64))
    average_grams_(means[1], counts[1], X, 0.1 * by, 0.9, border=border)
    torch.testing.assert_close(*means, rtol=1e-6, atol=1e-7)
    assert torch.equal(*counts)


def test_what_is_not_taken():
    mean, count, x = torch.zeros(2, 17, 17), torch.zeros(2), torch.zeros(8, 16).half()
    for X, border in (([x], False), ([x, x[:4]], False), ([x.mT, x.mT], False), ([x, x], True)):
        with pytest.raises(InputError, match="matrices alike, one for each mean"):
            average_grams_(mean[:, :16, :16], count, X, 1.0, 0.9, border=border)
