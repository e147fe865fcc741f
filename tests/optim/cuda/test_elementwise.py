"""Fused passes against their formulas in float64: by torch, and by Triton's interpreter on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter import INTERPRETED
from layerwise.foundations.errors import InputError
from layerwise.optim.cuda import elementwise
from layerwise.optim.cuda.triton import elementwise as triton_elementwise
from random_tensors import randn

pytestmark = pytest.mark.interpreted

OPEN, SHUT = torch.tensor(True), torch.tensor(False)
STEPS = [None, OPEN, SHUT]
HALF = 8e-3 if INTERPRETED else 4e-3  # the interpreter cuts bfloat16 off, where a GPU rounds
LAYERS = [(1, 5, 7), (3, 16, 128), (2, 17, 130), (40, 3, 2)]


@pytest.fixture(params=["triton" if INTERPRETED else "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way the functions go; the interpreter runs small tiles, and must not be left for torch."""
    if request.param == "triton":
        monkeypatch.setattr(elementwise, "available", lambda device: True)
        monkeypatch.setattr(elementwise, "elementwise_torch", None)
        monkeypatch.setattr(triton_elementwise, "TILE", {"ROWS": 8, "COLUMNS": 32, "num_warps": 1})
        monkeypatch.setattr(triton_elementwise, "BLOCK", {"BLOCK": 256, "num_warps": 1})
    return request.param


def strided(*shape: int, seed: int = 0) -> Tensor:
    """A stack whose matrices do not follow one another in memory."""
    return randn(2 * shape[0], *shape[1:], seed=seed)[::2]


