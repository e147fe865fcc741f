"""Passes that save others, on a GPU: kernels against torch, and the optimizer's steps by tables and bounds."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import elementwise, elementwise_torch, executor
from layerwise.optim.cuda.elementwise import corrections_
from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.pieces import StackPieces
from layerwise.optim.cuda.scaled import Scaled, unscaled
from layerwise.optim.cuda.triton import elementwise as triton_elementwise
from layerwise.optim.cuda.triton import splits as triton_splits
from layerwise.optim.cuda.triton.products import available
from layerwise.optim.engine import Layerwise
from random_tensors import cuda_randn as randn
from stacked_layers import Passes, stack_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and available(torch.device("cuda"))),
        reason="needs triton and a GPU of capability 8.0; run `make test-gpu` on one",
    ),
]


def powers(*exponents: int) -> Tensor:
    return torch.tensor([2.0**e for e in exponents], device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12, 768, 784), (3, 3072, 784), (1, 1, 1), (2, 50257, 48), (40, 33, 19)])
def test_largest_entries(shape: tuple[int, int, int], dtype: torch.dtype):
    X = randn(*shape).to(dtype)
    for Y in (X, X[..., : max(shape[2] - 3, 1)]):
        expected = Y.float().abs().amax((1, 2))
        found, known = triton_splits.split(Y), triton_splits.split(Y, amax=expected)
        scale = split_fp16.power_of_two_scale(expected)
        assert torch.equal(found.scale, scale)
        assert torch.equal(known.scale, scale)
        assert torch.equal(found.hi, known.hi)
        assert torch.equal(found.hi, (Y.float() * scale.view(-1, 1, 1)).half())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_matrix_nan(value: float):
    X = randn(3, 300, 300)
    X[1, 299, 299] = value
    assert torch.isnan(triton_splits.split(X).scale).tolist() == [False, True, False]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_scaled_direction(momentum: float):
    K, o, i = 12, 768, 768
    scales = (powers(*range(-6, 6)), powers(*[20] * K))
    D = randn(K, o, i + 16)
    C = D * (scales[0] * scales[1]).view(-1, 1, 1)
    factor, taken = torch.tensor(0.5, device="cuda"), torch.ones((), dtype=torch.bool, device="cuda")
    ends = []
    for direction in (Scaled(C, scales), D):
        weights = [randn(o, i, seed=k) for k in range(K)]
        passes = Passes(stack_of(weights, padding=(0, 16), momentum=momentum))
        assert passes.tables.pieces
        for _ in range(2):
            passes.finish_(direction, taken, factor)
        ends.append(weights)
    assert all(torch.equal(x, y) for x, y in zip(*ends, strict=True))
    Y = randn(K, o, i + 16, seed=3)
    torch.testing.assert_close(elementwise.dot(Scaled(C, scales), Y), elementwise.dot(D, Y), rtol=1e-3, atol=1e-1)
    assert torch.equal(unscaled(Scaled(C, scales)), D)


def test_subnormal_reciprocals_are_not_flushed():
    D = Scaled(torch.full((1, 1, 2), 2.0**10, device="cuda"), (powers(100), powers(30)))
    assert unscaled(D).tolist() == [[[2.0**-120, 2.0**-120]]]


@pytest.mark.parametrize("all_finite", [None, True, False])
def test_corrections(all_finite: bool | None):
    steps = torch.arange(19200.0, device="cuda")
    other, flag = steps.clone(), None if all_finite is None else torch.tensor(all_finite, device="cuda")
    expected = torch.empty_like(steps), torch.empty_like(steps)
    found = corrections_(steps, 0.9, 0.999, flag)
    elementwise_torch.corrections_(other, *expected, 0.9, 0.999, flag)
    assert torch.equal(steps, other)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(19200, 1, 2), (12, 768, 1), (70000, 1, 1), (3, 300, 40)])
def test_adam_of_small_groups(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch):
    """By kernels, unless there are more groups than a grid has places, and by torch."""
    g, c = randn(*shape, seed=2), torch.linspace(0.1, 1.0, shape[0], device="cuda")
    numbers = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "correction1": c, "correction2": c}
    assert (elementwise.implementation_for(g) is triton_elementwise) == (shape[0] <= triton_elementwise.MOST_GROUPS)
    results = []
    for kernels in (True, False):
        monkeypatch.setattr(elementwise, "available", lambda device, kernels=kernels: kernels)
        m, v = randn(*shape), randn(*shape, seed=1).square()
        results.append((m, v, elementwise.adam_(m, v, g, **numbers)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


# --- steps -------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, norms, biases and two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            h = h + torch.tanh(layer(norm(h)))
        return self.head(self.norms[2](h))


REST = {"words": {"update": "fallback"}}
MEMBERS: dict[str, Any] = {
    "KFAC": lambda m: lw.optim.KFAC(m, lr=0.01, refresh_every=1, overrides=REST, weight_decay=0.1, scale="formula"),
    "KFAC half": lambda m: lw.optim.KFAC(
        m, lr=0.01, refresh_every=1, overrides=REST, precision="half", clip=None, scale="formula"
    ),
    "FOOF": lambda m: lw.optim.FOOF(m, lr=0.01, refresh_every=1, overrides=REST, scale="formula"),
    "SOAP": lambda m: lw.optim.SOAP(m, lr=0.003, refresh_every=1, scale="formula"),
    "Shampoo": lambda m: lw.optim.Shampoo(m, lr=0.01, refresh_every=1, scale="formula"),
}


ROUNDING = {"KFAC half": 1e-2, "SOAP": 5e-2, "Shampoo": 2e-2}
"""Of the way gone; 2e-3 with the others. On a CPU, gradients changed by 1e-7 change it by 4e-3, 4e-2 and 1e-2 with
these (11 bits, and bases of null spaces), with the others by less than 1e-5."""


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def given_gradient(p: Tensor, place: int, step: int) -> Tensor:
    """With singular values apart from one another, and 1 % of noise: what statistics of gradients alone are taken of.

    Those of the model itself, sums by atomics, differ from run to run, and turn bases in what is nearly a null space.
    """
    same, new = (torch.Generator().manual_seed(seed) for seed in (place, 100 * step + 100 + place))
    X = torch.randn(p.shape, generator=same)
    if p.ndim == 2:
        U, s, V = torch.linalg.svd(X, full_matrices=False)
        X = (U * torch.logspace(0, -1, len(s))) @ V
    return X + 0.01 * torch.randn(p.shape, generator=new)


def trained(name: str, model: nn.Module, steps: int) -> Layerwise:
    opt = MEMBERS[name](model)
    for step in range(steps):
        g = torch.Generator("cuda").manual_seed(step)
        x = torch.randint(50, (16, 12), generator=g, device="cuda")
        y = torch.randn(16, 12, 7, generator=g, device="cuda")
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        for place, p in enumerate(model.parameters() if name in ("SOAP", "Shampoo") else ()):
            p.grad = given_gradient(p, place, step).cuda()
        if step == 3:
            grad = next(model.parameters()).grad
            assert isinstance(grad, Tensor)
            grad[0, 0] = torch.nan
        opt.step()
    return opt


@pytest.mark.parametrize("name", MEMBERS)
def test_steps_with_and_without_what_is_known(name: str, monkeypatch: pytest.MonkeyPatch):
    """Bounds of gradients, directions divided late, tables: none of them changes a step by more than rounding."""
    torch.manual_seed(0)
    model = Words().cuda()
    other, start = copy.deepcopy(model), copy.deepcopy(model)
    opt = trained(name, model, 8)
    assert opt.health().skipped_steps == 1
    monkeypatch.setattr(executor, "bounds", lambda *given: {})
    monkeypatch.setattr(StackPieces, "of", lambda *given: None)
    lazily = type(opt.rule).direction
    monkeypatch.setattr(type(opt.rule), "direction", lambda *given: unscaled(lazily(*given)))
    trained(name, other, 8)
    moved, apart = (float((flat(model) - flat(net)).square().sum()) for net in (start, other))
    assert moved > 0
    assert apart < ROUNDING.get(name, 2e-3) ** 2 * moved
