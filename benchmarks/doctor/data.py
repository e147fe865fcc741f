"""Data that networks are examined on, all of it made up.

First the data of networks by hand (`zoo`), then that of drawn ones (`drawn`), whose sizes are drawn, too.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def even_labels(f: Tensor) -> Tensor:
    """Classes by the largest of some functions, each standardised, so that no class is rare."""
    return ((f - f.mean(0)) / f.std(0)).argmax(1)


def vectors(n: int = 768, features: int = 20, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Normal inputs, labelled by a random two-layer teacher, its outputs centred so that classes are even."""
    x = torch.randn(n, features)
    f = torch.tanh(x @ torch.randn(features, 32) / features**0.5) @ torch.randn(32, classes)
    return x, even_labels(f)


def images(n: int = 384, classes: int = 4, size: int = 12) -> tuple[Tensor, Tensor]:
    """Smooth templates with noise, standardised."""
    templates = F.interpolate(torch.randn(classes, 1, 4, 4), size=(size, size), mode="bilinear")
    y = torch.randint(classes, (n,))
    return templates[y] + 0.8 * torch.randn(n, 1, size, size), y


def text(n: int = 192, length: int = 24, letters: int = 20) -> tuple[Tensor, Tensor]:
    """Next letters of a random Markov chain."""
    transitions = torch.softmax(2 * torch.randn(letters, letters), -1)
    rows = [torch.randint(letters, (n,))]
    for _ in range(length):
        rows.append(torch.multinomial(transitions[rows[-1]], 1)[:, 0])
    tokens = torch.stack(rows, 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def sequences(n: int = 384, length: int = 12, features: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Series whose mean, seen through a random teacher, is the label."""
    drift = torch.randn(n, features)
    x = drift.unsqueeze(1) + torch.randn(n, length, features)
    f = torch.tanh(drift @ torch.randn(features, 16)) @ torch.randn(16, classes)
    return x, even_labels(f)


def channels_first(series: Tensor) -> Tensor:
    """``[N, T, F]`` as convolutions want it, ``[N, F, T]``."""
    return series.mT.contiguous()


def values(n: int = 768, features: int = 16, outputs: int = 3) -> tuple[Tensor, Tensor]:
    """Values of size one, by a random two-layer teacher with noise."""
    x = torch.randn(n, features)
    f = torch.tanh(x @ torch.randn(features, 24) / features**0.5) @ torch.randn(24, outputs)
    return x, (f - f.mean(0)) / f.std(0) + 0.1 * torch.randn(n, outputs)


def table(n: int, features: int, classes: int) -> tuple[Tensor, Tensor]:
    """Columns of several laws, standardised; labels by a random teacher with products of columns."""
    x = torch.randn(n, features)
    x[:, ::3] = torch.rand(n, len(range(0, features, 3))) * 3.4 - 1.7
    x[:, 1::5] = x[:, 1::5].sign()
    f = x @ torch.randn(features, classes) + (x @ torch.randn(features, classes) / 2).sin() * 2
    return x, even_labels(f)


def pictures(n: int, classes: int, size: int) -> tuple[Tensor, Tensor]:
    """Colour gratings whose direction is the label, with noise."""
    y = torch.randint(classes, (n,))
    grid = torch.linspace(-1, 1, size)
    angle = math.pi * y / classes
    wave = angle.cos()[:, None, None] * grid + angle.sin()[:, None, None] * grid[:, None]
    phase = 2 * math.pi * torch.rand(n, 1, 1)
    x = torch.sin(5 * wave + phase)[:, None] * torch.tensor([1.0, 0.7, 0.4])[:, None, None]
    x = x + 0.5 * torch.randn(n, 3, size, size)
    return (x - x.mean()) / x.std(), y


def series(n: int, length: int, features: int, classes: int) -> tuple[Tensor, Tensor]:
    """Oscillations with noise; the class is the frequency. [N, T, F]"""
    y = torch.randint(classes, (n,))
    time = torch.arange(length) / length
    wave = torch.sin(2 * math.pi * (1.0 + y)[:, None] * time + 6.28 * torch.rand(n, 1))
    x = wave[..., None] * torch.randn(features) + 0.5 * torch.randn(n, length, features)
    return (x - x.mean()) / x.std(), y


def letters(n: int, length: int, size: int) -> tuple[Tensor, Tensor]:
    """Text whose next letter depends on the last two."""
    last = torch.softmax(2.5 * torch.randn(size, size), -1)
    before = torch.softmax(2.5 * torch.randn(size, size), -1)
    rows = [torch.randint(size, (n,)), torch.randint(size, (n,))]
    for _ in range(length - 1):
        chances = 0.7 * last[rows[-1]] + 0.3 * before[rows[-2]]
        rows.append(torch.multinomial(chances, 1)[:, 0])
    tokens = torch.stack(rows, 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def clouds(n: int, points: int, features: int, classes: int) -> tuple[Tensor, Tensor]:
    """Sets of points; the class is the covariance that they were drawn with."""
    y = torch.randint(classes, (n,))
    mix = torch.randn(classes, features, features) / features**0.5
    x = torch.einsum("npf,nfg->npg", torch.randn(n, points, features), mix[y]) + 0.5 * torch.randn(n, 1, features)
    return x / x.std(), y