def layers(K: int, o: int, i: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    return [randn(o, i, seed=k).to(dtype) for k in range(K)], [randn(o, seed=99 + k).to(dtype) for k in range(K)]


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def is_shut(all_finite: Tensor | None) -> bool:
    return all_finite is SHUT


@pytest.mark.parametrize("all_finite", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", LAYERS)
def test_gather(way: str, shape: tuple[int, int, int], dtype: torch.dtype, all_finite: Tensor | None):
    K, o, i = shape
    weights, biases = layers(K, o, i, dtype)
    if is_shut(all_finite):
        weights[0][0, 0] = torch.nan
    for given, padding in ((biases, (0, 1)), (biases, (3, 5)), (None, (0, 0)), (None, (2, 0))):
        out = torch.full((2 * K, o + padding[0], i + padding[1]), torch.nan)[::2]
        assert elementwise.gather_(out, weights, given, -0.5, all_finite) is out
        expected = torch.zeros(out.shape)
        if not is_shut(all_finite):
            expected[:, :o, :i] = -0.5 * torch.stack(weights).float()
            if given is not None:
                expected[:, :o, i] = -0.5 * torch.stack(given).float()
        assert torch.equal(out, expected)


def test_finiteness_of_all():
    huge = torch.full((5, 3), 3e38)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            X = torch.ones(7, 9, dtype=dtype)
            fine = [huge, -huge, huge.double() * 1e100, X, torch.empty(0), torch.ones(()), torch.ones(4).bfloat16()]
            assert bool(elementwise.are_finite(fine))
            X[3, 2] = bad
            assert not bool(elementwise.are_finite(fine))
    assert bool(elementwise.are_finite([]))
    assert elementwise.are_finite([torch.empty(0)]).shape == ()


def expected_finish(
    W: list[Tensor], b: list[Tensor] | None, D: Tensor, M: Tensor | None, options: dict[str, Any], f: float
) -> tuple[list[Tensor], list[Tensor] | None, Tensor | None]:
    lr, decay, mu, nesterov = (options[name] for name in ("lr", "decay", "mu", "nesterov"))
    u = f * D.double()
    if M is not None:
        M = mu * M.double() + u
        u = u + mu * M if nesterov else M
    o, i = W[0].shape
    W = [(1 - lr * decay) * w.double() - lr * u[k, :o, :i] for k, w in enumerate(W)]
    b = None if b is None else [(1 - lr * decay) * x.double() - lr * u[k, :o, i] for k, x in enumerate(b)]
    return W, b, M


@pytest.mark.parametrize("all_finite", STEPS)
@pytest.mark.parametrize("nesterov", [None, False, True])
@pytest.mark.parametrize(
    ("weight_dtype", "D_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
)
@pytest.mark.parametrize("shape", LAYERS)
def test_finish(
    way: str,
    shape: tuple[int, int, int],
    weight_dtype: torch.dtype,
    D_dtype: torch.dtype,
    nesterov: bool | None,
    all_finite: Tensor | None,
):
    K, o, i = shape
    options = {"lr": 0.1, "decay": 0.3, "mu": 0.9, "nesterov": bool(nesterov)}
    for has_bias, factor in ((True, 0.5), (False, torch.tensor(0.5))):
        weights, biases = layers(K, o, i, weight_dtype)
        biases = biases if has_bias else None
        D, M = strided(K, o + 2, i + 3, seed=5).to(D_dtype), None if nesterov is None else strided(K, o + 2, i + 3)
        if is_shut(all_finite):
            D[:] = torch.nan
            before = [x.clone() for x in (*weights, *(biases or ()), *([] if M is None else [M]))]
        W, b, new = expected_finish(weights, biases, D, M, options, 0.5)
        elementwise.finish_(weights, biases, D, M, **options, factor=factor, all_finite=all_finite)
        after = [*weights, *(biases or ()), *([] if M is None else [M])]
        if is_shut(all_finite):
            assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))
            continue
        wanted = [*W, *(b or ()), *([] if new is None else [new])]
        rounding = 2e-6 if weight_dtype == torch.float32 else HALF
        for x, y in zip(after, wanted, strict=True):
            close(x, y, 2e-6 if x is M else rounding)


def test_finish_by_a_transposed_direction(way: str):
    X, M = strided(3, 40, 17).bfloat16(), strided(3, 17, 40, seed=1)
    weights, biases = layers(3, 15, 38)
    options = {"lr": 0.1, "decay": 0.3, "mu": 0.9, "nesterov": True}
    W, b, new = expected_finish(weights, biases, X.mT, M, options, 2.0)
    elementwise.finish_(weights, biases, X.mT, M, **options, factor=2)
    assert b is not None
    assert new is not None
    for x, y in zip([*weights, *biases, M], [*W, *b, new], strict=True):
        close(x, y)


def test_finish_rounds_weights_once(way: str):
    W, D = randn(4, 5).half(), 0.01 * randn(1, 4, 5, seed=1)
    expected = (0.5 * W.float() - 0.5 * D[0]).half()
    elementwise.finish_([W], None, D, lr=0.5, decay=1.0)
    assert torch.equal(W, expected)


def test_finish_takes_parameters_and_tells_autograd(way: str):
    W = torch.nn.Parameter(randn(4, 5))
    version = W._version
    elementwise.finish_([W], None, torch.ones(1, 4, 5), lr=0.5)
    assert W._version > version


def test_layers_of_unlike_types_and_strides(monkeypatch: pytest.MonkeyPatch):
    """Go by torch, even where there are kernels."""
    monkeypatch.setattr(elementwise, "available", lambda device: True)
    weights = [randn(5, 4), randn(4, 5, seed=1).mT, randn(5, 4, seed=2).bfloat16()]
    out = elementwise.gather_(torch.empty(3, 5, 4), weights, None)
    assert torch.equal(out, torch.stack([w.float() for w in weights]))
    elementwise.finish_(weights, None, out.clone(), lr=1.0)
    assert not any(w.any() for w in weights)


@pytest.mark.parametrize("sizes", [(7, 7), (50, 33), (32, 32), (1, 1)])
@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept_in", [torch.float32, torch.bfloat16])
def test_ema(way: str, sizes: tuple[int, int], vectors: bool, dtype: torch.dtype, kept_in: torch.dtype):
    n, m = sizes
    store = randn(4, m, m + 5, seed=1).to(dtype)
    new, mean = store[:, :, 1 : m + 1], strided(4, n, n).to(kept_in)
    if vectors:
        new, mean = new[:, 0], mean[:, 0].contiguous()
    weight = torch.tensor([0.25, 1.0, 0.0, 0.7])
    wide = torch.zeros(mean.shape).double()
    wide[:, :m] = new.double() if vectors else torch.nn.functional.pad(new.double(), (0, n - m))
    for divisor in (torch.tensor([2.0, 0.5, 3.0, 1.5]), 4):
        by = (divisor if isinstance(divisor, Tensor) else torch.full((4,), 4.0)).double()
        shape = (-1, *[1] * (mean.ndim - 1))
        expected = mean.double() + weight.double().view(shape) * (wide / by.view(shape) - mean.double())
        kept = mean[2].clone()
        new[2], mean[1] = torch.nan, torch.nan  # of weight 0: ignored; of weight 1: replaced
        assert elementwise.ema_(mean, new, weight, divisor) is mean
        assert torch.equal(mean[2], kept)
        close(mean, expected, 2e-6 if kept_in == torch.float32 else HALF)


def test_finite_diagonals(way: str):
    for dtype in (torch.float32, torch.bfloat16):
        X = torch.ones(6, 37, 40, dtype=dtype)[:, :, :37]
        X[0, 0, 0], X[1, 36, 36], X[2, 5, 5], X[3, 4, 5] = torch.nan, torch.inf, -torch.inf, torch.nan
        assert elementwise.finite_diagonals(X).tolist() == [False, False, False, True, True, True]
        assert elementwise.finite_diagonals(X[:, 0]).tolist() == [False, True, True, True, True, True]
        assert elementwise.finite_diagonals(X).dtype == torch.bool


@pytest.mark.parametrize("all_finite", STEPS)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 5), (3, 17, 31), (40, 2, 1)])
def test_adam(way: str, shape: tuple[int, int, int], rotated: bool, all_finite: Tensor | None):
    K, b1, b2, eps = shape[0], 0.9, 0.99, 1e-3
    M, V, R = strided(*shape), strided(*shape, seed=1).square_(), strided(*shape, seed=2)
    t = torch.arange(1.0, K + 1).double().view(-1, 1, 1)
    c1, c2 = 1 - b1**t, 1 - b2**t
    m, v = M.double().lerp(R.double(), 1 - b1), V.double().lerp(R.double().square(), 1 - b2)
    expected = m / (v.sqrt() + eps) * c2.sqrt() / c1 if rotated else (m / c1) / ((v / c2).sqrt() + eps)
    before = M.clone(), V.clone()
    if is_shut(all_finite):
        R[:] = torch.nan
    adam = elementwise.rotated_adam_ if rotated else elementwise.adam_
    corrections = {"correction1": c1.flatten().float(), "correction2": c2.flatten().float()}
    step = adam(M, V, R, beta1=b1, beta2=b2, eps=eps, **corrections, all_finite=all_finite)
    if is_shut(all_finite):
        assert torch.isfinite(step).all()
        assert torch.equal(M, before[0])
        assert torch.equal(V, before[1])
        return
    close(M, m)
    close(V, v)
    close(step, expected, 1e-5)
    M, V = (X.clone() for X in before)
    assert adam(M, V, R, beta1=b1, beta2=b2, eps=eps, **corrections, all_finite=all_finite, out=R) is R
    assert torch.equal(R, step)


