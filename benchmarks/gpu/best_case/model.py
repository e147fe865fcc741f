"""What is not quite trained: a GPT on one batch of random tokens."""

import contextlib
import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from models import GPT
from torch import Tensor, nn

from gpu.marks import Marks, synchronize

SIZES = {"gpt": (12, 768, 12, 50257, 1024, 8), "tiny": (2, 32, 4, 97, 16, 3)}
"""Depth, width, heads, vocabulary, length and examples of a batch."""
REST = {name: {"update": "fallback"} for name in ("tokens", "positions", "head")}
"""Embeddings and head: not hidden matrices, so they get the fallback."""


@dataclass(frozen=True)
class Task:
    """A model that nobody has hooked into, and its batch; optimizers get copies."""

    model: GPT
    x: Tensor
    y: Tensor
    device: str

    @classmethod
    def make(cls, size: str, device: str) -> "Task":
        depth, width, heads, vocabulary, length, examples = SIZES[size]
        torch.manual_seed(0)
        with torch.device(device):
            model = GPT(depth, width, heads, vocabulary, length).train()
            x, y = (torch.randint(vocabulary, (examples, length)) for _ in range(2))
        return cls(model, x, y, device)

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def copy(self) -> GPT:
        return copy.deepcopy(self.model)

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast("cuda", torch.bfloat16) if self.cuda else contextlib.nullcontext()

    def loss(self, model: nn.Module) -> Tensor:
        """A mean over tokens, under autocast on a GPU."""
        with self.autocast():
            return F.cross_entropy(model(self.x).flatten(0, 1), self.y.flatten())

    def layers(self) -> dict[str, nn.Linear]:
        """The layers with hidden matrices."""
        return {name: m for name, m in self.model.named_modules() if isinstance(m, nn.Linear) and name != "head"}

    def synchronize(self) -> None:
        synchronize(self.device)


def hidden(model: nn.Module, biases: bool = False) -> list[nn.Parameter]:
    """Hidden matrices (and the biases of their layers)."""
    found = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "head"]
    return [p for m in found for name, p in m.named_parameters() if biases or name == "weight"]


def without(model: nn.Module, left_out: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """All other parameters."""
    known = {id(p) for p in left_out}
    return [p for p in model.parameters() if id(p) not in known]


@dataclass(frozen=True)
class Iteration:
    """Milliseconds of one iteration and of its parts."""

    forward: float
    backward: float
    step: float

    @property
    def whole(self) -> float:
        return self.forward + self.backward + self.step


class Optimizing(Protocol):
    """What an iteration asks of an optimizer."""

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...


def iterate(task: Task, model: nn.Module, opt: Optimizing | None, count: int, marks: Marks) -> None:
    """Whole iterations, one after the other: three marks each, after one at the start."""
    zero_grad = model.zero_grad if opt is None else opt.zero_grad
    marks.mark()
    for _ in range(count):
        zero_grad()
        loss = task.loss(model)
        marks.mark()
        loss.backward()
        marks.mark()
        if opt is not None:
            opt.step()
        marks.mark()


def iterations(marks: Marks) -> list[Iteration]:
    """What the marks of one call of `iterate` say."""
    found = marks.milliseconds()
    return [Iteration(*found[i : i + 3]) for i in range(0, len(found), 3)]
