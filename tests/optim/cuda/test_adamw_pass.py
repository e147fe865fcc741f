"""AdamW from gradients where they lie to parameters, in one pass: against torch's in double precision, by the kernel in
Triton's interpreter; and which stacks get it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from interpreter import INTERPRETED, only_interpreted
from layerwise.optim.cuda import adamw, elementwise, pieces
from layerwise.optim.cuda.triton.pieces import COLUMNS, ROWS
from layerwise.optim.engine import Layerwise
from random_tensors import randn
from stacked_layers import Passes, stack_of

pytestmark = pytest.mark.interpreted
OPEN, SHUT = torch.tensor(True), torch.tensor(False)
BETAS, EPS, LR, DECAY = (0.9, 0.95), 1e-3, 0.03, 0.2


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        for module in (pieces, elementwise):
            monkeypatch.setattr(module, "available", lambda device: True, raising=False)


def torchs(params: list[Tensor], grads: list[list[Tensor]], scale: float) -> list[Tensor]:
    """Steps of torch's AdamW in double precision."""
    own = [nn.Parameter(p.double()) for p in params]
    opt = torch.optim.AdamW(own, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for step in grads:
        for p, g in zip(own, step, strict=True):
            p.grad = scale * g.double()
        opt.step()
    return [p.detach() for p in own]


@only_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["biases", "weights", "transposed"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, ROWS + 8, COLUMNS), (2, 70, COLUMNS + 2)])
def test_steps_are_those_of_torch(shape: tuple[int, int, int], how: str, dtype: torch.dtype):
    K, o, i = shape
    weights = [randn(o, i, seed=k).to(dtype) for k in range(K)]
    biases = [randn(o, seed=50 + k).to(dtype) for k in range(K)] if how == "biases" else None
    params = [*weights, *(biases or [])]
    grads = [[randn(*p.shape, seed=100 * t + k).to(dtype) for k, p in enumerate(params)] for t in range(1, 4)]
    expected = torchs(params, grads, 0.5)
    given = {"lr": LR, "weight_decay": DECAY, "transposed": how == "transposed"}
    passes = Passes(stack_of(weights, biases, grads=grads[0], **given))
    own = passes.tables.reads(passes.stack)
    assert own is not None
    m, v = own.room(torch.float32).zero_(), own.room(torch.float32).zero_()
    steps = torch.zeros(K)
    for t, step in enumerate(grads):
        ordered = [f"{k}.{part}" for part in ("weight", "bias") for k in range(K)]
        for name, grad in zip(ordered, step, strict=False):
            passes.stack.params[name].grad = grad
        passes.tables.send()
        before = [p.clone() for p in params]
        closed = elementwise.corrections_(steps.clone(), *BETAS, SHUT)
        passes.tables.adamw_(own, (m, v), closed, 0.5, BETAS, EPS, SHUT)  # a step that is left out changes nothing
        assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
        corrections = elementwise.corrections_(steps, *BETAS, OPEN)
        passes.tables.adamw_(own, (m, v), corrections, 0.5, BETAS, EPS, OPEN)
        assert t or m.any()
    rounding = 2e-6 if dtype == torch.float32 else 2e-2  # the interpreter cuts bfloat16 off, three times here
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=rounding, atol=rounding)


class Mixed(nn.Module):
    """A matrix with a bias, a norm layer, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.hidden = nn.Embedding(6, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(self.norm(self.tokens(x)))


def trained(make: Any, monkeypatch: pytest.MonkeyPatch, *, kernels: bool) -> tuple[list[Tensor], list[str]]:
    """Parameters after some steps, and of which layers the passes took a whole step."""
    taken = list[str]()
    monkeypatch.setattr(pieces, "available", lambda device: kernels)
    step = adamw.step_

    def seen(part: Any, tables: Any) -> None:
        taken.extend(spec.name.split(".")[0] for spec in part.stack.specs)
        step(part, tables)

    monkeypatch.setattr(adamw, "step_", seen)
    torch.manual_seed(0)
    model = Mixed()
    opt = make(model)
    for seed in range(3):
        opt.zero_grad()
        x = torch.randint(6, (5,), generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        opt.step()
    return [p.detach() for p in model.parameters()], sorted(set(taken))


@only_interpreted
@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda m: lw.optim.SOAP(m, lr=1e-2, weight_decay=0.1), ["hidden", "norm", "tokens"]),
        (lambda m: lw.optim.Adam(m, lr=1e-2, weight_decay=0.1), ["hidden", "norm", "tokens"]),
        (lambda m: lw.optim.Adam(m, lr=1e-2, clip=("norm", 1e-3)), []),
        (lambda m: lw.optim.SGD(m, lr=1e-2), []),
    ],
    ids=["beside a member", "Adam", "clipped", "not Adam"],
)
def test_who_gets_it(make: Any, expected: list[str], monkeypatch: pytest.MonkeyPatch):
    """Of SOAP's hidden layer the bias. Steps are the same without the kernels."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    without, _ = trained(make, monkeypatch, kernels=False)
    found, taken = trained(make, monkeypatch, kernels=True)
    assert taken == expected
    for p, q in zip(found, without, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("untyped")
def test_who_looks_at_all_layers_gets_all_gradients(monkeypatch: pytest.MonkeyPatch):
    """NGD's solution is of the whole network, whose gradients are gathered for it."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    monkeypatch.setattr(adamw, "takes", lambda executor, own: True)
    model = nn.Linear(4, 3)
    opt = lw.optim.NGD(model, lr=0.1)
    torch.nn.functional.cross_entropy(model(randn(8, 4)), torch.arange(8) % 3).backward()
    before = model.weight.clone()
    opt.step()
    assert not torch.equal(model.weight, before)
