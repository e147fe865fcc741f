"""A small transformer that predicts characters, for a look at its layers' Gauss–Newton matrices."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.foundations.random import stream
from layerwise.studies.fisher_geometry.character_transformer import CharacterTransformer, text
from layerwise.studies.fisher_geometry.quality import along, seeded
from layerwise.studies.hessian_structure.measures import Layer, measure

TEXTS = ("shakespeare", "python")
LEADING = 10
"""Eigenvectors of each layer that are compared: characters are too many classes for their c − 1."""


@dataclass(frozen=True, kw_only=True)
class Characters:
    """The transformer and its training, by Adam."""

    text: str = "shakespeare"
    """"shakespeare" (in the folder that LAYERWISE_DATA names), or "python": the source of Python's argparse."""
    width: int = 16
    heads: int = 2
    depth: int = 1
    length: int = 8
    """Characters of a window: one example."""
    lr: float = 3e-3
    batch: int = 32
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.text not in TEXTS:
            raise NameLookupError(unknown("text", self.text, TEXTS))
        if self.width % self.heads:
            given = f"width={self.width} and heads={self.heads}"
            raise InputError(describe(given, "a width that is a multiple of the heads", "change one of them"))

    def windows(self) -> tuple[Tensor, int]:
        """All windows of one character more than an example has, and how many characters there are."""
        written = text() if self.text == "shakespeare" else inspect.getsource(argparse)
        number = {letter: index for index, letter in enumerate(sorted(set(written)))}
        numbers = torch.tensor([number[letter] for letter in written], device=self.device)
        return numbers.unfold(0, self.length + 1, 1), len(number)

    def layers(self) -> list[str]:
        """Linear layers, from the input on."""
        names = ("qkv", "projection", "up", "down")
        return [*(f"blocks.{k}.{name}" for k in range(self.depth) for name in names), "head"]

    def measured(self, steps: Sequence[int], examples: int, seed: int) -> Iterator[tuple[int, float, dict[str, Layer]]]:
        """After each of `steps`: the loss and the measures of all layers on windows that are the same for all."""
        windows, letters = self.windows()
        with seeded(seed, "transformer"):
            model: nn.Module = CharacterTransformer(letters, self.width, self.heads, self.depth, self.length)
        model = model.to(self.device)
        generator = stream(seed, "transformer", "batches")

        def draw(count: int = self.batch, generator: torch.Generator = generator) -> tuple[Tensor, Tensor]:
            chosen = windows[torch.randint(len(windows), (count,), generator=generator).to(self.device)]
            return chosen[:, :-1], chosen[:, 1:]

        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr)
        batch = draw(examples, stream(0, "transformer", "examples"))
        for snapshot in along(model, optimizer, draw, steps, batch):
            found = {
                name: measure(model, batch, name, classes=LEADING + 1, leading=3 * LEADING, gauss_newton=True)
                for name in self.layers()
            }
            yield snapshot.step, snapshot.loss(), found
