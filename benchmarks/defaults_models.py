"""Models of `defaults.py`, written as people write them."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def digits_mlp() -> nn.Module:
    """64 → 128 → 128 → 10."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def autoencoder(widths: tuple[int, ...]) -> nn.Module:
    """Down through the widths and up again, with ReLU between; logits of pixels."""
    sizes = [*widths, *reversed(widths[:-1])]
    layers: list[nn.Module] = []
    for place, (i, o) in enumerate(pairwise(sizes), 1):
        plain = place in (len(widths) - 1, len(sizes) - 1)  # the code and the output are linear
        layers += [nn.Linear(i, o)] if plain else [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers)


def convolutions(width: int) -> nn.Module:
    """Three convolutions with batch norm, for images of one channel."""
    layers: list[nn.Module] = []
    channels = (1, width, 2 * width, 4 * width)
    for place, (i, o) in enumerate(pairwise(channels)):
        stride = 1 if place == 0 else 2
        layers += [nn.Conv2d(i, o, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10))


class Residual(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.norm2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or i != o:
            self.around = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(h + self.around(x))


def resnet18(width: int) -> nn.Module:
    """ResNet-18 for images of 32 × 32: a first convolution of 3 × 3, no pooling before the blocks."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    i = width
    for stage in range(4):
        o = width * 2**stage
        layers += [Residual(i, o, 1 if stage == 0 else 2), Residual(o, o, 1)]
        i = o
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 10))


class Attention(nn.Module):
    """Causal self-attention, with queries, keys and values in one matrix as in nanoGPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(2, width // 32)
        self.qkv, self.projection = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        N, T, D = x.shape
        q, k, v = self.qkv(x).view(N, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        return self.projection(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(N, T, D))


class Perceptron(nn.Module):
    """A GELU layer of four times the width."""

    def __init__(self, width: int, factor: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Four perceptrons; a router sends every token to two of them, as many to each as there are."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Perceptron(width, 2) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, place].unsqueeze(-1))
        return out.view_as(x)


class Block(nn.Module):
    """Pre-norm attention and a perceptron, or a mixture of them."""

    def __init__(self, width: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CharacterGPT(nn.Module):
    """Learned positions, an untied head; weights as in GPT-2: N(0, 0.02²)."""

    mlp: type[nn.Module] = Perceptron

    def __init__(self, width: int, depth: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, self.mlp(width)) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif "norm" not in name:
                into_stream = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(p, 0.0, 0.02 / math.sqrt(2 * depth) if into_stream else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


class MixtureGPT(CharacterGPT):
    """The same with a mixture of experts in place of every perceptron."""

    mlp = Mixture
