"""The two ends of a step, gradients gathered and updates subtracted, against their formulas: by torch, and in Triton's
interpreter by the kernels, which find parameters and gradients by tables."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from interpreter import INTERPRETED, only_interpreted
from layerwise.foundations.errors import InputError
from layerwise.optim.cuda import pieces
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.triton.pieces import COLUMNS, ROWS
from layerwise.optim.engine import Layerwise
from layerwise.optim.kronecker import KroneckerRoots
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update import weight_norms
from random_tensors import randn
from stacked_layers import Passes, options, stack_of

pytestmark = pytest.mark.interpreted

OPEN, SHUT = torch.tensor(True), torch.tensor(False)
STEPS = [OPEN, SHUT]
HALF = 8e-3 if INTERPRETED else 4e-3  # the interpreter cuts bfloat16 off, where a GPU rounds
LAYERS = [(1, 5, 7), (3, 16, COLUMNS), (2, ROWS + 8, COLUMNS + 2), (40, 3, 2), (2, 4, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(pieces, "available", lambda device: True)


def passes_of(*given: Any, **options_: Any) -> Passes:
    """Of a stack that the kernels must not leave for torch."""
    passes = Passes(stack_of(*given, **options_))
    assert (id(passes.stack) in passes.tables.pieces) == INTERPRETED
    return passes


def layers(K: int, o: int, i: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    return [randn(o, i, seed=k).to(dtype) for k in range(K)], [randn(o, seed=99 + k).to(dtype) for k in range(K)]


def strided(*shape: int, seed: int = 0) -> Tensor:
    """A stack whose matrices do not follow one another in memory."""
    return randn(2 * shape[0], *shape[1:], seed=seed)[::2]


def powers(*exponents: int) -> Tensor:
    return torch.tensor([2.0**e for e in exponents])


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


# --- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("all_finite", STEPS, ids=["open", "shut"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LAYERS)
def test_gather(shape: tuple[int, int, int], dtype: torch.dtype, all_finite: Tensor):
    K, o, i = shape
    for biased, padding in ((True, (0, 0)), (True, (3, 5)), (False, (0, 0)), (False, (2, 0))):
        (weights, biases), (dW, db) = layers(K, o, i, dtype), layers(K, o, i, dtype)
        if all_finite is SHUT:
            dW[0][0, 0] = torch.nan
        grads = [*dW, *(db if biased else ())]
        passes = passes_of(weights, biases if biased else None, padding=padding, grads=grads)
        assert passes.by_kernels == INTERPRETED
        found = passes.gather(-0.5, all_finite)
        expected = torch.zeros(K, o + padding[0], i + biased + padding[1])
        if all_finite is OPEN:
            expected[:, :o, :i] = -0.5 * torch.stack(dW).float()
            if biased:
                expected[:, :o, i] = -0.5 * torch.stack(db).float()
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)


@pytest.mark.parametrize("biased", [False, True])
def test_gather_of_parameters_stored_transposed(biased: bool):
    """Without biases the stack has their order in memory: nothing is transposed on the way."""
    dW, db = [randn(40, 7, seed=k) for k in range(3)], [randn(7, seed=9 + k) for k in range(3)]
    given = [randn(40, 7) for _ in dW], [randn(7) for _ in db] if biased else None
    passes = passes_of(*given, transposed=True, grads=[*dW, *(db if biased else ())])
    found, expected = passes.gather(2.0, OPEN), 2 * torch.stack(dW).mT
    assert torch.equal(found, torch.cat([expected, 2 * torch.stack(db).unsqueeze(-1)], 2) if biased else expected)
    if INTERPRETED:
        assert (found if biased else found.mT).is_contiguous()


def test_gradients_are_read_where_they_lie_at_each_step():
    """Exchanged, of another order in memory, of other values in the same place, missing: none is remembered."""
    weights, first = [torch.zeros(5, 7) for _ in range(2)], [randn(5, 7, seed=k) for k in range(2)]
    passes = passes_of(weights, grads=first)
    p = passes.stack.params["1.weight"]
    for grad, by_kernels in ((randn(5, 7, seed=3), True), (randn(7, 5, seed=4).mT, False), (randn(5, 7), True)):
        p.grad = grad
        passes.tables.send()
        assert passes.by_kernels == (by_kernels and INTERPRETED)
        assert torch.equal(passes.gather(1.0, OPEN), torch.stack([first[0], grad]))
    grad.neg_()
    assert torch.equal(passes.gather(1.0, OPEN)[1], grad)
    p.grad = None
    passes.tables.send()
    assert not passes.by_kernels
    assert not passes.gather(1.0, OPEN)[1].any()


@only_interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_magnitudes(dtype: torch.dtype):
    """Of each parameter's gradient; NaN and infinity stay visible."""
    (weights, biases), (dW, db) = layers(3, 5, 7, dtype), layers(3, 5, 7, dtype)
    dW[1][4, 6], db[2][0] = -9.0, -torch.inf
    dW[2][3, 3] = torch.nan
    passes = passes_of(weights, biases, grads=[*dW, *db])
    own = passes.tables.reads(passes.stack)
    assert own is not None
    found = passes.tables.magnitudes([own])
    for p, size in zip(passes.tables.params, found, strict=True):
        grad = p.grad
        assert grad is not None
        torch.testing.assert_close(size, grad.float().abs().max(), rtol=0, atol=0, equal_nan=True)


