"""Passes in an eigenbasis on a GPU: kernels agree with torch; squares of examples in half precision."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from layerwise.layers.io.standard import Standard
from layerwise.optim.backend import Average
from layerwise.optim.cuda import elementwise
from layerwise.optim.cuda.device_step import DeviceStep
from layerwise.optim.cuda.eigenbasis_elementwise import damped_quotient, scaled, squares_ema_
from layerwise.optim.cuda.fp16_steps import damped_half, moves
from layerwise.optim.cuda.triton import elementwise as triton_elementwise
from layerwise.optim.cuda.triton.products import available
from layerwise.optim.rule import Context
from random_tensors import cuda_randn as randn
from waiting import nothing_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and available(torch.device("cuda"))),
        reason="needs triton and a GPU of capability 8.0; run `make test-gpu` on one",
    ),
]
SHAPES = [(12, 768, 784), (3, 770, 131), (40, 33, 18), (2, 1, 1)]
MEANS = [torch.float32, torch.bfloat16]


def same_by_both_ways(monkeypatch: pytest.MonkeyPatch, call: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What a function that makes its own inputs returns, by the kernels alone and by torch."""
    with monkeypatch.context() as patch:
        patch.setattr(elementwise, "elementwise_torch", None)
        found = call()
    with monkeypatch.context() as patch:
        patch.setattr(elementwise, "available", lambda device: False)
        expected = call()
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        bound = 8e-3 if x.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(x.double(), y.double(), rtol=bound, atol=bound, equal_nan=True)
    return found


@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("shape", SHAPES)
def test_squares_ema(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], means: torch.dtype):
    weight = (torch.arange(shape[0], device="cuda") % 3) / 2  # 0, 1/2, 1

    def call() -> list[Tensor]:
        s, R = randn(2 * shape[0], *shape[1:])[::2].square().to(means), randn(*shape, seed=1)
        R[0] = torch.nan
        R[-1, -1, -1] = 3e19
        return [squares_ema_(s, R, weight, 2048), squares_ema_(s.clone(), R.bfloat16(), weight)]

    found = same_by_both_ways(monkeypatch, call)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("with_factors", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_damped_quotient(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], with_factors: bool, means: torch.dtype
):
    K, O, I = shape
    s_P, s_Q = randn(K, O, seed=2).square(), randn(K, I, seed=3).square()
    left, right, constant = (randn(K, seed=seed).abs() for seed in (4, 5, 6))
    numbers = (left, right, constant) if with_factors else (None, None, constant)

    def call() -> list[Tensor]:
        R, s = randn(2 * K, O, I)[::2], (randn(K, O, I, seed=1).square() + 0.1).to(means)
        half = damped_quotient(R, s, s_P, s_Q, *numbers, out=torch.empty_like(s, dtype=torch.bfloat16))
        apart = damped_quotient(R, s, s_P, s_Q, *numbers)
        return [half, apart, damped_quotient(R, s, s_P, s_Q, *numbers, out=R)]

    found = same_by_both_ways(monkeypatch, call)
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("shape", SHAPES)
def test_quotients_are_by_means_as_they_are_kept(shape: tuple[int, int, int]):
    """In bfloat16, rounded to the nearest, not cut off; and again where a scale is wrong."""
    R, one, before = randn(*shape), torch.ones(shape[0], device="cuda"), torch.zeros(shape[0], device="cuda")
    s, added = (randn(*shape, seed=1).square() + 0.1).bfloat16(), (None, None, None, None, one)
    expected = s.float().lerp(8 * R.square(), 0.25).bfloat16()
    squares_ema_(s, R, 0.25 * one, 8.0)
    # An entry between two neighbours may go to either where products are contracted otherwise than torch's.
    assert float((s != expected).float().mean()) < 1e-3
    torch.testing.assert_close(s.float(), expected.float(), rtol=2.0**-7, atol=0.0)
    Y, half = R / (s.float() + 1), damped_half(R.clone(), s, added, before)  # no scale was foreseen
    found = half.hi.float() / half.scale.view(-1, 1, 1)
    assert bool(((found - Y).flatten(1).norm(dim=1) <= 5e-4 * Y.flatten(1).norm(dim=1)).all())
    torch.testing.assert_close(damped_quotient(R, s, *added), Y, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_scaled(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]):
    a, b = randn(*shape[:2], seed=1), randn(shape[0], shape[2], seed=2)

    def call() -> list[Tensor]:
        R = randn(2 * shape[0], *shape[1:])[::2]
        sides = [scaled(R, a, None), scaled(R, None, b), scaled(R.bfloat16(), a, b)]
        return [*sides, scaled(R, a, b, out=R)]

    same_by_both_ways(monkeypatch, call)


