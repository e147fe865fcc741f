"""Passes by tables on a GPU: Triton's kernels agree with torch's calls, at the sizes of a model and at odd ones."""

import copy

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import pieces
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.pieces import StackPieces
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.triton import piece_kernels
from layerwise.optim.cuda.triton.products import available
from layerwise.optim.kronecker import KroneckerRoots
from layerwise.optim.step.update import weight_norms
from random_tensors import cuda_randn as randn
from stacked_layers import Passes, stack_of
from waiting import nothing_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and available(torch.device("cuda"))),
        reason="needs triton and a GPU of capability 8.0; run `make test-gpu` on one",
    ),
]
SHAPES = [(12, 768, 768, (0, 15)), (3, 770, 131, (14, 12)), (40, 33, 18, (0, 0)), (1, 1, 1, (0, 0))]
"""K, o, i, and zeros below and beside a matrix with its bias."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS: dict[str, dict[str, float | bool]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
}


def mask_of(taken: bool) -> Tensor:
    return torch.full((), taken, device="cuda")


def layers(K: int, o: int, i: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    return [randn(o, i, seed=k).to(dtype) for k in range(K)], [randn(o, seed=99 + k).to(dtype) for k in range(K)]


def close(found: Tensor, expected: Tensor) -> None:
    bound = 1e-6 if found.dtype == torch.float32 else 8e-3  # a last digit: torch does not contract products and sums
    torch.testing.assert_close(found.double(), expected.double(), rtol=bound, atol=bound)


def ways(monkeypatch: pytest.MonkeyPatch):
    """By the kernels, then by torch."""
    yield True
    monkeypatch.setattr(pieces, "available", lambda device: False)
    yield False


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gather(shape: tuple[int, int, int, tuple[int, int]], dtype: torch.dtype, taken: bool):
    K, o, i, padding = shape
    for biased in (True, False):
        (weights, biases), (dW, db) = layers(K, o, i, dtype), layers(K, o, i, dtype)
        if not taken:
            dW[0][0, 0] = torch.nan
        grads = [*dW, *(db if biased else ())]
        passes = Passes(stack_of(weights, biases if biased else None, padding=padding, grads=grads))
        assert passes.by_kernels
        expected = torch.zeros(K, o + padding[0], i + biased + padding[1], device="cuda")
        if taken:
            expected[:, :o, :i] = 0.5 * torch.stack(dW).float()
            if biased:
                expected[:, :o, i] = 0.5 * torch.stack(db).float()
        assert torch.equal(passes.gather(0.5, mask_of(taken)), expected)


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_gather_in_half_precision(shape: tuple[int, int, int, tuple[int, int]], taken: bool):
    K, o, i, padding = shape
    weights, grads = layers(K, o, i, torch.float32)[0], layers(K, o, i, torch.float32)[0]
    passes = Passes(stack_of(weights, padding=padding, grads=grads))
    own, expected = passes.tables.reads(passes.stack), torch.zeros(K, o + padding[0], i + padding[1], device="cuda")
    assert own is not None
    expected[:, :o, :i] = 0.5 * torch.stack(grads)
    largest = expected.abs().amax((1, 2)) * taken
    found = passes.tables.gather(own, 0.5, mask_of(taken), largest)
    assert isinstance(found, Half)
    value = found.hi.float() / found.scale.view(-1, 1, 1)
    least = 2.0**-31 * float(largest.max())  # what numbers that are too small for a full mantissa are rounded by
    torch.testing.assert_close(value, expected if taken else 0 * expected, rtol=2.0**-11, atol=least)
    assert not taken or bool((found.hi.abs().amax((1, 2)).float() <= 2.0**7).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_of_weights(shape: tuple[int, int, int, tuple[int, int]], dtype: torch.dtype):
    """As the last step left them, and measured anew where somebody has written."""
    K, o, i, padding = shape
    passes = Passes(stack_of(layers(K, o, i, dtype)[0], padding=padding, rule=KroneckerRoots(), weight_decay=0.3))
    D = randn(K, o + padding[0], i + padding[1], seed=5)
    for taken in (True, True, False):
        passes.tables.send()
        passes.finish_(D, mask_of(taken))
        found = passes.tables.weight_norms(passes.stack)
        assert found is not None
        torch.testing.assert_close(found, weight_norms(passes.stack), rtol=1e-5, atol=0)
    with torch.no_grad():
        passes.stack.params["0.weight"].mul_(3)
    passes.tables.send()
    torch.testing.assert_close(passes.tables.weight_norms(passes.stack), weight_norms(passes.stack), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_magnitudes(dtype: torch.dtype):
    (weights, biases), (dW, db) = layers(12, 770, 131, dtype), layers(12, 770, 131, dtype)
    dW[3][769, 130], dW[5][400, 0], db[7][-1] = -99.0, torch.nan, -torch.inf
    passes = Passes(stack_of(weights, biases, grads=[*dW, *db]))
    own = passes.tables.reads(passes.stack)
    assert own is not None
    expected = torch.stack([p.grad.float().abs().max() for p in passes.tables.params if p.grad is not None])
    torch.testing.assert_close(passes.tables.magnitudes([own]), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_finish(
    shape: tuple[int, int, int, tuple[int, int]],
    kind: str,
    dtype: torch.dtype,
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    """With biases and a factor on the device, then without; directions of both types, and transposed."""
    K, o, i, padding = shape
    ends = []
    for by_kernels in ways(monkeypatch):
        changed = []
        for biased, factor in ((True, torch.tensor(0.5, device="cuda")), (False, 1.0)):
            weights, biases = layers(K, o, i, dtype)
            D = randn(K, o + padding[0], i + biased + padding[1], seed=5)
            D = D if biased else D.mT.contiguous().mT.bfloat16()
            D = D if taken else D * torch.nan
            group = {"lr": 0.1, "weight_decay": 0.3, **KINDS[kind]}
            passes = Passes(stack_of(weights, biases if biased else None, padding=padding, **group))
            assert bool(passes.tables.pieces) == by_kernels
            for _ in range(2):  # the second with a momentum
                passes.finish_(D, mask_of(taken), factor)
            changed += [*weights, *biases]
            if "momentum" in passes.stack.state:
                changed.append(passes.stack.state["momentum"][:, :o, : i + biased])
        ends.append(changed)
    for x, y in zip(*ends, strict=True):
        assert bool(x.isfinite().all())
        close(x, y)


@pytest.mark.parametrize("biased", [False, True])
def test_parameters_stored_transposed(biased: bool, monkeypatch: pytest.MonkeyPatch):
    ends = []
    for by_kernels in ways(monkeypatch):
        weights, biases = layers(3, 1000, 96, torch.float32)
        biases = [b[:96].clone() for b in biases] if biased else None
        grads = [randn(1000, 96, seed=20 + k) for k in range(3)] + [randn(96, seed=30 + k) for k in range(3)]
        given = {"transposed": True, "grads": grads[: 6 if biased else 3], "momentum": 0.9, "weight_decay": 0.3}
        passes = Passes(stack_of(weights, biases, **given))
        assert passes.by_kernels == by_kernels
        for _ in range(2):
            passes.finish_(passes.gather(0.5, mask_of(True)), mask_of(True))
        ends.append([*weights, *(biases or ()), passes.stack.state["momentum"]])
    for x, y in zip(*ends, strict=True):
        close(x, y)


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_address(offset: int, dtype: torch.dtype):
    """Vectors are read where they can be, and nowhere else: a wrong one is an error of the device."""
    room = [torch.zeros(768 * 768 + 16, dtype=dtype, device="cuda") for _ in range(2)]
    W, grad = (X[offset : offset + 768 * 768].view(768, 768) for X in room)
    grad.copy_(randn(768, 768))
    passes = Passes(stack_of([W], lr=1.0, grads=[grad]))
    assert passes.tables.aligned == (offset * W.itemsize % 16 == 0)
    D = passes.gather(1.0, mask_of(True))
    assert torch.equal(D[0], grad.float())
    passes.finish_(D, mask_of(True))
    assert torch.equal(W, -grad)
    assert not torch.cat([room[0][:offset], room[0][offset + 768 * 768 :]]).any()


def test_a_scaled_half(monkeypatch: pytest.MonkeyPatch):
    scales = (torch.tensor([2.0**e for e in (3, -5, 12)], device="cuda"), torch.tensor([3.0, 0.7, 1.0], device="cuda"))
    C, ends = (100 * randn(3, 90, 257)).half(), []
    for by_kernels in ways(monkeypatch):
        weights, biases = layers(3, 90, 256, torch.float32)
        passes = Passes(stack_of(weights, biases))
        assert bool(passes.tables.pieces) == by_kernels
        passes.finish_(Scaled(C.clone(), scales), mask_of(True))
        ends.append([*weights, *biases])
    for x, y in zip(*ends, strict=True):
        close(x, y)


def test_a_graph_reads_what_was_sent_after_it_was_captured():
    """Gradients elsewhere and another rate, without capturing again."""
    W, b = torch.zeros(64, 32, device="cuda"), torch.zeros(64, device="cuda")
    passes = Passes(stack_of([W], [b], lr=1.0, grads=[randn(64, 32), randn(64, seed=1)]))
    taken = mask_of(True)

    def step() -> None:
        passes.finish_(passes.gather(1.0, taken), taken)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    W.zero_()
    b.zero_()
    params, kept = passes.stack.params, list[Tensor]()
    for seed, lr in ((5, 0.5), (7, 0.25)):
        kept += [randn(64, 32, seed=seed), randn(64, seed=seed + 1)]
        params["0.weight"].grad, params["0.bias"].grad = kept[-2:]
        passes.stack.group["lr"] = lr
        passes.tables.send()
        graph.replay()
    close(W, -0.5 * kept[0] - 0.25 * kept[2])
    close(b, -0.5 * kept[1] - 0.25 * kept[3])


def compiled() -> int:
    """How many variants of the kernels exist."""
    jitted = [getattr(piece_kernels, f"{name}_kernel") for name in ("gather", "finish", "magnitude")]
    return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in jitted)


def test_numbers_do_not_compile_again_and_nothing_waits():
    weights, biases = layers(2, 32, 32, torch.float32)
    passes = Passes(
        stack_of(weights, biases, grads=[*layers(2, 32, 32, torch.float32)[0], *map(torch.ones_like, biases)])
    )
    own, taken = passes.tables.reads(passes.stack), mask_of(True)
    assert own is not None

    def all_of(lr: float) -> None:
        group = passes.stack.group
        group["lr"], group["weight_decay"], group["momentum"] = lr, lr, 0.5 * (1 + lr)
        passes.tables.send()
        passes.tables.magnitudes([own])
        passes.finish_(passes.gather(lr, taken), taken)

    all_of(0.5)
    before = compiled()
    torch.cuda.synchronize()
    with nothing_waits():
        for lr in (1.0, 0.0, 16.0, 1e-3):
            all_of(lr)
    assert compiled() == before


def test_channels_last(monkeypatch: pytest.MonkeyPatch):
    """Convolutions, one with several matrices, by tables and without."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=2), nn.Flatten(), nn.Linear(256, 5)
    )
    model = model.cuda().to(memory_format=torch.channels_last)
    other, start = copy.deepcopy(model), copy.deepcopy(model)
    x = randn(6, 8, 8, 8).to(memory_format=torch.channels_last)
    for by_tables, net in ((True, model), (False, other)):
        if not by_tables:
            monkeypatch.setattr(StackPieces, "of", lambda *given: None)
        opt = lw.optim.SGD(net, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
        for _ in range(3):
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
        (tables,) = opt._executor.tables.values()
        assert bool(tables.pieces) == by_tables
    found, expected, first = (
        torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (model, other, start)
    )
    assert float((found - expected).norm()) < 1e-3 * float((expected - first).norm())
