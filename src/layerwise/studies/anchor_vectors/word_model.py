"""A small transformer that predicts the next word, with one matrix for its input and output embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import seed_of, stream
from layerwise.studies.anchor_vectors.text import Text
from layerwise.studies.fisher_geometry.character_transformer import Block


class WordModel(nn.Module):
    """Embeddings of words and positions, blocks, a layer norm, and the words' embeddings again; no output bias."""

    def __init__(self, words: int, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the word that follows each: ``[N, T, words]``."""
        at = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.words(x) + self.positions(at))))


@dataclass(frozen=True, kw_only=True)
class Training:
    """AdamW with a warm-up and a cosine."""

    width: int = 128
    heads: int = 4
    depth: int = 2
    length: int = 64
    """Words of a window."""
    steps: int = 500
    batch: int = 16
    lr: float | int = 2e-3
    decay: float | int = 0.01
    warm_up: int = 30

    def __post_init__(self) -> None:
        if self.width % self.heads:
            given = f"width={self.width} and heads={self.heads}"
            raise InputError(describe(given, "a width that is a multiple of the heads", "change one of them"))

    def start(self, words: int, seed: int) -> WordModel:
        """The network before its training."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(stream(seed, "anchor-vectors", "start")))
            return WordModel(words, self.width, self.heads, self.depth, self.length)

    def train(self, text: Text, seed: int, device: str = "cpu") -> WordModel:
        """The network after it."""
        model = self.start(text.words, seed).to(device)
        windows = text.train.unfold(0, self.length + 1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=self.decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        generator = stream(seed, "anchor-vectors", "batches")
        for _ in range(self.steps):
            drawn = windows[torch.randint(len(windows), (self.batch,), generator=generator)].to(device)
            logits = model(drawn[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), drawn[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        return model.eval()

    def _rate(self, step: int) -> float:
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))
