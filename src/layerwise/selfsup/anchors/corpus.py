"""The corpus: text, token ids or batches, in windows so that every position is counted once."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerwise.foundations.errors import InputError, describe

TOKENS = 1024
"""Tokens in a forward pass, where windows are short."""


def token_ids(corpus: Any, tokenizer: Any, vocabulary: int, longest: int | None = None) -> Tensor | None:
    """The corpus as ids, ``[N]`` or windows ``[W, T]``; None if it is batches that the model takes as they are."""
    if isinstance(corpus, Mapping):
        ids = corpus.get("input_ids")  # a tokenizer's: of one text, or of several
        one = ids.dim() == 1 if isinstance(ids, Tensor) else bool(ids) and isinstance(ids[0], int)
        corpus = ids if one else corpus
    if isinstance(corpus, os.PathLike):
        corpus = Path(corpus).read_text(encoding="utf-8")
    if isinstance(corpus, Tensor):
        ids = corpus
    elif isinstance(corpus, str) or (isinstance(corpus, Sequence) and corpus and isinstance(corpus[0], str)):
        texts = [corpus] if isinstance(corpus, str) else list(corpus)
        ids = torch.cat([_tokenized(text, tokenizer, vocabulary) for text in texts])
        if not ids.numel():
            given = f"text of which the tokenizer made no tokens (it has {_size(tokenizer)})"
            raise InputError(describe(given, "tokens", "give more text, or pass the model's own tokenizer="))
    elif isinstance(corpus, np.ndarray):
        ids = torch.as_tensor(corpus.astype(np.int64) if corpus.dtype.kind in "iu" else corpus)
    elif isinstance(corpus, Sequence) and corpus and _is_row(corpus[0]):
        ids = _rows(corpus)
    else:
        return None
    if ids.dim() not in (1, 2) or ids.is_floating_point() or not ids.numel():
        given = f"a corpus of shape {tuple(ids.shape)} and type {ids.dtype}"
        raise InputError(describe(given, "token ids [N], or windows of them [W, T]", "give text, or such a tensor"))
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        given = f"token ids from {low} to {high} for an embedding of {vocabulary} rows"
        raise InputError(
            describe(given, f"ids from 0 to {vocabulary - 1}", "take the tokenizer that the model was trained with")
        )
    if ids.dim() == 2:
        _refuse_length(ids.shape[1], longest)
    return ids


def _is_row(part: Any) -> bool:
    """Whether a sequence of such parts is token ids: numbers, or rows of them."""
    if isinstance(part, Tensor | np.ndarray):
        return part.ndim <= 1
    return isinstance(part, Integral) or (isinstance(part, list | tuple) and bool(part) and isinstance(part[0], int))


def _rows(rows: Any) -> Tensor:
    if isinstance(rows, Tensor) or isinstance(rows[0], Integral):
        return torch.as_tensor(rows)
    found = [torch.as_tensor(row) for row in rows]
    sizes = [row.numel() for row in found]
    if min(sizes) != max(sizes):
        given = f"rows of {min(sizes)} to {max(sizes)} token ids"
        raise InputError(describe(given, "windows of one length, or one long row", "join them, or pad them and mask"))
    return torch.stack(found)


def _refuse_length(length: int, longest: int | None) -> None:
    if longest is not None and length > longest:
        given = f"windows of {length} tokens for a model with a context of {longest}"
        raise InputError(describe(given, f"at most {longest}", "give one long row of ids, which is cut here"))


def _size(tokenizer: Any) -> int:
    return len(tokenizer) if hasattr(tokenizer, "__len__") else 0


def _tokenized(text: str, tokenizer: Any, vocabulary: int) -> Tensor:
    if tokenizer is None:
        given = "text without a tokenizer"
        raise InputError(describe(given, "a tokenizer, or token ids", "pass tokenizer=, such as AutoTokenizer's"))
    size = _size(tokenizer)
    if size > vocabulary:
        given = f"a tokenizer of {size} tokens for an embedding of {vocabulary} rows"
        raise InputError(
            describe(given, "a tokenizer that fits the model", "take the one that the model was trained with")
        )
    if hasattr(tokenizer, "save_pretrained"):  # of Hugging Face: told not to speak of long texts, which are cut here
        found = tokenizer(text, verbose=False)["input_ids"]
    else:
        found = tokenizer.encode(text) if hasattr(tokenizer, "encode") else tokenizer(text)
    return torch.as_tensor(list(getattr(found, "ids", found)), dtype=torch.long)


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """Something to call the model with, and which of its positions count."""

    batch: Any
    first: int = 0
    """Positions before it were counted in an earlier window."""
    following: Tensor | None = None
    """The token after each position that counts, −1 where there is none."""


def windows(ids: Tensor, length: int, stride: int | None, positions: int) -> Iterator[Window]:
    """Windows of text, so that every position is counted once; after the first, with what precedes it as context.

    >>> [w.batch.tolist()[0][w.first:] for w in windows(torch.arange(7), length=4, stride=2, positions=7)]
    [[0, 1, 2, 3], [4, 5], [6]]
    """
    if ids.dim() == 2:
        rows = ids[: -(-positions // ids.shape[1])]
        for part in rows.split(max(1, TOKENS // ids.shape[1])):
            ends = part.new_full((len(part), 1), -1)
            yield Window(batch=part, following=torch.cat([part[:, 1:], ends], dim=1).flatten())
        return
    stride = stride or (512 if length > 512 else length)
    if not 1 <= stride <= length:
        given = f"stride={stride} and windows of {length} tokens"
        raise InputError(describe(given, "1 ≤ stride ≤ the window", "leave both out"))
    following = torch.cat([ids[1:], ids.new_tensor([-1])])
    end, counted = 0, min(len(ids), positions)
    while end < counted:
        begin, last = end, min(end + (length if end == 0 else stride), counted)
        start = max(0, last - length)
        yield Window(batch=ids[None, start:last], first=begin - start, following=following[begin:last])
        end = last


def batches(corpus: Any, vocabulary: int, longest: int | None = None) -> Iterator[Window]:
    """Batches that the model takes as they are: tensors, tuples or mappings; one mapping is one batch."""
    if isinstance(corpus, Mapping):
        corpus = [{name: _rows(part) for name, part in corpus.items()}]
    try:
        for batch in corpus:
            first = next(iter(batch), None) if isinstance(batch, tuple | list) else batch
            ids = batch.get("input_ids") if isinstance(batch, Mapping) else first
            if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
                token_ids(ids, None, vocabulary, longest)
            yield Window(batch=batch)
    except TypeError as error:
        given = f"a corpus of type {type(corpus).__name__}"
        raise InputError(describe(given, "text, token ids, or batches for the model", "pass one of them")) from error
