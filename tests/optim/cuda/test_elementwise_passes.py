"""Passes that save others: scales taken out on the way, corrections, largest entries. By torch, and in Triton's
interpreter."""

import pytest
import torch
from torch import Tensor

from interpreter import INTERPRETED, only_interpreted
from layerwise.optim.cuda import elementwise
from layerwise.optim.cuda.elementwise import corrections_
from layerwise.optim.cuda.gradient_sizes import largest_of_each
from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.scaled import Scaled, unscaled
from layerwise.optim.cuda.triton import elementwise as triton_elementwise
from layerwise.optim.cuda.triton import splits as triton_splits
from random_tensors import randn

pytestmark = pytest.mark.interpreted
OPEN, SHUT = torch.tensor(True), torch.tensor(False)


@pytest.fixture(params=["triton" if INTERPRETED else "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way the functions go; the interpreter runs small tiles, and must not be left for torch."""
    if request.param == "triton":
        monkeypatch.setattr(elementwise, "available", lambda device: True)
        monkeypatch.setattr(elementwise, "elementwise_torch", None)
        monkeypatch.setattr(triton_elementwise, "TILE", {"ROWS": 8, "COLUMNS": 32, "num_warps": 1})
        monkeypatch.setattr(triton_elementwise, "BLOCK", {"BLOCK": 256, "num_warps": 1})
    return request.param


def powers(*exponents: int) -> Tensor:
    return torch.tensor([2.0**e for e in exponents])


# --- scales ------------------------------------------------------------------------------------------------


def test_a_product_of_scales_beyond_float32_is_no_matter(way: str):
    """2¹³⁰: its reciprocal is subnormal, and exact."""
    D = Scaled(torch.full((1, 1, 2), 2.0**10), (powers(100), powers(30)))
    assert unscaled(D).tolist() == [[[2.0**-120, 2.0**-120]]]


def test_unscaled(way: str):
    C = randn(2, 20, 30)
    scales = (powers(4, -4), powers(1, 2))
    expected = C / torch.tensor([32.0, 0.25]).view(-1, 1, 1)
    found = unscaled(Scaled(C, scales))
    assert torch.equal(found, expected)
    assert unscaled(found) is found


def test_a_scale_that_is_nan_stays_visible(way: str):
    found = unscaled(Scaled(torch.ones(2, 1, 1), (torch.tensor([1.0, torch.nan]),)))
    assert torch.isfinite(found).flatten().tolist() == [True, False]


def test_dot_of_a_scaled_one(way: str):
    X, Y = randn(3, 20, 31), randn(3, 20, 31, seed=1)
    scales = (powers(3, 0, -9),)
    expected = (X.double() / scales[0].view(-1, 1, 1) * Y.double()).sum()
    assert float(elementwise.dot(Scaled(X, scales), Y)) == pytest.approx(float(expected), rel=1e-5)


# --- Adam --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("all_finite", "taken"), [(None, 1), (OPEN, 1), (SHUT, 0)])
def test_corrections(way: str, all_finite: Tensor | None, taken: int):
    before = torch.tensor([0.0, 1.0, 7.0, 1000.0]).repeat(80)
    steps = before.clone()
    for found, beta in zip(corrections_(steps, 0.9, 0.999, all_finite), (0.9, 0.999), strict=True):
        t = (before.double() + taken).clamp_min(1)
        torch.testing.assert_close(found.double(), 1 - beta**t, rtol=2e-6, atol=0)  # 1 − β of 1e-3 has all digits
    assert torch.equal(steps, before + taken)
    assert corrections_(steps, 0.0, 0.5)[0].tolist() == [1.0] * len(steps)


@pytest.mark.parametrize("shape", [(700, 1, 2), (5, 17, 3), (3, 1, 1), (2, 20, 30)])
@pytest.mark.parametrize("all_finite", [None, SHUT])
def test_adam_of_many_small_groups(way: str, shape: tuple[int, int, int], all_finite: Tensor | None):
    m, v, g = randn(*shape), randn(*shape, seed=1).square(), randn(*shape, seed=2)
    c1, c2 = (torch.linspace(low, 1.0, shape[0]) for low in (0.1, 0.2))
    old = m.clone(), v.clone()
    step = elementwise.adam_(
        m, v, g, beta1=0.9, beta2=0.99, eps=1e-8, correction1=c1, correction2=c2, all_finite=all_finite
    )
    if all_finite is SHUT:
        assert torch.equal(m, old[0])
        assert torch.equal(v, old[1])
        assert not step.any()
        return
    M, V = 0.9 * old[0].double() + 0.1 * g, 0.99 * old[1].double() + 0.01 * g.double().square()
    c1, c2 = c1.double().view(-1, 1, 1), c2.double().view(-1, 1, 1)
    torch.testing.assert_close(step.double(), M / c1 / (V / c2).sqrt().add(1e-8), rtol=1e-4, atol=1e-6)


# --- magnitudes --------------------------------------------------------------------------------------------


def test_magnitudes_of_several_types():
    tensors = [randn(3, 2), randn(4).bfloat16(), -5 * torch.ones(2, 2), torch.tensor([2.0]).half()]
    found = largest_of_each(tensors)
    assert found.tolist() == [float(X.abs().max()) for X in tensors]
    assert found.dtype == torch.float32


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_entry_of_one_type_is_found(value: float):
    bad = torch.ones(5, dtype=torch.bfloat16)
    bad[3] = value
    found = largest_of_each([torch.ones(3), bad, torch.full((2,), 1e300, dtype=torch.float64)])
    assert found.isfinite().tolist() == [True, False, True]


@only_interpreted
@pytest.mark.parametrize("layout", ["whole", "transposed", "rows apart", "matrices apart"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 40, 33), (1, 1, 1), (2, 1, 300)])
def test_largest_entries_and_the_split_by_them(
    shape: tuple[int, int, int], layout: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(triton_splits, "SPLIT_BLOCK", 64)
    K, m, n = shape
    X = {
        "whole": randn(K, m, n),
        "transposed": randn(K, n, m).mT,
        "rows apart": randn(K, m, n + 3)[..., :n],
        "matrices apart": randn(2 * K, m, n)[::2],
    }[layout]
    largest = X.abs().amax((1, 2))
    expected = split_fp16.split(X)
    for found in (triton_splits.split(X), triton_splits.split(X, amax=largest)):
        assert torch.equal(found.scale, expected.scale)
        assert torch.equal(found.hi, expected.hi)
        assert torch.equal(found.lo, expected.lo)
    assert torch.equal(triton_splits.halved(X, amax=largest).hi, expected.hi)
    loose = triton_splits.split(X, amax=1000 * largest)  # a bound that is not tight costs few bits
    torch.testing.assert_close(loose.value(), X, rtol=2.0**-21, atol=float(largest.max()) * 2.0**-27)


@only_interpreted
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_matrix_nan(value: float):
    X = randn(3, 20, 20)
    X[1, 3, 4] = value
    assert torch.isnan(triton_splits.split(X).scale).tolist() == [False, True, False]
