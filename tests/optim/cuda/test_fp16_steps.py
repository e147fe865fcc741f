"""Steps in a basis written as halves whose scales are foreseen: by torch, and in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from interpreter import INTERPRETED
from layerwise.optim.backend import Average
from layerwise.optim.cuda import elementwise, fp16_steps
from layerwise.optim.cuda.backend import CudaBackend
from layerwise.optim.cuda.device_step import DeviceStep
from layerwise.optim.cuda.eigenbasis_elementwise import damped_quotient, scaled
from layerwise.optim.cuda.fp16_steps import HEADROOM, damped_half, moves, scaled_half
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.orthogonal import ROOM
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.triton import elementwise as triton_elementwise
from layerwise.optim.rule import Context
from random_tensors import randn

pytestmark = pytest.mark.interpreted
K, SHAPE = 3, (3, 17, 40)
TOP = 2.0**15 / ROOM
"""No scaled entry of a half with room exceeds it."""
COURSES = {
    "steady": [1.0, 1.5, 0.8, 1.1],
    "growing": [1.0, 7.0, 300.0, 1e9],
    "shrinking": [1.0, 0.3, 1e-3, 1e-12],
    "silent": [1.0, 0.0, 0.0, 1.0],
}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(elementwise, "available", lambda device: True)
        monkeypatch.setattr(elementwise, "elementwise_torch", None)
        monkeypatch.setattr(fp16_steps, "with_room", None)
        monkeypatch.setattr(triton_elementwise, "TILE", {"ROWS": 8, "COLUMNS": 32, "num_warps": 1})


def not_divided(R: Tensor) -> Scaled:
    scale = torch.tensor([2.0**e for e in (3, -5, 20)])
    return Scaled(R * scale.view(-1, 1, 1), (scale,))


def check(half: Half, expected: Tensor, before: Tensor) -> None:
    """The value in 11 bits, with room, and the largest entries."""
    assert half.hi.dtype == torch.float16
    largest = expected.flatten(1).abs().amax(1)
    assert torch.allclose(before, largest, rtol=1e-6, atol=0.0)
    scaled_largest = half.hi.float().flatten(1).abs().amax(1)
    assert bool((scaled_largest <= TOP).all())
    silent = largest == 0
    assert bool(((scaled_largest >= 0.99 * TOP / (2 * HEADROOM**2)) | silent).all())
    assert torch.equal(half.scale.log2(), half.scale.log2().round())
    found = half.hi.float() / half.scale.view(-1, 1, 1)
    error = (found - expected).flatten(1).norm(dim=1)
    assert bool((error <= 3e-4 * expected.flatten(1).norm(dim=1)).all())


@pytest.mark.parametrize(
    ("course", "dtype"),
    [*((course, torch.float32) for course in COURSES), *((c, torch.bfloat16) for c in ("growing", "shrinking"))],
)
@pytest.mark.parametrize("with_factors", [False, True])
def test_quotients_as_steps_go_on(course: str, with_factors: bool, dtype: torch.dtype):
    s, before, one = (randn(*SHAPE, seed=1).square() + 0.1).to(dtype), torch.zeros(K), torch.ones(K)
    s_P, s_Q = randn(K, SHAPE[1], seed=2).square(), randn(K, SHAPE[2], seed=3).square()
    added = (s_P, s_Q, 0.5 * one, 2 * one, 0.1 * one) if with_factors else (None, None, None, None, one)
    for t, size in enumerate(COURSES[course]):
        R = size * randn(*SHAPE, seed=10 + t)
        expected = damped_quotient(R.clone(), s, *added)
        check(damped_half(not_divided(R), s, added, before), expected, before)


def quotient_of_averages(
    R: Tensor, s: Tensor, before: Tensor, taken: bool, M: Tensor | None = None, squares: float | None = None
) -> Half:
    """As the backend makes it: in one pass by kernels, one after the other by torch."""
    context = Context(7, 0.1, 0.1, True, {}, examples=6, device_step=DeviceStep(torch.tensor(taken)))
    added, average = (None, None, None, None, torch.ones(K)), Average(M, 0.875, False, squares, context)
    X = not_divided(R)
    if moves(average, s, X.C):
        return damped_half(X, s, added, before, average)
    return damped_half(average.moved(X, s, CudaBackend()), s, added, before)


@pytest.mark.parametrize("taken", [True, False])
def test_quotients_of_an_average(taken: bool):
    """M is moved, and divided in place of R; in a step that is left out it stays, and R is zero."""
    s, before = randn(*SHAPE, seed=1).square() + 0.1, torch.zeros(K)
    M, R = randn(*SHAPE, seed=2), taken * randn(*SHAPE, seed=3)
    expected = torch.lerp(M, R, 0.125) if taken else M.clone()
    for _ in range(2):  # the second time with a scale that was foreseen
        moved = M.clone()
        half = quotient_of_averages(R, s, before, taken, moved)
        torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-7)
        check(half, moved / (s + 1), before)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_an_average_takes_in_what_is_finite(bad: float):
    """Of an entry that is not, it stays: else every later step, and after a refresh every entry, would have it."""
    s, M, R = torch.ones(*SHAPE), randn(*SHAPE, seed=2), randn(*SHAPE, seed=3)
    R[1, 2, 3] = bad
    expected = torch.lerp(M, R, 0.125)
    expected[1, 2, 3] = M[1, 2, 3]
    quotient_of_averages(R, s, torch.zeros(K), True, M)
    torch.testing.assert_close(M, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("taken", [True, False])
def test_squares_are_averaged_before(taken: bool, averaged: bool, dtype: torch.dtype):
    """And divided by as they are kept. A square that overflows leaves its mean; so does a step that is left out."""
    s, M, R = (randn(*SHAPE, seed=1).square() + 0.1).to(dtype), randn(*SHAPE, seed=2), randn(*SHAPE, seed=3)
    R[1, 2, 3] = 1e30
    expected = s.float().lerp(6 * R.square(), 0.25) if taken else s.float()
    expected[1, 2, 3] = s[1, 2, 3]
    m = torch.lerp(M, R, 0.125) if taken else M
    moved = M.clone() if averaged else None
    half = quotient_of_averages(R, s, torch.zeros(K), taken, moved, squares=0.75)
    torch.testing.assert_close(s, expected.to(dtype), rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-6, atol=0)
    Y, others = (m if averaged else R) / (s.float() + 1), [0, 2]
    torch.testing.assert_close((half.hi.float() / half.scale.view(-1, 1, 1))[others], Y[others], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("course", COURSES)
def test_scaled_as_steps_go_on(course: str):
    a, b, before = randn(K, SHAPE[1], seed=2), randn(K, SHAPE[2], seed=3), torch.zeros(K)
    for t, size in enumerate(COURSES[course]):
        R = size * randn(*SHAPE, seed=10 + t)
        left, right = (a, b) if t % 2 else (a, None)
        expected = scaled(R.clone(), left, right)
        half = scaled_half(not_divided(R), left, right, before)
        check(half, expected, before)


def test_a_group_that_is_not_finite_is_alone_with_it():
    """And at the next step all are well again."""
    s, before, added = torch.ones(SHAPE), torch.zeros(K), (None, None, None, None, torch.ones(K))
    for bad in (torch.nan, torch.inf):
        R = randn(*SHAPE)
        broken = R.clone()
        broken[1, 2, 3] = bad
        half = damped_half(broken, s, added, before)
        found = half.hi.float() / half.scale.view(-1, 1, 1)
        assert bool(found[1].isnan().all())
        assert not bool(before[1].isfinite())
        good = [0, 2]
        assert torch.allclose(found[good], R[good] / 2, rtol=1e-3, atol=1e-4)
        if bad == torch.inf:  # in between a step without a gradient
            before.fill_(bad)
            silent = damped_half(torch.zeros(SHAPE), s, added, before)
            assert not bool(silent.hi.any())
            assert bool(silent.scale.isfinite().all())
        check(damped_half(R.clone(), s, added, before), R / 2, before)
