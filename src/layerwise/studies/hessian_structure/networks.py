"""Classifiers of small images, trained as section C.1 of Wu (2023) has it, for a look at their layer Hessians.

Fully connected networks of several seeds are trained as one stack. What is trained once is kept, so that experiments
about one training share it when they run in one process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from layerwise import data
from layerwise.foundations.errors import InputError, NameLookupError, NumericalError, describe, not_one_of, unknown
from layerwise.foundations.progress import Progress, Silent
from layerwise.foundations.random import stream
from layerwise.foundations.replay import Replayed
from layerwise.studies.training_regimes.stack import Stack, cross_entropy_gradient
from layerwise.training.stacked import StackedLinear, StackedNorm, stacked

CLASSES = 10
NETWORKS = {"digits": ("mlp",), "mnist": ("mlp",), "cifar10": ("mlp", "lenet5")}
"""By the images that they take."""
SIZES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
MOST = {"digits": 1797, "mnist": 60_000, "cifar10": 50_000}
"""Images that can be trained on."""
DIVISION = 0
"""The seed of the order in which images are taken, one for all networks, so that seeds differ in nothing else than
their weights and the order of their steps."""


class Split(NamedTuple):
    """Images to train on, and the others."""

    x: Float[Tensor, "N *pixels"]
    y: Int[Tensor, "N"]
    held_x: Float[Tensor, "M *pixels"]
    held_y: Int[Tensor, "M"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A network, its images, and its training by SGD."""

    images: str = "digits"
    """"digits" (8 × 8, with scikit-learn), "mnist" or "cifar10" (in the folder that LAYERWISE_DATA names)."""
    network: str = "mlp"
    """"mlp", or "lenet5" for CIFAR-10."""
    hidden: tuple[int, ...] = (20, 20)
    """Of "mlp"."""
    batch_norm: bool = False
    """After each ReLU, without weights of its own."""
    random_labels: bool = False
    """All labels of the training are drawn at random, by the seed."""
    centred: bool = True
    """Whether pixels of MNIST and CIFAR-10 have mean 0 and deviation 1; otherwise they are from 0 to 1, as the digits'
    always are."""
    trained_on: int = 1400
    lr: float | int = 0.05
    batch: int = 64
    epochs: int = 200
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.images not in NETWORKS:
            raise NameLookupError(unknown("images", self.images, NETWORKS))
        if self.network not in NETWORKS[self.images]:
            raise InputError(not_one_of("network", self.network, NETWORKS[self.images], where=f"for {self.images}"))
        if self.batch_norm and self.network != "mlp":
            raise InputError(describe(f"batch_norm=True for {self.network}", "batch norm of an mlp", "leave it away"))
        if not 1 <= self.trained_on <= MOST[self.images]:
            given = f"trained_on={self.trained_on} of {self.images}"
            raise InputError(describe(given, f"a number from 1 to {MOST[self.images]}", "take another number"))
        if not self.hidden or min(self.hidden) < 1:
            raise InputError(describe(f"hidden={self.hidden}", "positive widths", "take e.g. (20, 20)"))

    @property
    def dtype(self) -> torch.dtype:
        """In which networks are trained; measures are taken in float64."""
        return torch.float64 if self.images == "digits" else torch.float32

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers with weights, from the input on."""
        fully = tuple(f"fc{k + 1}" for k in range(3 if self.network == "lenet5" else len(self.hidden) + 1))
        return ("conv1", "conv2", *fully) if self.network == "lenet5" else fully

    def split(self, seed: int = 0) -> Split:
        """The same images for every seed; random labels are the seed's own."""
        found = _split(self.images, self.trained_on, self.network == "mlp", self.centred)
        if self.random_labels:
            labels = torch.randint(CLASSES, found.y.shape, generator=stream(seed, "labels"))
            found = found._replace(y=labels)
        moved = (part.to(self.device, self.dtype if part.is_floating_point() else None) for part in found)
        return Split(*moved)

    def model(self, seed: int) -> nn.Sequential:
        """Drawn anew: Xavier's normal weights, biases zero."""
        generator = stream(seed, "weights")
        found = _lenet5() if self.network == "lenet5" else _mlp(self.sizes, self.batch_norm)
        for module in found.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_normal_(module.weight, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        return found.to(self.device, self.dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Inputs, hidden units and classes of "mlp"."""
        channels, height, width = SIZES[self.images]
        return (channels * height * width, *self.hidden, CLASSES)


def _mlp(sizes: Sequence[int], batch_norm: bool) -> nn.Sequential:
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for k, (fan_in, fan_out) in enumerate(pairwise(sizes), 1):
        parts[f"fc{k}"] = nn.Linear(fan_in, fan_out)
        if k < len(sizes) - 1:
            parts[f"relu{k}"] = nn.ReLU()
            if batch_norm:
                parts[f"norm{k}"] = nn.BatchNorm1d(fan_out, affine=False)
    return nn.Sequential(parts)


def _lenet5() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 6, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            fc1=nn.Linear(400, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            fc3=nn.Linear(84, CLASSES),
        )
    )


@lru_cache(maxsize=2)  # decoding takes longer than some hundred steps
def _split(images: str, trained_on: int, flat: bool, centred: bool) -> Split:
    """Pixels are from 0 to 1; centred, each channel of MNIST and CIFAR-10 has mean 0 and deviation 1."""
    if images == "digits":
        x, y = data.digits()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(DIVISION))
        chosen, rest = order[:trained_on], order[trained_on:]
        found = Split(x[chosen], y[chosen], x[rest], y[rest])
    else:
        read = data.mnist if images == "mnist" else data.cifar10
        (x, y), (held_x, held_y) = read("train"), read("test")
        if centred:
            mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
            x, held_x = ((part - mean) / deviation for part in (x, held_x))
        found = Split(x[:trained_on], y[:trained_on], held_x, held_y)
    if flat:
        found = found._replace(x=found.x.flatten(1), held_x=found.held_x.flatten(1))
    return found


def check_present(images: str) -> None:
    """What is missing is said before anything is trained."""
    if images == "digits":
        data.digits(limit=1)
    elif images in NETWORKS:
        read = data.mnist if images == "mnist" else data.cifar10
        for part in ("train", "test"):
            read(part, limit=1, verify=False, progress=False)


_KEPT: dict[tuple[Task, int], nn.Sequential] = {}
KEPT = 64
"""Networks that are kept at most."""


def trained(task: Task, seeds: Sequence[int], progress: Progress | None = None) -> list[nn.Sequential]:
    """Networks after their training, one a seed, in eval mode; they are kept, so do not change them."""
    found = {seed: _KEPT[task, seed] for seed in seeds if (task, seed) in _KEPT}
    missing = [seed for seed in dict.fromkeys(seeds) if seed not in found]
    for group in [missing] if task.network == "mlp" else [[seed] for seed in missing]:
        if group:
            found |= dict(zip(group, _train(task, group, progress or Silent()), strict=True))
    for seed in missing:
        while len(_KEPT) >= KEPT:
            del _KEPT[next(iter(_KEPT))]
        _KEPT[task, seed] = found[seed]
    return [found[seed] for seed in seeds]


def _train(task: Task, seeds: Sequence[int], progress: Progress) -> list[nn.Sequential]:
    """SGD by passes over the data, each seed in orders of its own."""
    models, splits = [task.model(seed) for seed in seeds], [task.split(seed) for seed in seeds]
    x, y = splits[0].x, torch.stack([split.y for split in splits])
    generators = [stream(seed, "batches") for seed in seeds]

    which = torch.arange(len(seeds), device=x.device).unsqueeze(1)
    train = _by_hand if task.network == "mlp" and not task.batch_norm else _by_autograd
    with train(task, models) as step:
        replayed = Replayed(lambda chosen: step(x[chosen], y[which, chosen]))
        for _ in progress.track(range(task.epochs), f"training {task.network}", task.epochs):
            orders = torch.stack([torch.randperm(len(x), generator=generator) for generator in generators])
            for chosen in orders.to(x.device).split(task.batch, 1):
                replayed(chosen)
    if not all(bool(torch.isfinite(p).all()) for model in models for p in model.parameters()):
        given = f"a training at lr={task.lr} whose weights are not finite in the end"
        raise NumericalError(describe(given, "finite weights", "take a smaller lr"))
    return [model.eval() for model in models]


Step = Callable[[Float[Tensor, "seeds batch *pixels"], Int[Tensor, "seeds batch"]], None]


@contextmanager
def _by_hand(task: Task, models: Sequence[nn.Sequential]) -> Iterator[Step]:
    """A step of all networks; several times as fast as autograd for networks as small as these.

    When it is left, the networks have the new weights.
    """
    layers = [[part for part in model if isinstance(part, nn.Linear)] for model in models]
    with torch.no_grad():
        flat = [torch.cat([p.flatten() for part in parts for p in (part.weight.mT, part.bias)]) for parts in layers]
        stack = Stack(task.sizes, torch.stack(flat))
        rate = torch.full((len(models),), float(task.lr), dtype=task.dtype, device=task.device)

        def step(x: Tensor, y: Tensor) -> None:
            seen = stack.forward(x)
            stack.descend(rate, stack.gradient(seen, cross_entropy_gradient(seen[-1], y)))

        yield step
        for k, parts in enumerate(layers):
            for part, weight, bias in zip(parts, stack.parts[::2], stack.parts[1::2], strict=True):
                part.weight.copy_(weight[k].mT)
                part.bias.copy_(bias[k, 0])


@contextmanager
def _by_autograd(task: Task, models: Sequence[nn.Sequential]) -> Iterator[Step]:
    """The same for networks with batch norm, and for one with convolutions."""
    together = stacked(models) if task.network == "mlp" else models[0]
    optimizer = torch.optim.SGD(together.parameters(), lr=task.lr)
    together.train()

    def step(x: Tensor, y: Tensor) -> None:
        f = together(x.transpose(0, 1)).transpose(0, 1) if task.network == "mlp" else together(x[0])
        loss = nn.functional.cross_entropy(f.reshape(-1, CLASSES), y.flatten()) * len(models)  # a mean for each seed
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    yield step
    if task.network == "mlp":
        unstack(together, models)


@torch.no_grad()
def unstack(together: nn.Sequential, models: Sequence[nn.Sequential]) -> None:
    """Write the weights and statistics of a stack (`layerwise.training.stacked`) back to its networks."""
    for part, layers in zip(together, zip(*models, strict=True), strict=True):
        if isinstance(part, StackedLinear):
            for layer, weight in zip(layers, part.weight, strict=True):
                layer.weight.copy_(weight[:-1].mT)
                layer.bias.copy_(weight[-1])
        elif isinstance(part, StackedNorm):
            for name, value in part.norm.named_buffers():
                pieces = value.chunk(len(layers)) if value.ndim else [value] * len(layers)
                for layer, piece in zip(layers, pieces, strict=True):
                    layer.get_buffer(name).copy_(piece)


@torch.no_grad()
def fit(task: Task, model: nn.Module, seed: int) -> dict[str, float]:
    """Loss and accuracy of the training images, and the accuracy of the others."""
    split = task.split(seed)
    f, held = model(split.x), model(split.held_x)
    return {
        "loss": float(nn.functional.cross_entropy(f, split.y)),
        "accuracy": float((f.argmax(1) == split.y).double().mean()),
        "test": float((held.argmax(1) == split.held_y).double().mean()) if len(held) else float("nan"),
    }