@pytest.mark.parametrize("all_finite", STEPS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 5), (3, 17, 31), (40, 2, 1)])
def test_no_step_below_a_floor(way: str, shape: tuple[int, int, int], apart: bool, all_finite: Tensor | None):
    """One floor for each group, stacks in one piece or apart; entries of V on both sides of it, and zeros."""
    M, V, R = (strided(*shape, seed=seed) if apart else strided(*shape, seed=seed).contiguous() for seed in range(3))
    V.square_()
    V[:, 0] = R[:, 0] = 0
    c, floor = torch.full((len(M),), 0.5), torch.linspace(0, 0.5, len(M))
    numbers = {"beta1": 0.9, "beta2": 0.5, "eps": 1e-3, "correction1": c, "correction2": c, "all_finite": all_finite}
    plain = elementwise.rotated_adam_(M.clone(), V.clone(), R, **numbers)
    step = elementwise.rotated_adam_(M, V, R, floor=floor, **numbers)
    if is_shut(all_finite):
        assert torch.equal(step, torch.zeros_like(step))
        return
    above = (1 - floor.view(-1, 1, 1) / V).nan_to_num(0.0, neginf=0.0).clamp_min(0)
    close(step, plain * above, 1e-5)
    assert (step[:, 0] == 0).all()


