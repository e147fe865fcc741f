"""A character GPT with dropout, and tiny Shakespeare on the device that trains it."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """Of the model, of a batch and of a run."""

    depth: int = 6
    width: int = 384
    heads: int = 6
    length: int = 256
    batch: int = 64
    steps: int = 1500
    warm_up: int = 100
    evaluate_every: int = 50
    dropout: float = 0.2


TINY = Size(2, 32, 4, 16, 8, steps=30, warm_up=5, evaluate_every=10)
SAMPLE = "Shall I compare thee to a summer's day? Thou art more lovely and more temperate. " * 40
"""For --tiny, where no data is at hand."""


class Block(nn.Module):
    """Pre-norm causal attention and a GELU perceptron of four times the width, with dropout as in nanoGPT."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads, self.dropout = size.heads, size.dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        N, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(N, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + self.drop(self.projection(attended.transpose(1, 2).reshape(N, T, D)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class CharacterGPT(nn.Module):
    """Learned positions, biases, an untied head; outputs [N, T, V]. Weights as in GPT-2: N(0, 0.02²)."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.drop = nn.Dropout(size.dropout)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.depth)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif "norm" not in name:
                into_stream = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(p, 0.0, 0.02 / math.sqrt(2 * size.depth) if into_stream else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(self.drop(h))))


class Text:
    """Characters as numbers: nine tenths to train on, the rest to validate."""

    def __init__(self, text: str, size: Size, device: str) -> None:
        letters = sorted(set(text))
        place = {letter: number for number, letter in enumerate(letters)}
        data = torch.tensor([place[letter] for letter in text], device=device)
        cut = int(0.9 * len(data))
        self.train, self.validation = data[:cut], data[cut:]
        self.vocabulary, self.size, self.device = len(letters), size, device
        self._window = torch.arange(size.length + 1, device=device)

    @classmethod
    def load(cls, size: Size, device: str, tiny: bool = False) -> "Text":
        """From the folder LAYERWISE_DATA; a `tiny` run does with a sample where there is none."""
        path = Path(os.environ.get("LAYERWISE_DATA", "")) / "text" / "tinyshakespeare.txt"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), size, device)
        if tiny:
            return cls(SAMPLE, size, device)
        raise SystemExit(
            "no text/tinyshakespeare.txt in the folder that LAYERWISE_DATA names; set it: export LAYERWISE_DATA=…"
        )

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random windows to train on and the characters that follow; made on the device, waited for by nobody."""
        last = len(self.train) - self.size.length
        starts = torch.randint(last, (self.size.batch, 1), generator=generator, device=self.device)
        window = self.train[starts + self._window]
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def validation_batches(self) -> list[tuple[Tensor, Tensor]]:
        """All that is held out, once, in windows that do not overlap; the last batch may be smaller."""
        length = self.size.length
        whole = (len(self.validation) - 1) // length * length
        x, y = (part.view(-1, length) for part in (self.validation[:whole], self.validation[1 : whole + 1]))
        return list(zip(x.split(self.size.batch), y.split(self.size.batch), strict=True))


def cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    """A mean over tokens."""
    return F.cross_entropy(f.flatten(0, 1), y.flatten())
