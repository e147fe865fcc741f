"""The tasks of `defaults.py`: a model, batches, a loss, and what is measured at the end.

Each has a size for a CPU (seconds to a minute) and one for a GPU (`full`). Images are the first of MNIST and CIFAR-10,
text is tiny Shakespeare by character. Runs end before the data are learnt by heart: after 20 passes over the text the
held-out loss of a 6×384 GPT rises again, and a better optimizer looks worse. The final loss is that of the model in
eval mode on examples that are the same for everyone: held-out text, or a part of the images that were trained on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from defaults_models import CharacterGPT, MixtureGPT, autoencoder, convolutions, digits_mlp, resnet18
from torch import Tensor, nn

from layerwise import data
from layerwise.data.folder import root

Batch = tuple[Tensor, Tensor]


class TaskError(Exception):
    """Why a task cannot be run here."""


@dataclass
class Data:
    """Images as bytes and text as characters, read once; kept in a file if one is named."""

    keep: Path | None = None
    _arrays: dict[str, Any] = field(default_factory=dict)

    def images(self, name: str, count: int) -> Batch:
        """The first `count` of "mnist", "cifar10" or "digits": pixels from 0 to 1, and labels."""
        pixels, labels = self._kept(f"{name}-{count}", lambda: self._read_images(name, count))
        return pixels.float().div_(255), labels

    def text(self) -> Tensor:
        """Tiny Shakespeare as numbers from 0 to 64."""
        return self._kept("text", self._read_text)

    def _kept(self, name: str, read: Callable[[], Any]) -> Any:
        if self.keep is not None and not self._arrays and self.keep.is_file():
            self._arrays = torch.load(self.keep, weights_only=True)
        if name not in self._arrays:
            self._arrays[name] = read()
            if self.keep is not None:
                torch.save(self._arrays, self.keep)
        return self._arrays[name]

    @staticmethod
    def _read_images(name: str, count: int) -> Batch:
        x, y = data.digits(count) if name == "digits" else getattr(data, name)("train", limit=count)
        return (x * 255).round().to(torch.uint8), y

    @staticmethod
    def _read_text() -> Tensor:
        path = root() / "text" / "tinyshakespeare.txt"
        if not path.is_file():
            raise TaskError("no text/tinyshakespeare.txt in the folder that LAYERWISE_DATA names")
        text = path.read_text(encoding="utf-8")
        place = {letter: number for number, letter in enumerate(sorted(set(text)))}
        return torch.tensor([place[letter] for letter in text], dtype=torch.uint8)


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and how long."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    batch: Callable[[torch.Generator], Batch]
    held: Callable[[], list[Batch]]
    """Examples of the final loss."""
    steps: int
    cosine: bool = False
    """Whether the rate is warmed up over a twentieth of the steps and falls to a tenth; else it is constant."""

    def rate(self, step: int) -> float:
        """The schedule's factor at a step, from 0."""
        if not self.cosine:
            return 1.0
        warm = max(1, self.steps // 20)
        if step < warm:
            return (step + 1) / warm
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))

    @torch.no_grad()
    def final(self, model: nn.Module) -> float:
        """The mean loss over the held examples."""
        model.eval()
        losses = [float(self.loss(model, x, y)) for x, y in self.held()]
        return sum(losses) / len(losses)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of classes, or of tokens on average."""
    f = model(x)
    return F.cross_entropy(f.flatten(0, -2), y.flatten())


def hugging_face(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Logits of a causal language model; targets are shifted already."""
    return F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())


