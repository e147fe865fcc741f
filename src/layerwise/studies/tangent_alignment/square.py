"""Tangent kernels of small networks on the square and on the line: which functions they learn first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, NumericalError, describe
from layerwise.foundations.random import stream
from layerwise.kernel.alignment import cka
from layerwise.kernel.ntk import ntk
from layerwise.regimes.tracker import eigenvalues

RADIUS = math.sqrt(2 / math.pi)
"""Of a disk that covers half of the square [−1, 1]²."""


def network(inputs: int, width: int, depth: int, generator: torch.Generator, dtype: torch.dtype) -> nn.Sequential:
    """`depth` linear layers with ReLU between them, drawn as torch does by default: U(−1/√fan-in, 1/√fan-in)."""
    sizes = [inputs, *[width] * (depth - 1), 1]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layer = nn.Linear(fan_in, fan_out, dtype=dtype)
        for p in layer.parameters():
            nn.init.uniform_(p, -(fan_in**-0.5), fan_in**-0.5, generator=generator)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def in_disk(x: Float[Tensor, "N 2"]) -> Bool[Tensor, "N"]:
    """Whether points are in the disk.

    >>> in_disk(torch.tensor([[0.5, 0.6], [0.6, 0.6]])).tolist()
    [True, False]
    """
    return x.square().sum(1) <= RADIUS**2


def grid(side: int) -> Float[Tensor, "M 2"]:
    """The regular grid of `side` × `side` points, corners included."""
    line = torch.linspace(-1, 1, side)
    return torch.cartesian_prod(line, line)


class Look(NamedTuple):
    """The kernel on the grid after some iterations."""

    step: int
    loss: float
    cka: float
    """With the label ±1."""
    effective_rank: float
    largest: float
    """Eigenvalue of the centred kernel."""
    ratio: float
    """λ₂₀ / λ₁ of the kernel as it is."""
    disk: float
    """The largest absolute correlation of one of the five leading centred eigenfunctions with the disk."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A network that learns whether a point of the square is in a disk, by gradient descent on all points."""

    width: int = 256
    depth: int = 6
    points: int = 500
    side: int = 30
    """Of the grid that the kernel is looked at on."""
    lr: float | int = 0.1
    steps: tuple[int, ...] = (0, 200, 500, 1000, 2000)
    """At which the kernel is looked at."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        if len(self.steps) < 2 or list(self.steps) != sorted(set(self.steps)) or self.steps[0] != 0:
            raise InputError(describe(f"steps={self.steps}", "increasing numbers from 0 on", "pass e.g. (0, 2000)"))
        if self.depth < 2 or self.side < 5:
            given = f"depth={self.depth} and side={self.side}"
            raise InputError(describe(given, "two layers or more, and a side of five points or more", "take more"))

    def looks(self, seed: int) -> Iterator[Look]:
        """The kernel at each of the steps of one training."""
        generator = stream(seed, "disk")
        x = 2 * torch.rand(self.points, 2, generator=generator) - 1
        y = in_disk(x).float()
        model = network(2, self.width, self.depth, generator, torch.float32).to(self.device)
        x, y = x.to(self.device), y.to(self.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        for step in range(self.steps[-1] + 1):
            loss = nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], y)
            if step in self.steps:
                if not math.isfinite(float(loss.detach())):
                    given = f"a loss of {float(loss.detach())} after {step} steps at lr={self.lr}"
                    raise NumericalError(describe(given, "a finite loss", "take a smaller lr"))
                yield self.look(model, step, float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def look(self, model: nn.Module, step: int, loss: float) -> Look:
        """Measures of the kernel on the grid."""
        points = grid(self.side)
        label = 2 * in_disk(points).double() - 1
        K = ntk(model, points.to(self.device), progress=False)
        plain, centred = eigenvalues(K).values, eigenvalues(K.centered())
        leading = K.kernel_pca(5).functions.vectors.double().cpu()
        return Look(
            step=step,
            loss=loss,
            cka=float(cka(K, label)),
            effective_rank=float(centred.effective_rank()),
            largest=float(centred.max()),
            ratio=float(plain[19] / plain[0]),
            disk=float(correlations(leading, label).max()),
        )


def correlations(u: Float[Tensor, "M k"], label: Float[Tensor, "M"]) -> Float[Tensor, "k"]:
    """Absolute correlation of functions, one a column, with a label."""
    u, label = u - u.mean(0), label - label.mean()
    return (u.mT @ label).abs() / (u.norm(dim=0) * label.norm())


class Modes(NamedTuple):
    """Eigenvectors of a kernel on the line, the leading one first."""

    frequencies: Float[Tensor, "k"]
    """That of an eigenvector's discrete Fourier transform that has most of its power."""
    eigenvalues: Float[Tensor, "k"]


def line_modes(seed: int, width: int = 256, depth: int = 6, points: int = 50, biases: bool = True) -> Modes:
    """Of a network that was not trained, at equispaced points of [0, 1]; without biases it is linear there."""
    generator = stream(seed, "line")
    model = network(1, width, depth, generator, torch.float64)
    if not biases:
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=(2 / layer.in_features) ** 0.5, generator=generator)
                nn.init.zeros_(layer.bias)
    K = ntk(model, torch.linspace(0, 1, points, dtype=torch.float64)[:, None], progress=False)
    values, vectors = K.eigh()
    return Modes(dominant(vectors.flip(1)), values.flip(0))


def dominant(vectors: Float[Tensor, "n k"]) -> Float[Tensor, "k"]:
    """The frequency that has most of the power of each column, in periods of the interval.

    >>> t = torch.arange(50, dtype=torch.float64) / 50
    >>> dominant(torch.stack([torch.ones(50).double(), torch.cos(6 * math.pi * t)], 1)).tolist()
    [0.0, 3.0]
    """
    return torch.fft.rfft(vectors, dim=0).abs().argmax(0).to(vectors)


def spearman(a: Sequence[float] | Float[Tensor, "n"]) -> float:
    """The rank correlation of a sequence with its index; equal values share their mean rank.

    >>> round(spearman([0.0, 1.0, 1.0, 2.0]), 4), round(spearman([3.0, 2.0, 1.0]), 4)
    (0.9487, -1.0)
    """
    values = torch.as_tensor(a, dtype=torch.float64)
    below = (values[:, None] > values).double().sum(1) + (values[:, None] == values).double().sum(1) / 2
    ranks, index = below - below.mean(), torch.arange(len(values), dtype=torch.float64)
    index = index - index.mean()
    return float((ranks * index).sum() / (ranks.norm() * index.norm()))


def inversions(a: Sequence[float] | Float[Tensor, "n"]) -> int:
    """Neighbours of which the later one is smaller.

    >>> inversions([0.0, 1.0, 1.0, 0.5, 2.0])
    1
    """
    values = torch.as_tensor(a, dtype=torch.float64)
    return int((values[1:] < values[:-1]).sum())