@only_interpreted
@pytest.mark.parametrize("all_finite", STEPS, ids=["open", "shut"])
@pytest.mark.parametrize("shape", LAYERS)
def test_gather_in_half_precision(shape: tuple[int, int, int], all_finite: Tensor):
    """In 11 bits, with room for products with orthogonal matrices, each group with a power of two of its own."""
    K, o, i = shape
    sizes = powers(*(7 * k % 40 - 20 for k in range(K))).view(-1, 1, 1)
    for padding in ((0, 0), (3, 5)):
        weights, _ = layers(K, o, i)
        dW = sizes * torch.stack(layers(K, o, i)[0])
        passes = passes_of(weights, padding=padding, grads=[*dW])
        own, expected = passes.tables.reads(passes.stack), torch.zeros(K, o + padding[0], i + padding[1])
        assert own is not None
        expected[:, :o, :i] = -0.5 * dW
        largest = expected.abs().amax((1, 2))
        found = passes.tables.gather(own, -0.5, all_finite, largest if all_finite is OPEN else 0 * largest)
        assert isinstance(found, Half)
        assert found.hi.dtype == torch.float16
        value = found.hi.float() / found.scale.view(-1, 1, 1)
        if all_finite is SHUT:
            assert not found.hi.any()
            assert found.scale.isfinite().all()
            continue
        torch.testing.assert_close(value, expected, rtol=2.0**-11, atol=0.0)
        top = found.hi.abs().amax((1, 2)).float()
        assert bool(((top >= 2.0**6) & (top <= 2.0**7)).all())


# --- the end of a step ------------------------------------------------------------------------------------------


