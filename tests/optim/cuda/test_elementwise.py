"""Fused passes against their formulas in float64: by torch, and by Triton's interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

from interpreter import INTERPRETED
from layerwise.foundations.errors import InputError
from layerwise.optim.cuda import elementwise
from layerwise.optim.cuda.gradient_sizes import largest_of_each
from layerwise.optim.cuda.triton import elementwise as triton_elementwise
from layerwise.optim.step.seen_rows import USUAL_UPDATE
from random_tensors import randn

pytestmark = pytest.mark.interpreted

OPEN, SHUT = torch.tensor(True), torch.tensor(False)
STEPS = [None, OPEN, SHUT]
HALF = 8e-3 if INTERPRETED else 4e-3  # the interpreter cuts bfloat16 off, where a GPU rounds


@pytest.fixture(params=["triton" if INTERPRETED else "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way the functions go; the interpreter runs small tiles, and must not be left for torch."""
    if request.param == "triton":
        monkeypatch.setattr(elementwise, "available", lambda device: True)
        monkeypatch.setattr(elementwise, "elementwise_torch", None)
        monkeypatch.setattr(triton_elementwise, "TILE", {"ROWS": 8, "COLUMNS": 32, "num_warps": 1})
        monkeypatch.setattr(triton_elementwise, "BLOCK", {"BLOCK": 256, "num_warps": 1})
        monkeypatch.setattr(triton_elementwise, "OF_GROUP", {"TILES": 4, "ACROSS": 2, "ROWS": 8, "num_warps": 1})
    return request.param


def strided(*shape: int, seed: int = 0) -> Tensor:
    """A stack whose matrices do not follow one another in memory."""
    return randn(2 * shape[0], *shape[1:], seed=seed)[::2]


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def is_shut(all_finite: Tensor | None) -> bool:
    return all_finite is SHUT


def test_finiteness_of_all():
    huge = torch.full((5, 3), 3e38)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            X = torch.ones(7, 9, dtype=dtype)
            fine = [huge, -huge, huge.double() * 1e100, X, torch.ones(()), torch.ones(4).bfloat16()]
            assert bool(largest_of_each(fine).isfinite().all())
            X[3, 2] = bad
            assert largest_of_each(fine).isfinite().tolist() == [True, True, True, False, True, True]


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


def adam_norms(shape: tuple[int, int, int], all_finite: Tensor | None, dtype: torch.dtype = torch.float32) -> None:
    """Moments, norms and the largest of m against the formula in float64."""
    K, b1, b2, eps = shape[0], 0.9, 0.99, 1e-3
    m, v, g = strided(*shape), strided(*shape, seed=1).square_(), strided(*shape, seed=2).to(dtype)
    t = torch.arange(1.0, K + 1).double().view(-1, 1, 1)
    c1, c2 = 1 - b1**t, 1 - b2**t
    M, V = m.double().lerp(g.double(), 1 - b1), v.double().lerp(g.double().square(), 1 - b2)
    expected = ((M / c1) / ((V / c2).sqrt() + eps)).flatten(1).norm(dim=1)
    before = m.clone(), v.clone()
    if is_shut(all_finite):
        g[:] = torch.nan
    corrections = {"correction1": c1.flatten().float(), "correction2": c2.flatten().float()}
    found, largest = elementwise.adam_norms_(m, v, g, beta1=b1, beta2=b2, eps=eps, **corrections, all_finite=all_finite)
    assert found.shape == largest.shape == (K,)
    if is_shut(all_finite):
        assert found.tolist() == [0.0] * K
        assert torch.equal(m, before[0])
        assert torch.equal(v, before[1])
        return
    close(m, M)
    close(v, V)
    close(found, expected, 1e-5)
    assert torch.equal(largest, m.abs().amax((1, 2)))


@pytest.mark.parametrize("all_finite", STEPS)
@pytest.mark.parametrize("shape", [(1, 3, 5), (3, 17, 31), (40, 2, 1)])
def test_norms_of_adam(way: str, shape: tuple[int, int, int], all_finite: Tensor | None):
    adam_norms(shape, all_finite)


def test_norms_of_adam_by_a_gradient_in_half_precision(way: str):
    adam_norms((2, 17, 31), OPEN, torch.bfloat16)


