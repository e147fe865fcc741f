"""Inputs that all examples share, through several layers; and gradients so small that they say nothing of examples."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.layers.capture.examine import examine

N, T, D = 6, 5, 4


class Tower(nn.Module):
    """Positions through a network of their own, added to every example: each layer of it sees no examples."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.table = nn.Embedding(T, D)
        self.tower = nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(D, D), nn.Tanh())))
        self.head = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.tower(self.table(torch.arange(T)))).tanh().mean(1))


class Joined(nn.Module):
    """Two tables that all examples share, one after the other on an axis: neither can be given examples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Embedding(2, D), nn.Embedding(3, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.first(torch.arange(2)), self.second(torch.arange(3))], dim=-2)
        return self.head((x + both).tanh().mean(1))


class Blocks(nn.Module):
    """Many tables and layers that all examples share, two in each block."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(T, D) for _ in range(count))
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(count))
        self.head = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        for table, layer in zip(self.tables, self.layers, strict=True):
            x = (x + layer(table(torch.arange(T)))).tanh()
        return self.head(x.mean(1))


def test_many_shared_modules_are_found_at_once():
    torch.manual_seed(0)
    model, x = Blocks(20).double(), torch.randn(N, T, D, dtype=torch.float64)
    forwards = []
    model.register_forward_pre_hook(lambda module, args: forwards.append(1))
    found = examine(model, lw.layers(model), x, None, None)
    assert found.reasons == {}
    assert len(found.broadcast) == 20  # the layers after the tables have the axis from them
    assert len(forwards) < 8
    torch.testing.assert_close(lw.jacobian(model, x).to_dense(), rows(model, x), rtol=1e-9, atol=1e-12)


def rows(model: nn.Module, x: Tensor) -> Tensor:
    """The Jacobian by autograd."""
    params = list(model.parameters())
    found = (torch.autograd.grad(z, params, retain_graph=True) for z in model(x).flatten())
    return torch.stack([torch.cat([g.flatten() for g in of]) for of in found])


@pytest.mark.parametrize("build", [lambda: Tower(1), lambda: Tower(4), lambda: Tower(12), Joined])
@pytest.mark.parametrize("n", [N, T])
def test_a_shared_path_is_recorded(build: Callable[[], nn.Module], n: int):
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(n, T, D, dtype=torch.float64)
    assert examine(model, lw.layers(model), x, None, None).reasons == {}
    torch.testing.assert_close(lw.jacobian(model, x).to_dense(), rows(model, x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("depth", [30, 70, pytest.param(150, marks=pytest.mark.slow)])
def test_gradients_that_vanish_cost_no_memory_and_no_rule(depth: int):
    """After some 60 layers of this width the gradient's square is below float32, after 150 nearly the gradient."""
    torch.manual_seed(0)
    layers = [m for _ in range(depth) for m in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(8, 3))
    x, y = torch.randn(16, 8), torch.randint(3, (16,))
    opt = lw.optim.KFAC(model, lr=1e-3, likelihood="categorical")
    sizes: list[int] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, out: sizes.append(out.numel()))
    try:
        for _ in range(3):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
    finally:
        handle.remove()
    assert max(sizes) <= 4 * x.numel()  # layers that seem to have no examples must not each be given an axis for them
    states = [own for of in opt.state_dict()["state"].values() for own in of.values() if isinstance(own, dict)]
    assert sum("P" in own and "Q" in own for own in states) == depth + 1


class Attended(nn.Module):
    """Attention among positions, the same for all examples: its rule has a forward of its own, and is not spread."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.MultiheadAttention(D, 2, batch_first=True), nn.Linear(D, 2)
        self.register_buffer("positions", torch.randn(1, T, D))

    def forward(self, x: Tensor) -> Tensor:
        p = self.positions
        return self.head((x + self.mix(p, p, p)[0]).tanh().mean(1))  # type: ignore[arg-type]


def test_what_cannot_be_spread_falls_back():
    torch.manual_seed(0)
    model, x = Attended().double(), torch.randn(N, T, D, dtype=torch.float64)
    torch.testing.assert_close(lw.jacobian(model, x).to_dense(), rows(model, x), rtol=1e-9, atol=1e-12)