def expected_finish(
    W: list[Tensor], b: list[Tensor] | None, D: Tensor, M: Tensor | None, group: dict[str, Any], f: float
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    lr, decay, mu = (group[name] for name in ("lr", "weight_decay", "momentum"))
    u = f * D.double()
    if M is not None:
        M = buffer = mu * M.double() + u
        u = u + mu * buffer if group["nesterov"] else buffer
    o, i = W[0].shape
    new = [(1 - lr * decay) * w.double() - lr * u[k, :o, :i] for k, w in enumerate(W)]
    return new, [(1 - lr * decay) * x.double() - lr * u[k, :o, i] for k, x in enumerate(b or [])], M


@pytest.mark.parametrize("all_finite", STEPS, ids=["open", "shut"])
@pytest.mark.parametrize("nesterov", [None, False, True])
@pytest.mark.parametrize(
    ("weight_dtype", "D_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
)
@pytest.mark.parametrize("shape", LAYERS)
def test_finish(
    shape: tuple[int, int, int],
    weight_dtype: torch.dtype,
    D_dtype: torch.dtype,
    nesterov: bool | None,
    all_finite: Tensor,
):
    K, o, i = shape
    group = options(weight_decay=0.3, momentum=0.0 if nesterov is None else 0.9, nesterov=bool(nesterov))
    for biased, factor in ((True, 1.0), (False, torch.tensor(0.5)), (True, torch.tensor(0.25))):
        weights, biases = layers(K, o, i, weight_dtype)
        size = (K, o + 2, i + biased + 3)
        D, M = strided(*size, seed=5).to(D_dtype), None if nesterov is None else strided(*size)
        if all_finite is SHUT:
            D[:] = torch.nan
        before = [x.clone() for x in (*weights, *(biases if biased else ()), *([] if M is None else [M]))]
        W, b, new = expected_finish(weights, biases if biased else None, D, M, group, float(factor))
        passes = passes_of(weights, biases if biased else None, padding=(2, 3), **group)
        if M is not None:
            passes.stack.state["momentum"] = M
        passes.finish_(D, all_finite, factor)
        kept = [] if M is None else [passes.stack.state["momentum"]]
        after = [*weights, *(biases if biased else ()), *kept]
        if all_finite is SHUT:
            assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))
            continue
        rounding = 2e-6 if weight_dtype == torch.float32 else HALF
        for x, y in zip(after, [*W, *b], strict=False):
            close(x, y, rounding)
        if new is not None:  # beyond the layers' own entries nothing is read again
            close(kept[0][:, :o, : i + biased], new[:, :o, : i + biased])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("factor", [1.0, torch.tensor(0.5)], ids=["host", "device"])
def test_finish_of_parameters_stored_transposed(nesterov: bool, factor: float | Tensor):
    weights, D, M = [randn(40, 7, seed=k) for k in range(3)], randn(3, 7, 40, seed=5), randn(3, 7, 40, seed=6)
    group = options(weight_decay=0.3, momentum=0.9, nesterov=nesterov)
    W, _, new = expected_finish([w.mT for w in weights], None, D, M, group, float(factor))
    passes = passes_of(weights, transposed=True, **group)
    passes.stack.state["momentum"] = M.clone()
    passes.finish_(D, OPEN, factor)
    assert new is not None
    for x, y in zip([*weights, passes.stack.state["momentum"]], [*(w.mT for w in W), new], strict=True):
        close(x, y)


@pytest.mark.parametrize("layout", ["transposed", "rows apart", "matrices apart"])
def test_directions_in_any_order_of_memory(layout: str):
    D = {
        "transposed": randn(3, 39, 17).mT,
        "rows apart": randn(3, 17, 60)[..., :39],
        "matrices apart": strided(3, 17, 39),
    }[layout].bfloat16()
    weights, biases = layers(3, 17, 38)
    group = options(weight_decay=0.3, momentum=0.9, nesterov=True)
    M = randn(3, 17, 39, seed=1)
    W, b, new = expected_finish(weights, biases, D, M, group, 2.0)
    passes = passes_of(weights, biases, **group)
    passes.stack.state["momentum"] = M.mT.contiguous().mT
    passes.finish_(D, OPEN, torch.tensor(2.0))
    assert new is not None
    for x, y in zip([*weights, *biases, passes.stack.state["momentum"]], [*W, *b, new], strict=True):
        close(x, y)


