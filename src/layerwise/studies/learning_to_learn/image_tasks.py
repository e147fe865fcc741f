"""Small image tasks: subsets with shuffled classes and random labels, and many fully connected networks at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from layerwise.data.digits import digits
from layerwise.data.mnist import mnist
from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.foundations.random import stream

IMAGES = ("digits", "mnist")
CLASSES = 10
HELD_OUT = 500
"""Of the digits, for the test; MNIST has a test set of its own."""
Params = dict[str, Tensor]


@cache
def _images(name: str, pooled: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flat training and test images with labels; `pooled` × `pooled` pixels are averaged."""
    if name == "digits":
        x, y = digits()
        order = torch.randperm(len(y), generator=stream(0, "held-out digits"))
        x, y = x[order], y[order]
        parts = x[HELD_OUT:], y[HELD_OUT:], x[:HELD_OUT], y[:HELD_OUT]
    else:
        parts = *mnist("train"), *mnist("test")
    if pooled > 1:
        pool = torch.nn.functional.avg_pool2d
        parts = pool(parts[0], pooled), parts[1], pool(parts[2], pooled), parts[3]
    return parts[0].flatten(1), parts[1], parts[2].flatten(1), parts[3]


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """A kind of task: which images, how many, and how many of their labels are drawn at random."""

    images: str = "digits"
    examples: int = 300
    """To train on and to hold out."""
    noise: float | int = 0.0
    """The part of labels that are replaced by a class drawn from all ten, so that nine tenths of them are wrong."""
    pooled: int = 1
    """Pixels are averaged over squares of this side."""

    def __post_init__(self) -> None:
        if self.images not in IMAGES:
            raise NameLookupError(unknown("set of images", self.images, IMAGES))
        most = 1797 - HELD_OUT if self.images == "digits" else 60_000
        if not 2 <= self.examples <= most:
            raise InputError(
                describe(f"examples={self.examples}", f"2 to {most}", f"take fewer: {self.images} has no more")
            )

    @property
    def pixels(self) -> int:
        """Of an image."""
        return _images(self.images, self.pooled)[0].shape[1]

    def draw(self, seeds: Sequence[int], name: str, device: str = "cpu") -> Drawn:
        """A task for each seed: a subset, classes in another order, and its own random labels."""
        x, y, test_x, test_y = _images(self.images, self.pooled)
        parts = []
        for seed in seeds:
            g = stream(seed, name, "task")
            chosen = torch.randperm(len(y), generator=g)[: self.examples]
            classes = torch.randperm(CLASSES, generator=g)
            labels = classes[y[chosen]]
            replaced = torch.rand(self.examples, generator=g) < self.noise
            labels = torch.where(replaced, torch.randint(CLASSES, (self.examples,), generator=g), labels)
            parts.append((x[chosen], labels, classes[test_y]))
        found = [torch.stack(column).to(device) for column in zip(*parts, strict=True)]
        return Drawn(x=found[0], y=found[1], test_x=test_x.to(device), test_y=found[2])


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """Tasks of one kind, stacked."""

    x: Float[Tensor, "T n I"]
    y: Int64[Tensor, "T n"]
    test_x: Float[Tensor, "N I"]
    """Shared by all."""
    test_y: Int64[Tensor, "T N"]


def networks(seeds: Sequence[int], sizes: Sequence[int], name: str, device: str = "cpu") -> Params:
    """A fully connected ReLU network for each seed, stacked: Gaussian weights of variance 2/fan-in, no biases."""
    found: dict[str, list[Tensor]] = {}
    for seed in seeds:
        g = stream(seed, name, "network")
        for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            found.setdefault(f"W{i}", []).append(torch.randn(fan_in, fan_out, generator=g) * math.sqrt(2 / fan_in))
            found.setdefault(f"b{i}", []).append(torch.zeros(1, fan_out))
    return {name: torch.stack(parts).to(device) for name, parts in found.items()}


def outputs(params: Params, x: Float[Tensor, "*R N I"]) -> Float[Tensor, "*R N C"]:
    """Of one network, or of a stack of them."""
    depth = len(params) // 2
    for i in range(depth):
        x = x @ params[f"W{i}"] + params[f"b{i}"]
        x = torch.relu(x) if i < depth - 1 else x
    return x


def losses(params: Params, x: Float[Tensor, "*R N I"], y: Int64[Tensor, "*R N"]) -> Float[Tensor, "*R"]:
    """Mean cross-entropy of each network."""
    log = torch.log_softmax(outputs(params, x), -1)
    return -log.gather(-1, y[..., None])[..., 0].mean(-1)


def accuracies(params: Params, x: Float[Tensor, "*R N I"], y: Int64[Tensor, "*R N"]) -> Float[Tensor, "*R"]:
    """Part of the labels that each network has right."""
    return (outputs(params, x).argmax(-1) == y).double().mean(-1)


def batch_order(seeds: Sequence[int], n: int, steps: int, batch: int, name: str) -> Int64[Tensor, "T S B"]:
    """Examples of each step, drawn with replacement, for each seed."""
    return torch.stack([torch.randint(n, (steps, batch), generator=stream(s, name, "order")) for s in seeds])


def taken(x: Float[Tensor, "T n I"], index: Int64[Tensor, "T B"]) -> Float[Tensor, "T B I"]:
    """Rows of each task."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]
