"""The zoo: each model with two batches of other sizes, as a user of it has them, and a likelihood."""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo_images
from torch import Tensor, nn

IGNORED = -100
"""Label of a position that does not count."""


@dataclass(frozen=True)
class ZooBatch:
    """What the model is called with, its labels, and which arguments all examples share."""

    x: Any
    """One tensor, or arguments by name."""
    y: Tensor
    n: int
    shared: frozenset[str] = frozenset()
    causal: bool = False
    """Whether the model's own loss compares position t with label t + 1; `y` stands where the logits do."""

    def alone(self, example: int) -> Any:
        """One example's arguments."""
        if isinstance(self.x, Tensor):
            return self.x[example : example + 1]
        return {k: v if k in self.shared else v[example : example + 1] for k, v in self.x.items()}

    def all_counted(self, classes: int, generator: torch.Generator) -> "ZooBatch":
        """The same with a label at every position."""
        if self.y.is_floating_point():
            return self
        drawn = torch.randint(classes, self.y.shape, generator=generator)
        return replace(self, y=torch.where(self.y == IGNORED, drawn, self.y))

    def given(self) -> Any:
        """A batch as the library takes it: a pair, or one mapping with its labels, as the model's loss wants them.

        A label for the last position, which a causal model's loss has none for, needs a pair.
        """
        beyond = self.causal and bool((self.y[:, -1] != IGNORED).any())
        if isinstance(self.x, Tensor) or self.shared or beyond:
            return self.x, self.y
        return {**self.x, "labels": F.pad(self.y[:, :-1], (1, 0), value=IGNORED) if self.causal else self.y}


@dataclass(frozen=True)
class Entry:
    """A model of the zoo."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int, int], ZooBatch]
    """From a generator, N and a length or side."""
    sizes: tuple[tuple[int, int], ...]
    """N and length of each batch."""
    likelihood: str = "categorical"
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False
    """Whether `make test` runs it."""
    needs: str | None = None
    """A package that it is made with."""

    @property
    def is_installed(self) -> bool:
        """Whether the model can be made here."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """In eval mode; every parameter and running statistic has been moved from where it starts.

        Norms that start at one and biases at zero would hide errors. Embeddings are moved further: a norm divides by
        what little they start with, and float32 itself, in plain autograd, would be off by more than 1e-6.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build()
            with torch.no_grad():
                embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
                for p in model.parameters():
                    p.add_((0.3 if id(p) in embedded else 0.05) * torch.randn_like(p))
                for name, b in model.named_buffers():
                    if name.endswith("running_mean"):
                        b.add_(0.2 * torch.randn_like(b))
                    elif name.endswith("running_var"):
                        b.mul_(1 + 0.5 * torch.rand_like(b))
        return model.to(dtype).eval()

    def batches(self) -> list[ZooBatch]:
        """Of the sizes given, always the same."""
        return [self.batch(torch.Generator().manual_seed(7 + i), *size) for i, size in enumerate(self.sizes)]


def _padding(generator: torch.Generator, n: int, t: int) -> Tensor:
    """An attention mask: the first example whole, others with padding at their ends."""
    lengths = torch.randint(2, t + 1, (n,), generator=generator)
    lengths[0] = t
    return (torch.arange(t) < lengths.unsqueeze(1)).long()


def _tokens(generator: torch.Generator, n: int, t: int) -> Tensor:
    return torch.randint(3, 13, (n, t), generator=generator)


def _image(generator: torch.Generator, n: int, side: int, classes: int, name: str | None = None) -> ZooBatch:
    x = torch.randn(n, 3, side, side, generator=generator)
    y = torch.randint(classes, (n,), generator=generator)
    return ZooBatch(x if name is None else {name: x}, y, n)


def _causal(generator: torch.Generator, n: int, t: int) -> ZooBatch:
    """Next tokens by hand: labels already stand where their logits do."""
    ids, mask = _tokens(generator, n, t), _padding(generator, n, t)
    y = torch.cat([ids[:, 1:], torch.full((n, 1), IGNORED)], 1)
    kept = torch.cat([mask[:, 1:], torch.zeros(n, 1, dtype=torch.long)], 1)
    return ZooBatch({"input_ids": ids, "attention_mask": mask}, y.masked_fill(kept == 0, IGNORED), n, causal=True)


def _masked(generator: torch.Generator, n: int, t: int) -> ZooBatch:
    ids, mask = _tokens(generator, n, t), _padding(generator, n, t)
    hidden = (torch.rand(n, t, generator=generator) < 0.5) & (mask == 1)
    hidden[:, 0] = True
    x = {"input_ids": ids.masked_fill(hidden, 2), "attention_mask": mask, "token_type_ids": (ids > 8).long()}
    return ZooBatch(x, ids.masked_fill(~hidden, IGNORED), n)