def test_a_first_momentum_is_the_update():
    weights, biases = layers(2, 3, 4)
    D, group = randn(2, 3, 5, seed=8), options(momentum=0.9)
    W, b, _ = expected_finish(weights, biases, D, torch.zeros_like(D), group, 1.0)
    passes = passes_of(weights, biases, **group)
    passes.finish_(D, OPEN)
    close(passes.stack.state["momentum"], D)
    for x, y in zip([*weights, *biases], [*W, *b], strict=True):
        close(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("all_finite", STEPS, ids=["open", "shut"])
def test_a_scaled_direction_is_divided_on_the_way(all_finite: Tensor, count: int, momentum: float, dtype: torch.dtype):
    """Of single precision, or a half that alone would overflow or vanish; each group by its own scales."""
    K, o, i = 3, 9, 40
    scales = tuple(powers(3, -5, 40)[[q % 3, (q + 1) % 3, (q + 2) % 3]] for q in range(count))
    by = torch.stack(scales).double().prod(0).view(-1, 1, 1)
    D = randn(K, o, i + 1, seed=5).double()
    C = (D * by).float() if dtype == torch.float32 else (100 * D).half()
    D = C.double() / by
    (weights, biases), group = layers(K, o, i), options(weight_decay=0.2, momentum=momentum, nesterov=True)
    before, M = [x.clone() for x in (*weights, *biases)], torch.ones(K, o, i + 1)
    W, b, new = expected_finish(weights, biases, D, M if momentum else None, group, 0.5)
    passes = passes_of(weights, biases, **group)
    if momentum:
        passes.stack.state["momentum"] = M.clone()
    passes.finish_(Scaled(C, scales), all_finite, torch.tensor(0.5))
    taken = all_finite is OPEN
    for x, y in zip([*weights, *biases], [*W, *b] if taken else before, strict=True):
        close(x, y)
    if new is not None:
        close(passes.stack.state["momentum"], new if taken else M)


def test_scales_of_many_layers():
    K = 70
    scale = powers(*(k % 7 - 3 for k in range(K)))
    D, found = randn(K, 2, 3), [torch.zeros(2, 3) for _ in range(K)]
    passes_of(found, lr=1.0).finish_(Scaled(D * scale.view(-1, 1, 1), (scale,)), OPEN)
    torch.testing.assert_close(torch.stack(found), -D)


def test_a_scale_need_not_be_a_power_of_two():
    """That which gives an update another norm is not."""
    D, found, by = randn(2, 3, 4), [torch.zeros(3, 4) for _ in range(2)], torch.tensor([3.0, 0.7])
    passes_of(found, lr=1.0).finish_(Scaled(D.clone(), (powers(3, -2), by)), OPEN)
    close(torch.stack(found), -D / (torch.tensor([8.0, 0.25]) * by).view(-1, 1, 1))


@only_interpreted  # by torch the update is rounded to the parameter's type once more
def test_finish_rounds_weights_once():
    W, D = randn(4, 5).half(), 0.01 * randn(1, 4, 5, seed=1)
    expected = (0.5 * W.float() - 0.5 * D[0]).half()
    passes_of([W], lr=0.5, weight_decay=1.0).finish_(D, OPEN)
    assert torch.equal(W, expected)


def test_finish_tells_autograd():
    passes = passes_of([randn(4, 5)], [randn(4)])
    versions = {name: p._version for name, p in passes.stack.params.items()}
    passes.finish_(torch.ones(1, 4, 6), OPEN)
    assert all(p._version > versions[name] for name, p in passes.stack.params.items())


# --- norms of weights -------------------------------------------------------------------------------------------


@only_interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LAYERS)
def test_norms_of_weights_are_those_that_the_last_step_left(shape: tuple[int, int, int], dtype: torch.dtype):
    """Of a step that is left out those of before; and measured anew where somebody else has written."""
    (weights, biases), rule = layers(*shape, dtype), KroneckerRoots()
    for biased in (False, True):
        passes = passes_of(weights, biases if biased else None, lr=0.5, weight_decay=0.25, rule=rule)
        stack, D = passes.stack, torch.randn(shape[0], shape[1], shape[2] + biased)

        def close_to_measured(passes: Passes = passes, stack: Stack = stack) -> None:
            found = passes.tables.weight_norms(stack)
            assert found is not None
            close(found, weight_norms(stack), 1e-5)

        close_to_measured()
        passes.finish_(D, OPEN)
        close_to_measured()
        passes.tables.send()
        passes.finish_(torch.full_like(D, torch.nan), SHUT)
        close_to_measured()
        with torch.no_grad():
            stack.params["0.weight"].mul_(3.0)
        passes.tables.send()
        close_to_measured()
        for p in stack.params.values():  # which torch does not count as writing
            p.data = p.data.clone()
        passes.tables.send()
        close_to_measured()