@pytest.mark.parametrize("all_finite", STEPS)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("rows", "own", "apart"), [(17, 17, 3), (20, 18, 5), (16, 16, 1)])
def test_norms_of_some_rows(way: str, rows: int, own: int, apart: int, whole: bool, all_finite: Tensor | None):
    """v is of these rows alone, of padding none; m of all, or of the same. Beside them nothing is written."""
    seen = range(0, own, apart)
    g, ones = strided(3, rows, 37, seed=2), torch.ones(3)
    numbers = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "correction1": ones, "correction2": 0.5 * ones}
    m, v = strided(3, rows if whole else len(seen), 37), strided(3, len(seen), 37, seed=1).square_()
    parts = [m[:, seen].clone() if whole else m.clone(), v.clone(), g[:, seen].clone()]
    moved = m.clone() if is_shut(all_finite) else m.lerp(g if whole else parts[2], 0.1)
    expected, _ = elementwise.adam_norms_(*parts, **numbers, all_finite=all_finite)
    found, largest = elementwise.adam_norms_(m, v, g, **numbers, all_finite=all_finite, apart=apart)
    close(found, (rows / len(seen)) ** 0.5 * expected if apart > 1 else expected, 1e-5)
    close(m, moved)
    close(v, parts[1])
    if not is_shut(all_finite):
        assert torch.equal(largest, m.abs().amax((1, 2)))


ZEROS = {  # rows of 20 without a gradient, of which 0, 5, 10 are seen, and how many count, and of those seen
    "none": ([], 20, 3),
    "some": ([1, 2, 7, 19], 16, 3),
    "some that are seen": ([0, 4, 10, 15], 16, 1),
    "all that are seen": ([0, 5, 10], 17, 0),
    "all but one": ([*range(13), *range(14, 20)], 1, 0),
    "all": (range(20), 0, 0),
}


@pytest.mark.parametrize("all_finite", STEPS)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("rows", ZEROS)
def test_rows_without_a_gradient_do_not_count(way: str, rows: str, whole: bool, all_finite: Tensor | None):
    """Each with one entry that is not zero in another tile; in the other groups all rows count, or none. Row 15 would
    be seen, and has no v."""
    zeros, count, seen = ZEROS[rows]
    O, I, apart, of_v = 20, 100, 5, 3
    g, ones = torch.zeros(3, O, I), torch.ones(3)
    g[0, range(O), [(7 * row) % I for row in range(O)]] = 1e-30 * torch.arange(-9.5, 10).sign()
    g[0, zeros] = 0.0
    g[1] = randn(O, I, seed=2)
    g[1, 1] *= 1e3  # of an m that may not be there: not the largest then
    if is_shut(all_finite):
        g[2] = torch.nan
    numbers = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "correction1": ones, "correction2": 0.5 * ones}
    m, v = strided(3, O if whole else of_v, I), strided(3, of_v, I, seed=1).square_()
    part, of_part = m[:, ::apart][:, :of_v].clone() if whole else m.clone(), v.clone()
    measured, _ = elementwise.adam_norms_(
        part, of_part, g[:, ::apart][:, :of_v].contiguous(), **numbers, all_finite=all_finite
    )
    found, largest = elementwise.adam_norms_(m, v, g, **numbers, all_finite=all_finite, apart=apart)
    if is_shut(all_finite):
        assert found.tolist() == [0.0] * 3
        return
    whole_stack = (O / of_v) ** 0.5 * measured
    expected = (count / seen) ** 0.5 * measured[0] if seen else USUAL_UPDATE * torch.tensor(count * I).sqrt()
    close(found, torch.stack([expected if count else whole_stack[0], whole_stack[1], whole_stack[2]]), 1e-5)
    assert torch.equal(largest, m.abs().amax((1, 2)))
    close(v, of_part)


@pytest.mark.parametrize("whole", [True, False])
def test_a_step_left_out_has_the_norm_zero_whatever_the_gradient(way: str, whole: bool):
    """Also where no row that is seen has one, and the norm would be the usual one."""
    g, ones = torch.ones(1, 9, 4), torch.ones(1)
    g[:, ::3] = 0.0
    numbers = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "correction1": ones, "correction2": ones}
    for gate, expected in ((OPEN, 0.2 * 24**0.5), (SHUT, 0.0)):
        moments = torch.ones(1, 9 if whole else 3, 4), torch.ones(1, 3, 4)
        norms, _ = elementwise.adam_norms_(*moments, g, **numbers, all_finite=gate, apart=3)
        assert float(norms) == pytest.approx(expected)