def test_numbers_do_not_compile_again_and_nothing_waits():
    R, s, one = randn(2, 32, 48), torch.ones(2, 32, 48, device="cuda"), torch.ones(2, device="cuda")

    def all_of(factor: int | float) -> None:
        squares_ema_(s, R, one, factor)
        damped_quotient(R, s, s[..., 0], s[:, 0], one, one, one)
        damped_quotient(R, s, None, None, None, None, one)
        scaled(R, s[..., 0], s[:, 0], out=R)

    def compiled() -> int:
        kernels = triton_elementwise.kernels("eigenbasis_kernels")
        names = ("squares_ema_kernel", "damped_quotient_kernel", "scaled_kernel")
        caches = [getattr(kernels, name).device_caches[torch.cuda.current_device()][0] for name in names]
        return sum(len(cache) for cache in caches)

    all_of(0.5)
    before = compiled()
    torch.cuda.synchronize()
    with nothing_waits():
        for factor in (1, 1.0, 0, 16, 1e-3):
            all_of(factor)
    assert compiled() == before


@pytest.mark.parametrize("s", [1, 16, 512])
def test_squares_of_examples_in_half_precision(s: int):
    a, g = randn(8, s, 1, 129).bfloat16(), randn(1, 8, s, 1, 96, seed=1).bfloat16()
    U_A, U_G = (torch.linalg.qr(randn(1, n, n, seed=n)).Q for n in (129, 96))
    exact = Standard(a.double(), g.double()).rotated_squared_sum(U_A.double(), U_G.double())
    found = Standard(a, g).rotated_squared_sum(U_A, U_G)
    assert found.dtype == torch.float32
    assert float((found - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_averages_in_the_pass_of_a_quotient(shape: tuple[int, int, int], taken: bool, averaged: bool):
    """The same as one after the other: squares, the gradient, and the quotient of what is kept."""
    mask, before = torch.full((), taken, device="cuda"), torch.zeros(shape[0], device="cuda")
    one, R = torch.ones(shape[0], device="cuda"), randn(*shape, seed=1)
    s, M = (randn(*shape).square() + 0.1).bfloat16(), randn(*shape, seed=2) if averaged else None
    R[0, 0, 0] = 1e30  # its square is infinite
    context = Context(1, 0.1, 0.1, True, {}, examples=8, device_step=DeviceStep(mask))
    average = Average(M, 0.9, False, 0.75, context)
    assert moves(average, s, R)
    expected_s = squares_ema_(s.clone(), R, taken * 0.25 * one, 8)
    m = R if M is None else M.lerp(R, 0.1 * taken)
    half = damped_half(R.clone(), s, (None, None, None, None, one), before, average)
    torch.testing.assert_close(s, expected_s, rtol=8e-3, atol=0)
    if M is not None:
        torch.testing.assert_close(M, m, rtol=1e-6, atol=1e-6)
        m = M
    found, expected = half.hi.float() / half.scale.view(-1, 1, 1), m / (s.float() + 1)
    error = (found - expected).flatten(1).norm(dim=1)
    assert bool((error <= 1e-3 * expected.flatten(1).norm(dim=1)).all())