@only_interpreted
def test_norms_of_weights_are_measured_only_where_somebody_has_written(monkeypatch: pytest.MonkeyPatch):
    passes = passes_of([randn(5, 7)], rule=KroneckerRoots())
    measured = list[int]()
    monkeypatch.setattr(pieces.StackPieces, "measure", lambda own: measured.append(len(own.tiles)))
    for _ in range(3):
        passes.finish_(torch.ones(1, 5, 7), OPEN)
        passes.tables.send()
    assert not measured
    passes.tables.forget_norms()
    passes.tables.send()
    assert len(measured) == 1
    assert passes_of([randn(5, 7)]).tables.weight_norms(passes.stack) is None  # of a rule that does not ask for them


# --- rates ------------------------------------------------------------------------------------------------------


def test_rates_are_those_that_were_sent():
    W = torch.zeros(3, 4)
    passes = passes_of([W], lr=0.5)
    group, D = passes.stack.group, torch.ones(1, 3, 4)
    group["lr"], group["weight_decay"] = 0.25, 2.0
    assert passes.tables.rate_of(passes.stack).tolist() == [1.0, 0.5]  # what a captured step would still read
    passes.finish_(D, OPEN)
    assert W.unique().tolist() == [-0.5]
    passes.tables.send()
    assert passes.tables.rate_of(passes.stack).tolist() == [0.5, 0.25]
    passes.finish_(D, OPEN)
    assert W.unique().tolist() == [-0.5 * 0.5 - 0.25]


def test_a_bias_may_have_a_group_of_its_own():
    """Rates of parameters, not of stacks; the fallback's in proportion."""
    weights, biases = [torch.ones(3, 4) for _ in range(2)], [torch.ones(3) for _ in range(2)]
    own = {"1.bias": {"lr": 0.125, "weight_decay": 4.0}}
    stack = stack_of(weights, biases, lr=0.5, weight_decay=1.0, own_groups=own, fallback_ratio=0.5)
    stack.fallback = True
    passes = Passes(stack)
    assert passes.tables.rate_of(stack).tolist() == [0.75, 0.25]
    assert passes.tables.rate_of(stack, "1.bias").tolist() == [0.5, 0.125]
    assert passes.tables.rate_of(stack, "0.bias").tolist() == [0.75, 0.25]
    passes.finish_(torch.ones(2, 3, 5), OPEN)
    assert torch.cat([*(w.flatten() for w in weights), biases[0]]).unique().tolist() == [0.5]
    assert biases[1].unique().tolist() == [0.375]


# --- who is taken --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["types", "strides", "double"])
def test_layers_that_go_by_torch(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Even where there are kernels: of unlike types, in another order than their axes, of double precision."""
    monkeypatch.setattr(pieces, "available", lambda device: True)
    weights = {
        "types": [randn(5, 4), randn(5, 4, seed=1).bfloat16()],
        "strides": [randn(5, 4), randn(4, 5, seed=1).mT],
        "double": [randn(5, 4).double() + 1e-12, randn(5, 4, seed=1).double()],
    }[kind]
    passes = Passes(stack_of(weights, lr=1.0, grads=[w.clone() for w in weights]))
    assert not passes.tables.pieces
    grad = passes.gather(1.0, OPEN)
    assert torch.equal(grad, torch.stack([w.to(grad.dtype) for w in weights]))
    assert grad.dtype == (torch.float64 if kind == "double" else torch.float32)
    passes.finish_(grad.clone(), OPEN)
    assert not any(w.any() for w in weights)


class Images(nn.Module):
    """A convolution, and matrices of other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, bias=False), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).flatten(1))


