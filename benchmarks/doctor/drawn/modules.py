"""Modules that the families are made of."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doctor.case import parameter


class Dense(nn.Module):
    def __init__(self, features: int, growth: int, depth: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features + growth * k, growth) for k in range(depth))
        self.act, self.width = act(), features + growth * depth

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, self.act(layer(x))], -1)
        return x


class Residual(nn.Module):
    """Pre-activation residual block of convolutions with group norm."""

    def __init__(self, width: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.act(self.conv1(self.norm(x))))


class Average(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


class Dilated(nn.Module):
    def __init__(self, width: int, dilation: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, dilation=dilation, padding=dilation)
        self.mix, self.act = nn.Conv1d(width, width, 1), act()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.act(self.conv(x)))


class LastMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1)


class TimeLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


class SwiGLUBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.RMSNorm(width), nn.RMSNorm(width), heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm1(x)
        q, k, v = (f(z).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        z = self.norm2(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))

    def sharpen(self, factor: float) -> None:
        """Queries and keys times the factor."""
        parameter(self.q, "weight").mul_(factor)
        parameter(self.k, "weight").mul_(factor)


class Places(nn.Module):
    def __init__(self, size: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size, width), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.places.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.places.weight[: x.shape[1]]


class Perceiver(nn.Module):
    """Learned queries look at a set through torch's attention, then a perceptron."""

    def __init__(self, features: int, width: int, queries: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.queries = nn.Linear(features, width), nn.Parameter(torch.randn(queries, width))
        self.look = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 2 * width), act(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.embed(x))
        h = self.look(self.queries.expand(len(x), -1, -1), z, z, need_weights=False)[0]
        return (h + self.down(self.act(self.up(self.norm2(h))))).flatten(1)

    def sharpen(self, factor: float) -> None:
        """Queries and keys times the factor."""
        parameter(self.look, "in_proj_weight")[: 2 * self.look.embed_dim].mul_(factor)


class Pooled(nn.Module):
    def __init__(self, each: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.each, self.after = each, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.each(x).mean(1))


class Graph(nn.Module):
    mean: Tensor
    """Over the neighbours of each node, itself among them."""

    def __init__(self, nodes: int, features: int, width: int, depth: int, act: type[nn.Module]) -> None:
        super().__init__()
        adjacency = (torch.rand(nodes, nodes) < 0.3).float()
        adjacency = ((adjacency + adjacency.T) > 0).float() + torch.eye(nodes)
        self.register_buffer("mean", adjacency / adjacency.sum(1, keepdim=True))
        self.layers = nn.ModuleList(nn.Linear(features if k == 0 else width, width) for k in range(depth))
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(self.mean @ x))
        return x.mean(1)


class Ends(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase], features: int, width: int) -> None:
        super().__init__()
        self.rnn = kind(features, width, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0].mean(1)


class Waves(nn.Module):
    frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 3 * torch.randn(2, width // 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.sin(x @ self.frequencies), torch.cos(x @ self.frequencies)], -1)
