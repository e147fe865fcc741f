"""Passes that read what is not divided yet, write halves, and leave their largest entries: by torch, and in Triton's
interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter import INTERPRETED
from layerwise.optim.cuda import elementwise
from layerwise.optim.cuda.eigenbasis_elementwise import damped_quotient, scaled, squares_ema_
from layerwise.optim.cuda.scaled import Scaled, unscaled
from layerwise.optim.cuda.triton import elementwise as triton_elementwise
from random_tensors import randn

pytestmark = pytest.mark.interpreted
OPEN, SHUT = torch.tensor(True), torch.tensor(False)
SHAPES = [(3, 5, 7), (3, 17, 40)]
ONE = torch.ones(3)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs small tiles, and must not be left for torch."""
    if INTERPRETED:
        monkeypatch.setattr(elementwise, "available", lambda device: True)
        monkeypatch.setattr(elementwise, "elementwise_torch", None)
        monkeypatch.setattr(triton_elementwise, "TILE", {"ROWS": 8, "COLUMNS": 32, "num_warps": 1})
        monkeypatch.setattr(triton_elementwise, "BLOCK", {"BLOCK": 256, "num_warps": 1})


def powers(*exponents: int) -> Tensor:
    return torch.tensor([2.0**e for e in exponents])


def not_divided(R: Tensor) -> Scaled:
    """The same R, which no pass has divided."""
    scales = powers(3, -5, 40), powers(10, 0, -20)
    return Scaled(R * (scales[0] * scales[1]).view(-1, 1, 1), scales)


def adam(M: Tensor, V: Tensor, R: Tensor | Scaled, **options: Any) -> Tensor:
    return elementwise.rotated_adam_(
        M, V, R, beta1=0.9, beta2=0.99, eps=1e-8, correction1=0.5 * ONE, correction2=0.25 * ONE, **options
    )


# --- what is not divided yet -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_passes_divide_on_their_way(shape: tuple[int, int, int]):
    R, s, a = randn(*shape), randn(*shape, seed=1).square() + 0.1, randn(*shape[:2], seed=2)
    assert torch.equal(scaled(not_divided(R), a, None), scaled(R, a, None))
    quotients = [damped_quotient(X, s, None, None, None, None, ONE) for X in (R, not_divided(R))]
    assert torch.equal(*quotients)
    assert torch.equal(squares_ema_(s.clone(), not_divided(R), 0.3 * ONE), squares_ema_(s.clone(), R, 0.3 * ONE))
    moments = [(randn(*shape, seed=3), s.clone()) for _ in range(2)]
    steps = [adam(M, V, X) for (M, V), X in zip(moments, (R, not_divided(R)), strict=True)]
    assert torch.equal(*steps)
    assert torch.equal(moments[0][0], moments[1][0])
    assert torch.equal(moments[0][1], moments[1][1])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_quotient_may_take_the_place_of_what_is_not_divided(shape: tuple[int, int, int]):
    R, s = randn(*shape), randn(*shape, seed=1).square()
    held = not_divided(R)
    found = damped_quotient(held, s, None, None, None, None, ONE, out=held.C)
    assert found is held.C
    torch.testing.assert_close(found, R / (s + 1))


# --- largest entries -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_passes_leave_their_largest_entries(shape: tuple[int, int, int]):
    R, s, b = randn(*shape), randn(*shape, seed=1).square(), randn(shape[0], shape[2], seed=2)
    R[1] *= -1e-30
    for make in (
        lambda largest: damped_quotient(not_divided(R), s, None, None, None, None, ONE, largest=largest),
        lambda largest: scaled(R, None, b, out=torch.empty(shape), largest=largest),
    ):
        largest = torch.zeros(3)
        assert torch.equal(make(largest).abs().amax((1, 2)), largest)


def test_a_largest_entry_that_is_not_finite_stays_visible():
    R = randn(3, 17, 40)
    R[0, 16, 39], R[1, 3, 3] = torch.nan, -torch.inf
    largest = torch.zeros(3)
    scaled(R, torch.ones(3, 17), None, largest=largest)
    assert largest.isfinite().tolist() == [False, False, True]


# --- steps in float16 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("all_finite", [None, OPEN, SHUT])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_adam_step_in_float16(shape: tuple[int, int, int], all_finite: Tensor | None):
    R, M, V = randn(*shape), randn(*shape, seed=1), randn(*shape, seed=2).square()
    before, out = (M.clone(), V.clone()), torch.empty(shape, dtype=torch.float16)
    found = adam(M, V, not_divided(R), all_finite=all_finite, out=out, factor=64.0)
    assert found is out
    if all_finite is SHUT:
        assert not out.any()
        assert torch.equal(M, before[0])
        assert torch.equal(V, before[1])
        return
    expected = adam(before[0], before[1], R, all_finite=all_finite)
    torch.testing.assert_close(out.float() / 64, expected.clamp(-1023, 1023), rtol=2.0**-11, atol=2.0**-30)
    assert torch.equal(M, before[0])


def test_a_step_too_large_for_float16_is_cut_off_and_nan_stays():
    M, V = torch.full((3, 1, 4), 1e9), torch.ones(3, 1, 4)
    M[1] *= -1
    M[2, 0, 1] = torch.nan
    out = adam(M, V, torch.zeros(3, 1, 4), out=torch.empty(3, 1, 4, dtype=torch.float16), factor=64.0)
    assert out[:2, 0, 0].tolist() == [65504.0, -65504.0]
    assert out[2].isnan().tolist() == [[False, True, False, False]]
    half = scaled(torch.full((3, 1, 4), -1e6), torch.ones(3, 1), None, out=torch.empty(3, 1, 4).half())
    assert half.unique().tolist() == [-65504.0]


# --- directions in float16 ---------------------------------------------------------------------------------------


def test_a_scaled_half_is_divided_in_float32():
    C, scales = torch.full((3, 2, 5), 3e4).half(), (powers(-20, 0, 40),)
    found = unscaled(Scaled(C, scales))
    assert found.dtype == torch.float32
    assert torch.equal(found, C.float() / scales[0].view(-1, 1, 1))
    Y = randn(3, 2, 5)
    expected = float((found.double() * Y.double()).sum())
    assert float(elementwise.dot(Scaled(C, scales), Y)) == pytest.approx(expected, rel=1e-5)
