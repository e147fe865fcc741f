"""What is trained: two GPTs and a ResNet, each on a stream of new batches that can be learnt."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from models import GPT, ResNet
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Source(Protocol):
    """Batches on the device, the same ones for every optimizer; none is waited for."""

    def stream(self) -> Iterator[Batch]: ...


class Markov:
    """Random walks over tokens, each with eight successors; the frequent ones are frequent as in Zipf's law.

    A model learns frequencies in tens of steps and successors in hundreds, so that its factors move all the time. All
    walks are made at once and kept: a step takes a slice.
    """

    SUCCESSORS = 8

    def __init__(self, vocabulary: int, length: int, examples: int, batches: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(1)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, device=device)

        def zipf(*shape: int) -> Tensor:
            return (vocabulary ** uniform(*shape)).long().clamp(1, vocabulary) - 1

        successors, walks = zipf(vocabulary, self.SUCCESSORS), batches * examples
        tokens = [zipf(walks)]
        for _ in range(length):
            which = (self.SUCCESSORS * uniform(walks).square()).long().clamp(max=self.SUCCESSORS - 1)
            tokens.append(successors[tokens[-1], which])
        self.walks, self.examples = torch.stack(tokens, 1), examples

    def stream(self) -> Iterator[Batch]:
        while True:
            for walks in self.walks.split(self.examples):
                yield walks[:, :-1].contiguous(), walks[:, 1:].contiguous()


class Bytes:
    """Random windows of a text, byte by byte."""

    def __init__(self, text: bytes, length: int, examples: int, device: str) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).long()
        self.window, self.examples = torch.arange(length + 1, device=device), examples

    def stream(self) -> Iterator[Batch]:
        device = self.data.device
        generator = torch.Generator(device).manual_seed(1)
        last = len(self.data) - len(self.window) + 1
        while True:
            starts = torch.randint(last, (self.examples, 1), generator=generator, device=device)
            found = self.data[starts + self.window]
            yield found[:, :-1].contiguous(), found[:, 1:].contiguous()


class Textures:
    """Images of three coloured waves that are those of a class, with random phases, under noise."""

    WAVES, STRENGTH = 3, 0.6

    def __init__(self, classes: int, side: int, examples: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(1)
        shape = (classes, self.WAVES)
        frequencies = math.pi * (2 * torch.rand(*shape, 2, generator=generator, device=device) - 1)
        self.colours = torch.randn(*shape, 3, generator=generator, device=device) * self.STRENGTH
        place = torch.arange(side, device=device, dtype=torch.float32)
        self.angles = (
            frequencies[..., 0, None, None] * place[:, None] + frequencies[..., 1, None, None] * place
        )  # [classes, waves, side, side]
        self.classes, self.side, self.examples = classes, side, examples

    def stream(self) -> Iterator[Batch]:
        device, n = self.angles.device, self.examples
        generator = torch.Generator(device).manual_seed(1)
        while True:
            y = torch.randint(self.classes, (n,), generator=generator, device=device)
            phases = 2 * math.pi * torch.rand(n, self.WAVES, 1, 1, generator=generator, device=device)
            x = torch.randn(n, 3, self.side, self.side, generator=generator, device=device)
            x = x + torch.einsum("nwc,nwij->ncij", self.colours[y], (self.angles[y] + phases).cos())
            yield x.contiguous(memory_format=torch.channels_last), y


@dataclass(frozen=True)
class Task:
    """A model and where its batches come from; the loss is a mean, under bfloat16 autocast on a GPU."""

    name: str
    build: Callable[[], nn.Module]
    source: Source
    device: str
    rest: tuple[str, ...] = ()
    """Layers that are no hidden matrices: AdamW's, under every optimizer."""

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def model(self) -> nn.Module:
        """The same weights each time."""
        torch.manual_seed(0)
        with torch.device(self.device):
            return self.build().train()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        with torch.autocast("cuda", torch.bfloat16) if self.cuda else contextlib.nullcontext():
            return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def overrides(self) -> dict[str, dict]:
        return {name: {"update": "fallback"} for name in self.rest}

    def matrices(self, model: nn.Module) -> list[nn.Parameter]:
        """Of hidden layers."""
        layers = [m for name, m in model.named_modules() if name not in self.rest]
        return [m.get_parameter("weight") for m in layers if isinstance(m, nn.Linear | nn.Conv2d)]


MODELS = ("fused", "split", "resnet")
"""A GPT of 12 × 768 with queries, keys and values in one matrix, or in three; a ResNet-18 for images of 32 × 32."""
GPT_SIZES = (12, 768, 12, 50304, 1024, 8), (2, 32, 4, 97, 16, 3)
"""Depth, width, heads, vocabulary (a multiple of 64, as people pad it), length, examples of a batch; and tiny ones."""
RESNET_SIZES = (64, 100, 32, 512, 4), (4, 10, 8, 16, 2)
"""Width, classes, side, examples of a batch, stages."""


def task(name: str, device: str, tiny: bool, data: str, batches: int) -> Task:
    """By a name of `MODELS`; `data` of GPTs: "markov", or "text" for tiny Shakespeare."""
    if name == "resnet":
        width, classes, side, examples, stages = RESNET_SIZES[tiny]
        source = Textures(classes, side, examples, device)
        return Task(name, lambda: _channels_last(ResNet(width, classes, stages)), source, device)
    depth, width, heads, vocabulary, length, examples = GPT_SIZES[tiny]
    if data == "text":
        vocabulary = max(vocabulary, 256)
        source = Bytes(_shakespeare(), length, examples, device)
    else:
        source = Markov(vocabulary, length, examples, batches, device)
    rest = ("tokens", "positions", "head")
    return Task(name, lambda: GPT(depth, width, heads, vocabulary, length, name == "split"), source, device, rest)


def _channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _shakespeare() -> bytes:
    path = Path(os.environ.get("LAYERWISE_DATA", "")) / "text" / "tinyshakespeare.txt"
    if not path.is_file():
        raise SystemExit("no text/tinyshakespeare.txt in the folder that LAYERWISE_DATA names")
    return path.read_bytes()
