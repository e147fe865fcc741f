"""Architectures nobody wrote down: random stacks of layers, against the dense oracle."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from references import block_order, close
from torch import Tensor, nn

import layerwise as lw
from layerwise.testing import oracles


class _Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class _Repeated(nn.Module):
    def __init__(self, body: nn.Module, times: int) -> None:
        super().__init__()
        self.body, self.times = body, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.body(x).tanh()
        return x


class _MergedTime(nn.Module):
    """[N, T, F] as [N·T, F] and back."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class _ChannelsFirst(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.mT).mT


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@dataclass
class _Random:
    model: nn.Module
    x: Tensor
    y: Tensor
    likelihood: str
    pieces: tuple[str, ...]


VECTOR = ("linear", "linear_no_bias", "layer_norm", "residual", "repeated")
SEQUENCE = (*VECTOR, "merged", "conv1d", "mean", "flatten")
IMAGE = ("conv2d", "strided", "grouped", "group_norm", "residual_conv", "repeated_conv", "flatten")
ACTIVATIONS = (nn.Tanh, nn.Sigmoid, nn.GELU, nn.ReLU)


def _piece(name: str, x: Tensor) -> nn.Module:
    features = x.shape[-1] if x.ndim < 4 else x.shape[1]
    return {
        "linear": lambda: nn.Linear(features, 3),
        "linear_no_bias": lambda: nn.Linear(features, 2, bias=False),
        "layer_norm": lambda: nn.LayerNorm(features),
        "residual": lambda: _Residual(nn.Linear(features, features)),
        "repeated": lambda: _Repeated(nn.Linear(features, features), 2),
        "merged": lambda: _MergedTime(nn.Linear(features, 3)),
        "conv1d": lambda: _ChannelsFirst(nn.Conv1d(features, 2, 2, padding=1)),
        "mean": _Mean,
        "flatten": nn.Flatten,
        "conv2d": lambda: nn.Conv2d(features, 2, 2, padding=1),
        "strided": lambda: nn.Conv2d(features, 3, 2, stride=2, padding=1, bias=False),
        "grouped": lambda: nn.Conv2d(features, 2 * features, (1, 2), padding="same", groups=features),
        "group_norm": lambda: nn.GroupNorm(1, features),
        "residual_conv": lambda: _Residual(nn.Conv2d(features, features, 3, padding=1)),
        "repeated_conv": lambda: _Repeated(nn.Conv2d(features, features, 1), 2),
    }[name]()


@st.composite
def _random(draw: st.DrawFn) -> _Random:
    torch.manual_seed(draw(st.integers(0, 2**20)))
    n = draw(st.integers(2, 4))
    shape = draw(st.sampled_from([(n, 3), (n, 4, 2), (n, 2, 3, 3)]))
    first = h = torch.randn(*shape).double()
    modules: list[nn.Module] = []
    names = []
    for _ in range(draw(st.integers(1, 4))):
        known = {2: VECTOR, 3: SEQUENCE, 4: IMAGE}[h.ndim]
        names.append(draw(st.sampled_from(known)))
        modules.append(nn.Sequential(_piece(names[-1], h), draw(st.sampled_from(ACTIVATIONS))()).double())
        h = modules[-1](h).detach()
    if h.ndim == 4:
        modules.append(nn.Flatten())
        h = modules[-1](h)
    modules.append(nn.Linear(h.shape[-1], 3).double())
    model = nn.Sequential(*modules)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
        f = model(first)
    likelihood = draw(st.sampled_from(["categorical", "gaussian", "bernoulli"]))
    y = {
        "categorical": torch.randint(3, f.shape[:-1]),
        "gaussian": torch.randn_like(f),
        "bernoulli": torch.randint_like(f, 2),
    }[likelihood]
    return _Random(model, first, y, likelihood, tuple(names))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(_random(), st.sampled_from(["exact", "empirical"]))
def test_random_architectures_equal_the_oracle(made: _Random, estimator: str):
    model, x, y = made.model, made.x, made.y
    oracle = oracles.fisher if estimator == "exact" else oracles.empirical_fisher
    expected = oracle(model, x, y, likelihood=made.likelihood)

    # Where T = C, an axis of three could be either: say which.
    law = lw.likelihoods.resolve(made.likelihood, **({"class_axis": -1} if made.likelihood == "categorical" else {}))

    def fisher(structure: str) -> Any:
        return lw.fisher(model, (x, y), law, structure, estimator)

    size = float(expected.norm())
    v = torch.randn(len(expected), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    close(fisher("dense").to_dense(), expected)
    close(fisher("lowrank") @ v, expected @ v)
    close(fisher("implicit") @ v, expected @ v)
    close(fisher("diag").diagonal().flat(), expected.diagonal())
    close(fisher("quasidiag").trace(), expected.trace())
    B, K, E = fisher("block"), fisher("kfac"), fisher("ekfac")
    close(E.trace(), expected.trace(), 1e-8)
    for spec in B.table.layers:
        order = block_order(B.shapes, spec)
        exact, block, kfac, ekfac = (
            M[order.unsqueeze(1), order] for M in (expected, B.to_dense(), K.to_dense(), E.to_dense())
        )
        close(block, exact, scale=1e-6 * size)
        assert (exact - ekfac).norm() <= (exact - kfac).norm() + 1e-9 * size


@settings(max_examples=8, deadline=None, derandomize=True)
@given(_random())
def test_hessians_of_random_architectures_equal_the_oracle(made: _Random):
    def loss(f: Tensor, y: Tensor) -> Tensor:
        if made.likelihood == "categorical":
            return nn.functional.cross_entropy(f.flatten(0, -2), y.flatten())
        return (f - y).square().mean()

    H = lw.hessian(made.model, (made.x, made.y), loss=loss)
    expected = oracles.hessian(made.model, made.x, made.y, loss)
    v = torch.randn(len(expected), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    close(H @ v, expected @ v, 1e-8, scale=1e-6 * float(v.norm()))
