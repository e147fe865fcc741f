"""Architectures of the networks by hand."""

import itertools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doctor.case import initialise, parameter

M = TypeVar("M", bound=nn.Module)


def he(model: M, gain: float = 2.0) -> M:
    """Weights whose signals keep their size through ReLU (gain 2) or tanh (about 1)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv1d):
            initialise(module, gain)
    return model


def head_small(model: nn.Sequential) -> nn.Sequential:
    """The last layer's weights times 0.3: first outputs are near zero."""
    parameter(model[-1], "weight").mul_(0.3)
    return model


def mlp(widths: tuple[int, ...] = (20, 64, 64, 64, 5), nonlinearity: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nonlinearity()]
    model = nn.Sequential(*layers[:-1])
    he(model, 2.0 if nonlinearity in (nn.ReLU, nn.GELU, nn.SiLU) else 1.0)
    return head_small(model)


def cnn(
    channels: int = 16, classes: int = 4, nonlinearity: type[nn.Module] = nn.ReLU, norm: bool = False
) -> nn.Sequential:
    def block(inputs: int) -> list[nn.Module]:
        between = [nn.BatchNorm2d(channels)] if norm else []
        return [nn.Conv2d(inputs, channels, 3, padding=1), *between, nonlinearity()]

    model = nn.Sequential(
        *block(1),
        nn.AvgPool2d(2),
        *block(channels),
        nn.AvgPool2d(2),
        *block(channels),
        nn.Flatten(),
        nn.Linear(9 * channels, classes),
    )
    he(model, 2.0 if nonlinearity is nn.ReLU else 1.0)
    return head_small(model)


def conv1d(nonlinearity: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv1d(6, 24, 3, padding=1),
        nonlinearity(),
        nn.Conv1d(24, 24, 3, padding=1),
        nonlinearity(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    return he(model)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, norm: bool, nonlinearity: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.nonlinearity = heads, nonlinearity
        self.norm1, self.norm2 = (nn.LayerNorm(width) if norm else nn.Identity() for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.nonlinearity(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(
        self,
        letters: int = 20,
        width: int = 32,
        depth: int = 3,
        heads: int = 4,
        length: int = 24,
        norm: bool = True,
        nonlinearity: Callable[[Tensor], Tensor] = F.gelu,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, norm, nonlinearity) for _ in range(depth)))
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.head = nn.Linear(width, letters, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.7 / module.in_features**0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


class ResidualMLP(nn.Module):
    """``h ← h + branch(norm(h))``."""

    def __init__(self, inputs: int, width: int, depth: int, classes: int, norm: bool = True, gain: float = 1.0) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) if norm else nn.Identity() for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.head = nn.Linear(width, classes)
        he(self, 1.0)
        for layer in self.down:
            parameter(layer, "weight").mul_(gain)
        parameter(self.head, "weight").mul_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            h = h + down(F.relu(up(norm(h))))
        return self.head(self.norm(h))


class Recurrent(nn.Module):
    def __init__(
        self, kind: Callable[..., nn.RNNBase] = nn.GRU, features: int = 6, width: int = 24, classes: int = 3
    ) -> None:
        super().__init__()
        self.rnn = kind(features, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Mixer(nn.Module):
    """Tokens of an image mixed by one perceptron, channels by another."""

    def __init__(self, tokens: int = 9, width: int = 32, depth: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.across = nn.ModuleList(
            nn.Sequential(nn.Linear(tokens, 24), nn.GELU(), nn.Linear(24, tokens)) for _ in range(depth)
        )
        self.along = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).mT
        for place, (across, along) in enumerate(zip(self.across, self.along, strict=True)):
            h = h + across(self.norms[2 * place](h).mT).mT
            h = h + along(self.norms[2 * place + 1](h))
        return self.head(self.norm(h).mean(1))


class Encoder(nn.Module):
    """Torch's own transformer encoder on series, classified by the mean."""

    def __init__(self, features: int = 6, width: int = 32, classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


class Vision(nn.Module):
    """Patches, attention with a softmax of its own, a perceptron."""

    def __init__(self, width: int = 32, classes: int = 4, nonlinearity: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.patches, self.place = nn.Conv2d(1, width, 3, stride=3), nn.Parameter(0.1 * torch.randn(16, width))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.perceptron = nn.Sequential(nn.Linear(width, 96), nonlinearity(), nn.Linear(96, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).mT + self.place
        z = self.norm1(h)
        q, k, v = (f(z).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = h + self.out((torch.softmax(q @ k.mT / 8**0.5, -1) @ v).transpose(1, 2).flatten(2))
        h = h + self.perceptron(self.norm2(h))
        return self.head(self.norm3(h).mean(1))


class Detached(nn.Module):
    """A body that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp((20, 64, 64)), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).detach())


class Gated(ResidualMLP):
    """Gates that are closed: no gradient reaches the branches."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            h = h + 0.0 * down(F.relu(up(norm(h))))
        return self.head(self.norm(h))
