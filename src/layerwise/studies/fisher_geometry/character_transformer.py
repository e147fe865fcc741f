"""A small transformer that predicts the next character of tiny Shakespeare, at some points of its training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from layerwise.data.folder import VARIABLE, MissingDataError
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream
from layerwise.studies.fisher_geometry.quality import Batch, Snapshot, along, seeded

FILE = "text/tinyshakespeare.txt"


def text() -> str:
    """Tiny Shakespeare, from the folder that the environment variable LAYERWISE_DATA names."""
    folder = os.environ.get(VARIABLE)
    path = Path(folder or ".").expanduser() / FILE
    if not folder or not path.is_file():
        given = f"{VARIABLE}={folder}, without {FILE}" if folder else f"no folder for {FILE}: {VARIABLE} is not set"
        raise MissingDataError(
            describe(given, f"a folder with {FILE} in it", f"type: export {VARIABLE}=/path/to/data, and put it there")
        )
    return path.read_text(encoding="utf-8")


class Block(nn.Module):
    """Causal attention and a perceptron of four times the width, each behind a layer norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class CharacterTransformer(nn.Module):
    """Embeddings of characters and positions, blocks, a layer norm and a linear layer; logits ``[N, T, letters]``."""

    def __init__(self, letters: int, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the character that follows each."""
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)  # by example, so that layers have a rule
        return self.head(self.norm(self.blocks(self.characters(x) + self.positions(places))))


@dataclass(frozen=True, kw_only=True)
class Characters:
    """The transformer and its training, by Adam."""

    width: int = 16
    heads: int = 2
    depth: int = 1
    length: int = 16
    """Characters of a window: one example."""
    lr: float = 3e-3
    batch: int = 32

    def __post_init__(self) -> None:
        if self.width % self.heads:
            given = f"width={self.width} and heads={self.heads}"
            raise InputError(describe(given, "a width that is a multiple of the heads", "change one of them"))

    def snapshots(self, steps: Sequence[int], examples: int, seed: int, device: str = "cpu") -> Iterator[Snapshot]:
        """The network after each of `steps`; its Fisher matrix is of `examples` windows that are the same for all."""
        written = text()
        number = {letter: index for index, letter in enumerate(sorted(set(written)))}
        windows = torch.tensor([number[letter] for letter in written], device=device).unfold(0, self.length + 1, 1)
        with seeded(seed, "transformer"):
            model = CharacterTransformer(len(number), self.width, self.heads, self.depth, self.length).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr)
        generator = stream(seed, "transformer", "batches")

        def draw(count: int = self.batch, generator: torch.Generator = generator) -> Batch:
            chosen = windows[torch.randint(len(windows), (count,), generator=generator).to(device)]
            return chosen[:, :-1], chosen[:, 1:]

        yield from along(model, optimizer, draw, steps, draw(examples, stream(0, "transformer", "examples")))