@pytest.mark.parametrize("all_finite", STEPS)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 5), (3, 17, 31), (40, 2, 1)])
def test_momentum_update(way: str, shape: tuple[int, int, int], nesterov: bool, all_finite: Tensor | None):
    M, G = strided(*shape), strided(*shape, seed=1)
    new = M.double().lerp(G.double(), 1 - 0.95)
    update = G.double().lerp(new, 0.95) if nesterov else new
    before = M.clone()
    if is_shut(all_finite):
        G[:] = torch.nan
    found, squares = elementwise.momentum_update_(M, G, 0.95, nesterov, all_finite)
    assert found.dtype == torch.float32
    assert found.data_ptr() != M.data_ptr()
    if is_shut(all_finite):
        assert torch.equal(M, before)
        assert (found == 0).all()
        assert (squares == 0).all()
        return
    close(M, new)
    close(found, update)
    close(squares, update.square().flatten(1).sum(1), 1e-5)


@pytest.mark.parametrize("shape", [(1, 3, 5), (3, 17, 31), (700,)])
def test_dot(way: str, shape: tuple[int, ...]):
    X, Y = strided(*shape) if len(shape) > 1 else randn(*shape), randn(*shape, seed=1).bfloat16()
    close(elementwise.dot(X, Y), (X.double() * Y.double()).sum(), 1e-5)
    close(elementwise.dot(X.clone(), Y), (X.double() * Y.double()).sum(), 1e-5)


def test_float64_stays_float64(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(elementwise, "available", lambda device: True)
    D, W = randn(1, 3, 4).double(), torch.zeros(3, 4).double()
    elementwise.finish_([W], None, D, lr=1.0)
    assert torch.equal(W, -D[0])


def test_what_fused_passes_do_not_take():
    W, out = torch.ones(3, 4), torch.zeros(1, 3, 4)
    with pytest.raises(InputError, match="last two axes are contiguous"):
        elementwise.gather_(torch.zeros(1, 4, 3).mT, [W])
    with pytest.raises(InputError, match="D of shape"):
        elementwise.finish_([W], None, torch.zeros(1, 3, 8)[..., ::2], lr=1.0)
    with pytest.raises(InputError, match="room"):
        elementwise.gather_(out, [W], [torch.ones(3)])
    with pytest.raises(InputError, match="one shape"):
        elementwise.finish_([W, W[:2]], None, torch.zeros(2, 3, 4), lr=1.0)
    with pytest.raises(InputError, match="momentum"):
        elementwise.finish_([W], None, out, torch.zeros(1, 4, 3).mT, lr=1.0)
    with pytest.raises(InputError, match="no larger"):
        elementwise.ema_(out, torch.zeros(1, 4, 4), torch.ones(1))
    with pytest.raises(InputError, match="last stride"):
        elementwise.ema_(torch.zeros(1, 4, 4), torch.zeros(1, 3, 4).mT, torch.ones(1))
