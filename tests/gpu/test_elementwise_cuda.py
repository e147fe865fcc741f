"""Fused passes on a GPU: Triton's kernels agree with torch's calls, at the sizes of a model and at odd ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from layerwise.optim.cuda import elementwise, elementwise_torch
from layerwise.optim.cuda.gradient_sizes import largest_of_each
from layerwise.optim.cuda.triton import elementwise as triton_elementwise
from layerwise.optim.cuda.triton.products import available
from layerwise.optim.step.update import rows_apart
from random_tensors import cuda_randn as randn
from waiting import nothing_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and available(torch.device("cuda"))),
        reason="needs triton and a GPU of capability 8.0; run `make test-gpu` on one",
    ),
]


def mask_of(state: str) -> Tensor | None:
    return None if state == "none" else torch.full((), state == "open", device="cuda")


def both(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> tuple[Any, Any]:
    """What a function that makes its own inputs returns: by the kernels alone, and by torch."""
    with monkeypatch.context() as patch:
        patch.setattr(elementwise, "elementwise_torch", None)
        found = call()
    with monkeypatch.context() as patch:
        patch.setattr(elementwise, "available", lambda device: False)
        return found, call()


def close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        half = x.dtype in (torch.bfloat16, torch.float16)
        bound = 8e-3 if half else tolerance  # a last digit: torch does not contract products and sums
        torch.testing.assert_close(x.double(), y.double(), rtol=bound, atol=bound)


STEPS, DTYPES = ("none", "open", "shut"), (torch.float32, torch.bfloat16, torch.float16)
STACKS = [(12, 768, 784), (3, 33, 31), (40, 1, 1)]
# Triton compiles a kernel for every mask and kind: any two of these meet once or more.
STACKED = [(shape, bool((a + b) % 2), STEPS[a]) for b, shape in enumerate(STACKS) for a in range(3)]


@pytest.mark.parametrize("sizes", [(784, 769), (784, 784), (37, 5), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ema(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], dtype: torch.dtype):
    n, m = sizes
    weight, divisor = torch.tensor([0.25, 1.0, 0.0], device="cuda"), randn(3, seed=2).abs() + 0.5

    def call() -> list[Tensor]:
        new = randn(3, m, m + 16, seed=1).to(dtype)[..., :m]
        new[2] = torch.nan
        mean, vectors = randn(6, n, n)[::2], randn(3, n)
        return [
            elementwise.ema_(mean, new, weight, divisor).clone(),
            elementwise.ema_(mean, new, weight, 3.0),
            elementwise.ema_(vectors, new[:, 0], weight, divisor),
        ]

    found, expected = both(monkeypatch, call)
    close(found, expected, 1e-6)
    assert all(torch.isfinite(x).all() for x in found)
    assert torch.equal(found[1][2], randn(6, n, n)[4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_gate(dtype: torch.dtype):
    tensors = [torch.full((300, 7000), 6e4, device="cuda").to(dtype), *(randn(7).to(dtype) for _ in range(400))]
    assert bool(largest_of_each([*tensors, randn(5).double()]).isfinite().all())
    for bad in (torch.nan, torch.inf, -torch.inf):
        for at in (0, 250):
            broken = [X.clone() if place == at else X for place, X in enumerate(tensors)]
            broken[at].view(-1)[-1] = bad
            assert largest_of_each(broken).isfinite().logical_not().nonzero().tolist() == [[at]]


@pytest.mark.parametrize(("shape", "rotated", "all_finite"), STACKED)
def test_adam(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], rotated: bool, all_finite: str):
    K = shape[0]
    t = torch.arange(1.0, K + 1, device="cuda")
    numbers = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "correction1": 1 - 0.9**t, "correction2": 1 - 0.95**t}
    adam = elementwise.rotated_adam_ if rotated else elementwise.adam_
    numbers |= {"floor": 0.3 * t / K} if rotated else {}

    def call() -> list[Tensor]:
        M, V, R = randn(2 * K, *shape[1:])[::2], randn(*shape, seed=1).square(), randn(*shape, seed=2)
        R = R * torch.nan if all_finite == "shut" else R
        step = adam(M, V, R, **numbers, all_finite=mask_of(all_finite))
        return [M, V, step, adam(M, V, R, **numbers, all_finite=mask_of(all_finite), out=R)]

    found, expected = both(monkeypatch, call)
    close(found, expected, 1e-5)
    assert all(torch.isfinite(x).all() for x in found)


@pytest.mark.parametrize("all_finite", STEPS)
@pytest.mark.parametrize("shape", STACKS)
def test_norms_of_adam(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], all_finite: str):
    K = shape[0]
    t = torch.arange(1.0, K + 1, device="cuda")
    numbers = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "correction1": 1 - 0.9**t, "correction2": 1 - 0.95**t}

    def call() -> list[Tensor]:
        m, v, g = randn(2 * K, *shape[1:])[::2], randn(*shape, seed=1).square(), randn(*shape, seed=2)
        g = g * torch.nan if all_finite == "shut" else g
        return [m, v, *elementwise.adam_norms_(m, v, g, **numbers, all_finite=mask_of(all_finite))]

    found, expected = both(monkeypatch, call)
    known = 3 if all_finite == "shut" else 4  # of a step left out the largest of m may be zero
    close(found[:known], expected[:known], 1e-5)
    assert all(torch.isfinite(x).all() for x in found)
    assert bool((found[2] > 0).all()) == (all_finite != "shut")
    assert torch.equal(call()[2], found[2])  # added in an order that does not change


@pytest.mark.parametrize("all_finite", ["open", "shut"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("shape", [(3, 768, 768), (2, 2304, 768), (2, 600, 513), (3, 768, 3072)])
def test_norms_of_adam_by_some_rows(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], whole: bool, all_finite: str
):
    """Rows without a gradient: none, some, of those that are seen some or all, all."""
    K, O, I = shape
    apart, t = rows_apart(O, I), torch.arange(1.0, K + 1, device="cuda")
    of_v = len(range(0, O, apart))
    assert apart > 1
    numbers = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "correction1": 1 - 0.9**t, "correction2": 1 - 0.95**t}
    kinds = [[], [*range(1, O, 2)], [*range(0, 100 * apart, apart)], [*range(0, O, apart)], [*range(O)]]

    def call(zeros: list[int]) -> list[Tensor]:
        m, v = randn(2 * K, O if whole else of_v, I)[::2], randn(K, of_v, I, seed=1).square()
        g = randn(*shape, seed=2)
        g[0, zeros] = 0.0
        g = g * torch.nan if all_finite == "shut" else g
        return [m, v, *elementwise.adam_norms_(m, v, g, **numbers, all_finite=mask_of(all_finite), apart=apart)]

    norms = []
    for zeros in kinds:
        found, expected = both(monkeypatch, partial(call, zeros))
        known = 3 if all_finite == "shut" else 4
        close(found[:known], expected[:known], 1e-5)
        assert bool((found[2] > 0).all()) == (all_finite != "shut")
        assert torch.equal(call(zeros)[2], found[2])  # added in an order that does not change
        norms.append(float(found[2][0]))
    assert len({*norms}) == (len(kinds) if all_finite == "open" else 1)


@pytest.mark.parametrize(("shape", "nesterov", "all_finite"), STACKED)
def test_momentum_update(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], nesterov: bool, all_finite: str):
    def call() -> list[Tensor]:
        M, G = randn(2 * shape[0], *shape[1:])[::2], randn(*shape, seed=1)
        G = G * torch.nan if all_finite == "shut" else G
        return [M, *elementwise.momentum_update_(M, G, 0.95, nesterov, mask_of(all_finite))]

    found, expected = both(monkeypatch, call)
    close(found, expected, 1e-5)
    assert torch.equal(call()[2], found[2])


def test_dot():
    X, Y = randn(6, 768, 784)[::2], randn(3, 768, 784, seed=1)
    for left in (X, X.bfloat16(), X.clone()):
        found = elementwise.dot(left, Y)
        exact = (left.double() * Y.double()).sum()
        assert abs(float(found - exact)) < 1e-6 * float(left.double().norm() * Y.double().norm())
        assert torch.equal(found, elementwise.dot(left, Y))


def compiled() -> int:
    """How many variants of the kernels exist."""
    kernels = triton_elementwise.kernels("elementwise_kernels")
    names = ("adam_kernel", "adam_norm_kernel", "norm_of_all_kernel", "ema_kernel")
    jitted = [getattr(kernels, name) for name in names]
    return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in jitted)


def all_of(lr: float, weights: list[Tensor], stack: Tensor, all_finite: Tensor) -> None:
    ones = torch.ones(2, device="cuda")
    moments = {"beta1": lr, "beta2": lr, "eps": lr, "correction1": ones, "correction2": ones}
    elementwise.adam_(stack.clone(), stack.square(), stack, **moments, all_finite=all_finite)
    elementwise.adam_norms_(stack.clone(), stack.square(), stack, **moments, all_finite=all_finite)
    elementwise.ema_(stack, stack.clone(), ones, lr)
    elementwise.momentum_update_(stack.clone(), stack, lr, all_finite=all_finite)
    largest_of_each(weights)
    elementwise.dot(stack, stack)


def test_numbers_do_not_compile_again_and_nothing_waits():
    weights, stack, all_finite = (
        [randn(32, 32) for _ in range(2)],
        torch.zeros(2, 32, 48, device="cuda"),
        mask_of("open"),
    )
    assert all_finite is not None
    assert elementwise.implementation_for(stack) is triton_elementwise
    assert elementwise.implementation_for(stack.double()) is elementwise_torch
    all_of(0.5, weights, stack, all_finite)
    before = compiled()
    torch.cuda.synchronize()
    with nothing_waits():
        for lr in (1, 1.0, 0, 0.0, 16, 1e-3):
            all_of(lr, weights, stack, all_finite)
    assert compiled() == before
