"""Passes in an eigenbasis against their formulas in float64: by torch, and by Triton's interpreter on the CPU."""

import jaxtyping
import pytest
import torch
from torch import Tensor

from interpreter import INTERPRETED
from layerwise.foundations.errors import InputError
from layerwise.optim.cuda import elementwise
from layerwise.optim.cuda.eigenbasis_elementwise import damped_quotient, scaled, squares_ema_
from layerwise.optim.cuda.triton import elementwise as triton_elementwise
from random_tensors import randn

pytestmark = pytest.mark.interpreted

TINY = torch.finfo(torch.float32).tiny
HALF = 8e-3 if INTERPRETED else 4e-3  # the interpreter cuts bfloat16 off, where a GPU rounds
SHAPES = [(4, 3, 5), (4, 17, 40), (4, 8, 32), (4, 1, 1)]
MEANS = {torch.float32: 2e-6, torch.bfloat16: HALF}
"""Types in which means are kept, and how far they are rounded."""


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs small tiles, and must not be left for torch."""
    if INTERPRETED:
        monkeypatch.setattr(elementwise, "available", lambda device: True)
        monkeypatch.setattr(elementwise, "elementwise_torch", None)
        monkeypatch.setattr(triton_elementwise, "TILE", {"ROWS": 8, "COLUMNS": 32, "num_warps": 1})
        monkeypatch.setattr(triton_elementwise, "BLOCK", {"BLOCK": 256, "num_warps": 1})


def strided(*shape: int, seed: int = 0) -> Tensor:
    """A stack whose matrices do not follow one another in memory."""
    return randn(2 * shape[0], *shape[1:], seed=seed)[::2]


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_squares_ema(shape: tuple[int, int, int], dtype: torch.dtype, means: torch.dtype):
    s, R = strided(*shape).square().to(means), strided(*shape, seed=1).to(dtype)
    weight = torch.tensor([0.25, 1.0, 0.0, 0.7])
    w = weight.double().view(-1, 1, 1)
    expected = s.double() + w * (3 * R.double().square() - s.double())
    s[1], R[2] = torch.nan, torch.nan  # of weight 1: replaced; of weight 0: ignored
    kept = s[2].clone()
    assert squares_ema_(s, R, weight, 3) is s
    assert torch.equal(s[2], kept)
    close(s, expected, MEANS[means])


@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e19])
def test_squares_that_are_not_finite_leave_their_own_entry(bad: float, means: torch.dtype):
    for weight in (0.5, 1.0):
        s, R = torch.ones(2, 3, 4, dtype=means), torch.full((2, 3, 4), 2.0)
        R[1, 2, 3] = bad
        squares_ema_(s, R, torch.full((2,), weight))
        expected = torch.full((2, 3, 4), 1 + 3 * weight, dtype=means)
        expected[1, 2, 3] = 1.0
        assert torch.equal(s, expected)


def test_a_mean_in_bfloat16_is_nearest_and_stays_finite():
    """A square that is larger than all of bfloat16 gives the largest of them, from which a mean can go down again."""
    s = torch.ones(1, 1, 2, dtype=torch.bfloat16)
    squares_ema_(s, torch.tensor([[[3.4e38**0.5, (1 + 2.0**-7) ** 0.5]]]), torch.ones(1))
    largest = torch.finfo(torch.bfloat16).max
    assert s[0, 0, 0] == largest
    if not INTERPRETED:  # where bfloat16 is cut off
        assert s[0, 0, 1] == 1 + 2.0**-7
        ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])
        assert elementwise.ema_(s[0], ties[None], torch.ones(1)).tolist() == [[1.0, 1 + 2.0**-6]]
    s.fill_(largest)
    assert squares_ema_(s, torch.zeros(1, 1, 2), torch.full((1,), 0.5)).tolist() == [[[largest / 2] * 2]]


@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("with_factors", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_damped_quotient(shape: tuple[int, int, int], with_factors: bool, means: torch.dtype):
    K, O, I = shape
    R, s = strided(*shape), (strided(*shape, seed=1).square() + 0.1).to(means)
    s_P, s_Q = randn(K, O, seed=2).square(), randn(I, K, seed=3).square().mT
    left, right, constant = (randn(K, seed=seed).abs() for seed in (4, 5, 6))
    added = constant.double().view(-1, 1, 1)
    if with_factors:
        added = added + s_P.double().unsqueeze(-1) * right.double().view(-1, 1, 1)
        added = added + s_Q.double().unsqueeze(-2) * left.double().view(-1, 1, 1)
    expected = R.double() / (s.double() + added)
    numbers = (left, right, constant) if with_factors else (None, None, constant)
    before = R.clone()
    close(damped_quotient(R, s, s_P, s_Q, *numbers), expected)
    assert torch.equal(R, before)
    half = torch.empty(shape, dtype=torch.bfloat16)
    close(damped_quotient(R, s, s_P, s_Q, *numbers, out=half), expected, HALF)
    assert damped_quotient(R, s, s_P, s_Q, *numbers, out=R) is R
    close(R, expected)


def test_what_is_added_is_never_zero():
    R, zeros, none = torch.full((3, 1, 2), TINY), torch.zeros(3, 1, 2), torch.zeros(3)
    R[2] = 0.0
    Y = damped_quotient(R, zeros, zeros[:, :, 0], zeros[:, 0], none, none, torch.tensor([0.0, 2 * TINY, 0.0]))
    assert Y[:, 0, 0].tolist() == [1.0, 0.5, 0.0]
    Y = damped_quotient(R, zeros + 1, None, None, None, None, torch.tensor([torch.nan, 1.0, 1.0]))
    assert Y[0].isnan().all()
    assert Y[1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_scaled(shape: tuple[int, int, int], dtype: torch.dtype):
    K, O, I = shape
    R, a, b = strided(*shape).to(dtype), randn(K, O, seed=1), randn(K, I, seed=2)
    rows, columns = a.double().unsqueeze(-1), b.double().unsqueeze(-2)
    bound = 2e-6 if dtype == torch.float32 else HALF
    close(scaled(R, a, None), R.double() * rows, bound)
    close(scaled(R, None, b), R.double() * columns, bound)
    expected = R.double() * rows * columns
    close(scaled(R, a, b, out=torch.empty(shape)), expected)
    assert scaled(R, a, b, out=R) is R
    close(R, expected, bound)


@pytest.mark.skipif(INTERPRETED, reason="float64 goes by torch")
def test_float64_stays_float64(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(elementwise, "available", lambda device: True)
    R, s, one = randn(2, 3, 4).double(), torch.ones(2, 3, 4).double(), torch.ones(2).double()
    assert torch.equal(damped_quotient(R, s, None, None, None, None, one), R / 2)
    assert torch.equal(scaled(R, s[..., 0] + 1, None), 2 * R)
    assert torch.equal(squares_ema_(s, R, 0.5 * one), 0.5 + 0.5 * R.square())
    empty = torch.empty(0, 3, 4)
    assert damped_quotient(empty, empty, None, None, None, None, torch.empty(0)).shape == (0, 3, 4)
    assert scaled(empty, None, None).shape == (0, 3, 4)


def test_stacks_that_do_not_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    s = torch.ones(1, 3, 4)
    with pytest.raises(InputError, match="R of shape"):
        squares_ema_(s, torch.ones(1, 4, 3).mT, torch.ones(1))
    with pytest.raises(InputError, match=r"out of shape \(1, 3, 5\)"):
        damped_quotient(s, s, None, None, None, None, torch.ones(1), out=torch.ones(1, 3, 5))