def test_rows_that_do_not_belong_together_are_refused():
    one, stack = torch.ones(1), torch.zeros(1, 9, 4)
    numbers = {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "correction1": one, "correction2": one}
    for m, v in ((torch.zeros(1, 4, 4), torch.zeros(1, 3, 4)), (stack, torch.zeros(1, 4, 4))):
        with pytest.raises(InputError, match="v of those rows"):
            elementwise.adam_norms_(m, v, stack, **numbers, apart=3)


@pytest.mark.parametrize("all_finite", STEPS)
def test_norms_are_those_of_the_step_itself(way: str, all_finite: Tensor | None):
    """The same moments to the bit; a group of zeros has the norm zero, an empty stack none."""
    g, ones = strided(3, 17, 31, seed=2), torch.ones(3)
    g[1] = 0.0
    numbers = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "correction1": ones, "correction2": 0.5 * ones}
    moments = [(torch.zeros(3, 17, 31), torch.zeros(3, 17, 31)) for _ in range(2)]
    step = elementwise.adam_(*moments[0], g, **numbers, all_finite=all_finite)
    found, largest = elementwise.adam_norms_(*moments[1], g, **numbers, all_finite=all_finite)
    close(found, step.flatten(1).norm(dim=1), 1e-5)
    assert found[1] == largest[1] == 0
    assert all(torch.equal(x, y) for x, y in zip(*moments, strict=True))
    none = torch.zeros(3, 0, 4)
    assert [x.tolist() for x in elementwise.adam_norms_(none, none, none, **numbers)] == [[0.0] * 3] * 2


def test_a_norm_that_is_not_finite_stays_visible(way: str):
    g, ones = torch.ones(2, 20, 30), torch.ones(2)
    g[1, 19, 29] = torch.nan
    numbers = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "correction1": ones, "correction2": ones}
    found, largest = elementwise.adam_norms_(torch.zeros(2, 20, 30), torch.zeros(2, 20, 30), g, **numbers)
    assert found.isfinite().tolist() == [True, False]
    assert largest[0] == torch.tensor(0.0).lerp(torch.tensor(1.0), 1 - 0.9)


def test_float64_stays_float64(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(elementwise, "available", lambda device: True)
    m, v, g, one = torch.zeros(1, 3, 4).double(), torch.zeros(1, 3, 4).double(), randn(1, 3, 4).double(), torch.ones(1)
    numbers = {"beta1": 0.0, "beta2": 0.0, "eps": 1e-12, "correction1": one.double(), "correction2": one.double()}
    step = elementwise.adam_(m, v, g + 1e-12, **numbers)
    assert step.dtype == torch.float64
    assert torch.equal(m, g + 1e-12)
    norms, largest = elementwise.adam_norms_(m, v, g + 1e-12, **numbers)
    torch.testing.assert_close(norms, step.flatten(1).norm(dim=1), rtol=1e-14, atol=0)
    assert torch.equal(largest, m.abs().amax((1, 2)))


def test_what_fused_passes_do_not_take():
    """Stacks whose matrices do not each lie in one piece."""
    whole, apart, out = torch.zeros(1, 3, 4), torch.zeros(1, 3, 8)[..., ::2], torch.zeros(1, 3, 4)
    one = torch.ones(1)
    numbers = {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "correction1": one, "correction2": one}
    for stacks in ((apart, whole, whole), (whole, apart, whole), (whole, whole, torch.zeros(1, 4, 3).mT)):
        with pytest.raises(InputError, match="last two axes are contiguous"):
            elementwise.adam_(*stacks, **numbers)
        with pytest.raises(InputError, match="last two axes are contiguous"):
            elementwise.adam_norms_(*stacks, **numbers)
    with pytest.raises(InputError, match="out of shape"):
        elementwise.adam_(whole, whole, whole, **numbers, out=torch.zeros(1, 4, 3).mT)
    with pytest.raises(InputError, match="M of shape"):
        elementwise.momentum_update_(torch.zeros(1, 4, 3).mT, whole, 0.9)
    with pytest.raises(InputError, match="X of shape"):
        elementwise.dot(apart, whole)
    with pytest.raises(InputError, match="no larger"):
        elementwise.ema_(out, torch.zeros(1, 4, 4), torch.ones(1))
    with pytest.raises(InputError, match="last stride"):
        elementwise.ema_(torch.zeros(1, 4, 4), torch.zeros(1, 3, 4).mT, torch.ones(1))
