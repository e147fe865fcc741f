"""Words to train on: WikiText-2 from the data folder, or text that is made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerwise.data.folder import MissingDataError, root
from layerwise.foundations.errors import describe
from layerwise.foundations.random import stream

UNKNOWN = "<unk>"
FILES = {"train": "text/wikitext2-valid.txt", "test": "text/wikitext2-test.txt"}
"""The validation part is trained on: it is large enough for a small model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """Words as numbers."""

    train: Tensor
    test: Tensor
    words: int

    @property
    def unknown(self) -> float:
        """The share of test words that are not in the vocabulary."""
        return float((self.test == 0).double().mean())


def read(part: str) -> str:
    """A part of WikiText-2, from the folder that the environment variable LAYERWISE_DATA names."""
    path = root() / FILES[part]
    if not path.is_file():
        do = "put wikitext2-valid.txt and wikitext2-test.txt (the version with <unk>) there, or pass --text made-up"
        raise MissingDataError(describe(f"no {FILES[part]} in {root()}", "WikiText-2 as plain text", do))
    return path.read_text(encoding="utf-8")


def wikitext(vocabulary: int) -> Text:
    """Words between spaces; the most frequent of the training text, all others are <unk>."""
    train, test = (read(part).split() for part in ("train", "test"))
    frequent = [word for word, _ in Counter(train).most_common(vocabulary + 1) if word != UNKNOWN][: vocabulary - 1]
    number = {word: place for place, word in enumerate([UNKNOWN, *frequent])}

    def numbered(words: Sequence[str]) -> Tensor:
        return torch.tensor([number.get(word, 0) for word in words])

    return Text(train=numbered(train), test=numbered(test), words=len(number))


def made_up(vocabulary: int, length: int, seed: int, topics: int = 8) -> Text:
    """Words with Zipf's frequencies from one of several topics, each of which prefers words of its own.

    The topic stays for some 25 words, so that the words before say what may follow.
    """
    generator = stream(seed, "anchor-vectors", "made-up text")
    rank = torch.arange(1, vocabulary + 1).double().log()
    preferred = 2.0 * torch.randn(topics, vocabulary, generator=generator, dtype=torch.float64)
    p = torch.softmax(preferred - rank, dim=1)
    total = 2 * length
    changes = torch.rand(total, generator=generator) < 0.04
    drawn = torch.randint(topics, (total,), generator=generator)
    last = torch.where(changes, torch.arange(total), 0).cummax(0).values
    topic = drawn[last]
    words = torch.empty(total, dtype=torch.long)
    for each in range(topics):
        here = topic == each
        words[here] = torch.multinomial(p[each], int(here.sum()), replacement=True, generator=generator)
    return Text(train=words[:length], test=words[length:], words=vocabulary)