@only_interpreted
@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("change", ["channels last", "half"])
def test_parameters_may_change_their_order_and_type(change: str, monkeypatch: pytest.MonkeyPatch):
    """Between steps, by `model.to(...)`: tables of the former memory would move other entries."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    ends = []
    for kernels in (False, True):
        monkeypatch.setattr(pieces, "available", lambda device, on=kernels: on)
        torch.manual_seed(0)
        model = Images()
        opt = lw.optim.SGD(model, lr=0.1, momentum=0.9)
        for step in range(4):
            if step == 2:
                model = model.to(memory_format=torch.channels_last) if change == "channels last" else model.half()
            opt.zero_grad()
            x = randn(6, 3, 4, 4, seed=step).to(model.head.weight.dtype)
            model(x).float().square().mean().backward()
            opt.step()
        ends.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6 if change == "channels last" else 2e-3)


@only_interpreted
def test_a_momentum_in_another_order_of_memory_is_refused():
    """The kernels write where the tables say."""
    passes = passes_of([randn(3, 4) for _ in range(2)], momentum=0.9)
    own = passes.tables.pieces[id(passes.stack)]
    for M in (torch.zeros(2, 4, 3).mT, torch.zeros(4, 3, 4)[::2]):
        with pytest.raises(InputError, match="momentum"):
            passes.tables.finish_(own, torch.zeros(2, 3, 4), M, 0.9, False, None, OPEN)


# --- vectors ------------------------------------------------------------------------------------------------------


def at(offset: int, *shape: int) -> Tensor:
    """Zeros that begin so many entries after an address that is a multiple of 64."""
    room = torch.zeros(16 + offset + torch.Size(shape).numel())
    first = (-room.data_ptr() % 64) // 4 + offset
    return room[first : first + torch.Size(shape).numel()].view(shape)


@pytest.mark.parametrize(
    ("of_parameter", "of_gradient", "width", "aligned"),
    [(0, 0, 64, True), (4, 8, 64, True), (1, 0, 64, False), (0, 2, 64, False), (0, 0, 63, False)],
)
def test_vectors_are_read_where_addresses_and_sizes_allow_it(
    of_parameter: int, of_gradient: int, width: int, aligned: bool, monkeypatch: pytest.MonkeyPatch
):
    """Each pass is told so: an address or a row that is no multiple of 16 bytes would be an error on a GPU."""
    told = []
    monkeypatch.setattr(pieces, "available", lambda device: True)
    for name in ("gather_", "finish_", "magnitudes_"):
        monkeypatch.setattr(pieces.passes, name, lambda *given, name=name: told.append((name, given[-1])))
    stack = stack_of([at(of_parameter, 5, width)], grads=[at(of_gradient, 5, width)])
    passes = Passes(stack)
    own = passes.tables.reads(stack)
    assert own is not None
    passes.gather(1.0, OPEN)
    passes.finish_(torch.zeros(1, 5, width), OPEN)
    passes.tables.magnitudes([own])
    assert told == [("gather_", aligned), ("finish_", aligned), ("magnitudes_", aligned)]


def test_what_is_aligned_is_asked_anew_at_every_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pieces, "available", lambda device: True)
    passes = Passes(stack_of([at(0, 5, 64)], grads=[at(0, 5, 64)]))
    p = passes.stack.params["0.weight"]
    found = []
    for offset in (0, 3, 4):
        p.grad = at(offset, 5, 64)
        passes.tables.send()
        found.append(passes.tables.aligned)
    assert found == [True, False, True]


@only_interpreted
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("width", [64, 63])
def test_passes_at_any_address(offset: int, width: int):
    W, grad, D = at(offset, 40, width), at(offset, 40, width), randn(1, 40, width)
    grad.copy_(randn(40, width, seed=1))
    passes = passes_of([W], lr=1.0, grads=[grad])
    assert torch.equal(passes.gather(1.0, OPEN)[0], grad)
    passes.finish_(D, OPEN)
    assert torch.equal(W, -D[0])