def _classified(generator: torch.Generator, n: int, t: int) -> ZooBatch:
    x = {"input_ids": _tokens(generator, n, t), "attention_mask": _padding(generator, n, t)}
    return ZooBatch(x, torch.randint(3, (n,), generator=generator), n)


def _translated(generator: torch.Generator, n: int, t: int) -> ZooBatch:
    target = _tokens(generator, n, t - 1)
    kept = _padding(generator, n, t - 1)
    x = {
        "input_ids": _tokens(generator, n, t),
        "attention_mask": _padding(generator, n, t),
        "decoder_input_ids": torch.cat([torch.zeros(n, 1, dtype=torch.long), target[:, :-1]], 1),
    }
    return ZooBatch(x, target.masked_fill(kept == 0, IGNORED), n)


def _spoken(generator: torch.Generator, n: int, t: int) -> ZooBatch:
    target = _tokens(generator, n, t)
    x = {
        "input_features": torch.randn(n, 4, 12, generator=generator),
        "decoder_input_ids": torch.cat([torch.ones(n, 1, dtype=torch.long), target[:, :-1]], 1),
    }
    return ZooBatch(x, target.masked_fill(_padding(generator, n, t) == 0, IGNORED), n)


def _prompted(generator: torch.Generator, n: int, t: int) -> ZooBatch:
    """Zero-shot classification: every image against the same three texts."""
    texts = 3
    ids = _tokens(generator, texts, t)
    ids[:, -1] = 2  # the token whose state stands for the text
    x = {"pixel_values": torch.randn(n, 3, 8, 8, generator=generator), "input_ids": ids}
    return ZooBatch(x, torch.randint(texts, (n,), generator=generator), n, frozenset({"input_ids"}))


def _embedded(generator: torch.Generator, n: int, t: int) -> ZooBatch:
    ids, mask = _tokens(generator, n, t), _padding(generator, n, t)
    ids[torch.arange(n), mask.sum(1) - 1] = 2
    return ZooBatch({"input_ids": ids, "attention_mask": mask}, torch.randn(n, 6, generator=generator), n)


def _images() -> list[Entry]:
    def of(name: str, build: Callable[[], nn.Module]) -> Entry:
        return Entry(name, build, functools.partial(_image, classes=5), ((4, 12), (3, 16)))

    return [
        of("resnet", zoo_images.resnet),
        of("vgg", zoo_images.vgg),
        of("mobilenet", zoo_images.mobilenet),
        of("convnext", zoo_images.convnext),
    ]


def _hugging_face() -> list[Entry]:
    shown = functools.partial(_image, classes=4, name="pixel_values")
    ignoring = {"ignore_index": IGNORED, "class_axis": -1}

    def of(
        name: str,
        batch: Callable[[torch.Generator, int, int], ZooBatch],
        sizes: tuple[tuple[int, int], ...] = ((3, 5), (2, 7)),
        options: Mapping[str, Any] = ignoring,
        likelihood: str = "categorical",
        quick: bool = False,
    ) -> Entry:
        def build() -> nn.Module:
            import zoo_hugging_face  # only where transformers is installed

            return getattr(zoo_hugging_face, name.replace("-", "_"))()

        return Entry(name, build, batch, sizes, likelihood, options, quick, needs="transformers")

    return [
        of("gpt2", _causal),
        of("bert-masked", _masked, ((3, 5), (4, 4))),
        of("bert-classifier", _classified, ((4, 5), (3, 7)), {}, quick=True),
        of("llama", _causal),
        of("llama-tied", _causal),
        of("qwen3", _causal),
        of("mixtral", _causal),
        of("mamba", _causal, ((3, 5), (2, 6))),
        of("t5", _translated),
        of("whisper", _spoken, ((3, 5), (2, 4))),
        of("vit", shown, ((4, 8), (3, 8)), {}),
        of("clip", _prompted, ((4, 5), (2, 6), (3, 5)), {}),  # at last as many images as texts
        of("clip-text", _embedded, ((4, 5), (3, 7)), {}, "gaussian"),
    ]


ENTRIES = [*_images(), *_hugging_face()]


def entries(quick: bool = False) -> list[Any]:
    """As parameters of a test: all of them, slow, or the quick ones; what is not installed is skipped."""
    return [
        pytest.param(
            entry,
            id=entry.name,
            marks=[
                *([] if quick else [pytest.mark.slow]),
                pytest.mark.skipif(not entry.is_installed, reason=f"needs {entry.needs}: pip install 'layerwise[zoo]'"),
            ],
        )
        for entry in ENTRIES
        if entry.quick or not quick
    ]
