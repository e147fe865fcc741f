"""The training data: in batches of a new order every epoch, and in one order for what is measured on all of it."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream
from layerwise.foundations.types import Tree, leaves, map_leaves
from layerwise.layers.capture.source import as_batch, is_batch, usable

AT_ONCE = 10_000
"""Examples of a batch that is only measured."""
Labels = Int[Tensor, "N"]


def outputs(model: nn.Module, params: Mapping[str, Tensor], x: Tree) -> Tensor:
    """What the model answers with these parameters in the place of its own."""
    named = dict(x) if isinstance(x, Mapping) else {}
    plain = () if isinstance(x, Mapping) else tuple(x) if isinstance(x, tuple | list) else (x,)
    f = functional_call(model, dict(params), plain, named)
    if not isinstance(f, Tensor):
        given = f"a model that returns a {type(f).__name__}"
        raise InputError(describe(given, "one tensor of scores, [N, C]", "wrap it in a module that returns these"))
    return f


class Examples:
    """A pair ``(x, y)`` of all training data, or an iterable of batches that can be gone through again and again."""

    def __init__(self, data: Any, batch_size: int, seed: int, device: torch.device) -> None:
        self.seed, self.device, self.batch_size = seed, device, batch_size
        self.whole = is_batch(data)
        if not self.whole and (not isinstance(data, Iterable) or iter(data) is data):
            given = f"data of type {type(data).__name__}"
            expected = "(x, y), or batches that can be gone through more than once"
            raise InputError(describe(given, expected, "make it a list or a DataLoader"))
        self._loader = [] if self.whole else data
        self._pair: tuple[Tree, Labels] = (
            self._moved(data, 0) if self.whole else (torch.empty(0), torch.empty(0).long())
        )
        self.count = sum(len(y) for _, y in self.in_order())
        if self.count < 2:
            raise InputError(describe(f"{self.count} examples", "two or more", "give the training data"))
        if not self.whole and _repeats(data, self.count):
            given = f"batches that repeat examples, {self.count} in all"
            raise InputError(describe(given, "each example once: the bound counts them", "take each of them once"))

    def _moved(self, item: Any, number: int) -> tuple[Tree, Labels]:
        batch = as_batch(item, number)
        x, y = batch.x, batch.y
        if batch.mask is not None:
            given = "a batch (x, y, mask)"
            raise InputError(describe(given, "(x, y), all of whose examples count", "pass x[mask] and y[mask]"))
        if not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point() or y.is_complex():
            what = "none" if y is None else f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else repr(y)
            raise InputError(describe(f"labels: {what}", "one class index an example, [N]", "pass integer labels"))
        if any(len(leaf) != len(y) for leaf in leaves(x)):
            sizes = ", ".join(str(len(leaf)) for leaf in leaves(x))
            raise InputError(describe(f"{sizes} inputs and {len(y)} labels", "as many of both", "check the data"))
        return map_leaves(lambda t: usable(t).to(self.device), x), usable(y).to(self.device).long()

    def _batches(self) -> Iterator[tuple[Tree, Labels]]:
        for number, item in enumerate(self._loader):
            yield self._moved(item, number)

    def in_order(self, at_once: int = AT_ONCE) -> Iterator[tuple[Tree, Labels]]:
        """All examples, always in the same order; those of a whole data set in large batches."""
        if not self.whole:
            yield from self._batches()
            return
        x, y = self._pair
        for start in range(0, len(y), at_once):
            stop = start + at_once
            yield map_leaves(lambda t, a=start, b=stop: t[a:b], x), y[start:stop]

    def shuffled(self, epoch: int) -> Iterator[tuple[Tree, Labels]]:
        """The batches of an epoch, which depend on the seed and its number alone; a loader orders its own."""
        if not self.whole:
            yield from self._batches()
            return
        x, y = self._pair
        order = torch.randperm(len(y), generator=stream(self.seed, "order", epoch)).to(self.device)
        x, y = map_leaves(lambda t: t[order], x), y[order]  # moved once: a slice of it costs nothing
        for start in range(0, len(y), self.batch_size):
            stop = start + self.batch_size
            yield map_leaves(lambda t, a=start, b=stop: t[a:b], x), y[start:stop]

    def fingerprint(self) -> str:
        """Of all bytes of all examples; their order counts where it decides the batches, which a loader may shuffle."""
        ordered, added = hashlib.sha256(), 0
        for x, y in self.in_order():
            rows = [t.cpu().reshape(len(y), -1).contiguous().view(torch.uint8) for t in (*leaves(x), y) if t.numel()]
            for row in torch.cat(rows, 1).numpy() if rows else ():
                if self.whole:
                    ordered.update(row)
                else:
                    added += int.from_bytes(hashlib.sha256(row).digest(), "big")
        return ordered.hexdigest() if self.whole else f"{added % 2**256:x}"

    def drawn(self, n: int, generator: torch.Generator) -> tuple[Tree, Labels]:
        """n examples with replacement, of a whole data set."""
        x, y = self._pair
        chosen = torch.randint(len(y), (n,), generator=generator, device=self.device)
        return map_leaves(lambda t: t[chosen], x), y[chosen]


def _repeats(data: Any, count: int) -> bool:
    """Whether batches are seen to hold an example twice, without a look at their contents."""
    if isinstance(data, list | tuple):
        batches = [as_batch(item, number) for number, item in enumerate(data)]
        places = {tuple(t.data_ptr() for t in (*leaves(b.x), *leaves(b.y))) for b in batches}
        return len(places) < len(data)
    if not isinstance(data, DataLoader) or data.batch_sampler is None:  # then its items are batches
        return False
    samplers = (data.sampler, getattr(data.batch_sampler, "sampler", None))
    if any(getattr(sampler, "replacement", False) for sampler in samplers):
        return True
    with suppress(TypeError, NotImplementedError):  # a data set without a size
        return count > len(data.dataset)  # type: ignore[arg-type]
    return False


def check_labels(f: Tensor, y: Labels) -> None:
    """One row of scores an example, and a label for one of its columns."""
    if f.ndim != 2 or f.shape[0] != len(y) or f.shape[1] < 2:
        given = f"a model whose output for {len(y)} examples has the shape {tuple(f.shape)}"
        raise InputError(describe(given, "[N, C] with two classes or more", "let the model give one score a class"))
    if bool(((y < 0) | (y >= f.shape[1])).any()):
        given = f"labels from {int(y.min())} to {int(y.max())} for {f.shape[1]} classes"
        raise InputError(describe(given, f"labels from 0 to {f.shape[1] - 1}", "number the classes from 0"))