def reconstruction(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy, summed over pixels and averaged over images."""
    return F.binary_cross_entropy_with_logits(model(x), y, reduction="sum") / len(x)


def from_images(
    name: str,
    images: Batch,
    size: int,
    device: str,
    targets: Callable[[Batch], Batch] = lambda batch: batch,
    **how: Any,
) -> Task:
    """Batches drawn at random; the final loss is that of the first 1,000 images."""
    x, y = targets((images[0].to(device), images[1].to(device)))

    def batch(generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(x), (size,), generator=generator).to(device)
        return x[chosen], y[chosen]

    def held() -> list[Batch]:
        return list(zip(x[:1000].split(500), y[:1000].split(500), strict=True))

    return Task(name, batch=batch, held=held, **how)


def from_text(name: str, text: Tensor, size: int, length: int, device: str, **how: Any) -> Task:
    """Windows of the first nine tenths; the final loss is that of 20 batches of the rest."""
    data = text.to(device).long()
    cut = int(0.9 * len(data))

    def windows(part: Tensor, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(part) - length, (size, 1), generator=generator).to(device)
        window = part[starts + torch.arange(length + 1, device=device)]
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def held() -> list[Batch]:
        generator = torch.Generator().manual_seed(7)
        return [windows(data[cut:], generator) for _ in range(20)]

    return Task(name, batch=lambda generator: windows(data[:cut], generator), held=held, cosine=True, **how)


def transformers_model(kind: str, width: int, depth: int, length: int) -> Callable[[], nn.Module]:
    """A small GPT-2 or Llama of Hugging Face's, without dropout."""
    try:
        import transformers
    except ImportError:
        raise TaskError("transformers is not installed") from None
    heads = max(2, width // 32)
    if kind == "gpt2":
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(
            vocab_size=65, n_positions=length, n_embd=width, n_layer=depth, n_head=heads, **none
        )
        return lambda: transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=65,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        max_position_embeddings=length,
    )
    return lambda: transformers.LlamaForCausalLM(config)


def make(name: str, source: Data, device: str, full: bool, steps: int | None = None) -> Task:
    """A task by name; an error of this module says why it cannot be run."""
    length, width, depth = (256, 384, 6) if full else (64, 64, 2)
    text = {"size": 16, "length": length, "device": device}

    def last(on_cpu: int, on_gpu: int) -> int:
        return steps or (on_gpu if full else on_cpu)

    if name == "digits":
        images = source.images("digits", 1797)
        how = {"model": digits_mlp, "loss": cross_entropy, "steps": last(600, 1000)}
        return from_images(name, images, 64, device, lambda b: (b[0].flatten(1), b[1]), **how)
    if name == "autoencoder":
        images = source.images("mnist", 10000)
        widths = (784, 1000, 500, 250, 30) if full else (784, 200, 100, 50, 16)
        how = {"model": lambda: autoencoder(widths), "loss": reconstruction, "steps": last(300, 600)}
        return from_images(name, images, 128, device, lambda b: (b[0].flatten(1), b[0].flatten(1)), **how)
    if name == "cnn":
        images = source.images("mnist", 10000)
        model = (lambda: convolutions(32)) if full else (lambda: convolutions(8))
        return from_images(name, images, 64, device, model=model, loss=cross_entropy, steps=last(200, 600))
    if name == "resnet18":
        images = source.images("cifar10", 5000)
        model = (lambda: resnet18(64)) if full else (lambda: resnet18(8))
        how = {"model": model, "loss": cross_entropy, "steps": last(120, 200), "cosine": True}
        return from_images(name, images, 128 if full else 32, device, **how)
    if name in ("gpt", "experts"):
        kind = CharacterGPT if name == "gpt" else MixtureGPT
        how = {"model": lambda: kind(width, depth, length, 65), "loss": cross_entropy, "steps": last(300, 600)}
        return from_text(name, source.text(), **text, **how)
    if name in ("gpt2", "llama"):
        model = transformers_model(name, width, depth, length)
        return from_text(name, source.text(), **text, model=model, loss=hugging_face, steps=last(300, 600))
    raise TaskError("no such task")


TASKS = ("digits", "autoencoder", "cnn", "resnet18", "gpt", "gpt2", "llama", "experts")
