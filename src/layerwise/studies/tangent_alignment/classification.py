"""Classifiers of small images whose tangent kernel is tracked while they train: the setting of chapter 6.

Some labels of the training can be random: drawn uniformly from all classes, so that a tenth of them are right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from layerwise import data
from layerwise.foundations.errors import InputError, NameLookupError, NumericalError, describe, not_one_of, unknown
from layerwise.foundations.random import stream
from layerwise.regimes.snapshots import Snapshots
from layerwise.regimes.tracker import Tracker
from layerwise.studies.fisher_geometry import convolutional
from layerwise.training import Budget, Problem, accuracy, tensor_batches, train
from layerwise.training.loop import BUDGET
from layerwise.training.metrics import Evaluation, Measure
from layerwise.training.schedule import Schedule

CLASSES = 10
NETWORKS = {"digits": ("mlp",), "mnist": ("mlp",), "cifar10": ("mlp", "vgg11", "vgg19", "resnet18")}
"""By the images that they take."""
MOST = {"digits": 1697, "mnist": 60_000, "cifar10": 50_000}
"""Images that can be trained on; of the digits the others, a hundred at least, are for the test."""
FINITE = "finite losses and kernels"
LOSS_OF = 2000
"""Images of the training data that its loss and accuracy are measured on."""


class Split(NamedTuple):
    """Images to train on and held-out ones."""

    x: Float[Tensor, "N *pixels"]
    y: Int[Tensor, "N"]
    """Labels to train on, the random ones included."""
    random: Bool[Tensor, "N"]
    """Whose label was drawn."""
    held_x: Float[Tensor, "M *pixels"]
    held_y: Int[Tensor, "M"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A network, its images and its training by SGD."""

    images: str = "digits"
    """"digits" (8 × 8, with scikit-learn), "mnist" or "cifar10" (in the folder that LAYERWISE_DATA names)."""
    network: str = "mlp"
    """"mlp"; "vgg11", "vgg19" (without batch norm) or "resnet18" (with it) for CIFAR-10."""
    hidden: tuple[int, ...] = (80, 80, 80, 80, 80)
    """Of the network "mlp": ReLU, weights N(0, 2 / fan-in), biases zero."""
    width: int = 64
    """Of the others."""
    trained_on: int = 1400
    random_labels: float | int = 0.0
    """Share of the training labels that are drawn at random."""
    lr: float | int = 0.02
    momentum: float | int = 0.9
    batch: int = 100
    steps: int = 1000
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.images not in NETWORKS:
            raise NameLookupError(unknown("images", self.images, NETWORKS))
        known = NETWORKS[self.images]
        if self.network not in known:
            raise InputError(not_one_of("network", self.network, known, where=f"for {self.images}"))
        if not 1 <= self.trained_on <= MOST[self.images]:
            given = f"trained_on={self.trained_on} of {self.images}"
            raise InputError(describe(given, f"a number from 1 to {MOST[self.images]}", "take another number"))
        if not 0 <= self.random_labels <= 1:
            raise InputError(describe(f"random_labels={self.random_labels}", "a share from 0 to 1", "take e.g. 0.5"))

    def split(self, seed: int) -> Split:
        """Divided and disturbed by the seed; the mean image is taken off, and the deviation of all pixels is one."""
        (x, y), held = _images(self.images)
        generator = stream(seed, "split")
        order = torch.randperm(len(x), generator=generator)
        chosen, rest = order[: self.trained_on], order[self.trained_on :]
        held_x, held_y = (x[rest], y[rest]) if held is None else held
        mixed = torch.randperm(len(held_x), generator=generator)  # a probe is the first examples
        mean = x[chosen].mean(0)
        deviation = (x[chosen] - mean).std()
        labels, random = with_random_labels(y[chosen], self.random_labels, stream(seed, "labels"))
        x, held_x = ((part - mean) / deviation for part in (x[chosen], held_x[mixed]))
        found = Split(x, labels, random, held_x, held_y[mixed])
        return Split(*(part.to(self.device) for part in found))

    def model(self, seed: int) -> nn.Module:
        """Drawn anew."""
        if self.network == "mlp":
            pixels = {"digits": 64, "mnist": 784, "cifar10": 3072}[self.images]
            return nn.Sequential(nn.Flatten(), *mlp((pixels, *self.hidden, CLASSES), stream(seed, "weights")))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream(seed, "weights").initial_seed())
            return convolutional.network(self.network, self.network == "resnet18", self.width)

    def problem(self, split: Split) -> Problem:
        """For `layerwise.training`; "fit" is (the beginning of) the training data."""
        given = {
            "train": (split.x, split.y),
            "fit": (split.x[:LOSS_OF], split.y[:LOSS_OF]),
            "test": (split.held_x, split.held_y),
        }
        return Problem(
            name=f"{self.network}-{self.images}",
            model=self.model,
            batches=tensor_batches(given, self.batch),
            metrics={"accuracy": accuracy},
            budget=Budget(steps=self.steps),
        )

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)


def mlp(sizes: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Linear layers with ReLU between them, weights N(0, 2 / fan-in), biases zero."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layer = nn.Linear(fan_in, fan_out)
        nn.init.normal_(layer.weight, std=(2 / fan_in) ** 0.5, generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def with_random_labels(
    y: Int[Tensor, "N"], share: float | int, generator: torch.Generator
) -> tuple[Int[Tensor, "N"], Bool[Tensor, "N"]]:
    """A share of the labels drawn anew from all classes, and which they are.

    >>> y, random = with_random_labels(torch.zeros(1000, dtype=torch.long), 0.5, torch.Generator().manual_seed(0))
    >>> int(random.sum()), 0.8 < float((y[random] != 0).double().mean()) < 1, bool(y[~random].any())
    (500, True, False)
    """
    random = torch.zeros(len(y), dtype=torch.bool)
    random[torch.randperm(len(y), generator=generator)[: round(share * len(y))]] = True
    drawn = torch.randint(CLASSES, (len(y),), generator=generator)
    return torch.where(random, drawn, y), random


@lru_cache(maxsize=1)  # decoding takes longer than some hundred steps
def _images(name: str) -> tuple[data.Images, data.Images | None]:
    """Images to train on, and those of the test files, if there are any."""
    if name == "digits":
        return data.digits(), None
    read = data.mnist if name == "mnist" else data.cifar10
    return read("train"), read("test")


def check_present(images: str) -> None:
    """What is missing is said before anything is trained."""
    if images == "digits":
        data.digits(limit=1)
    else:
        read = data.mnist if images == "mnist" else data.cifar10
        for split in ("train", "test"):
            read(split, limit=1, verify=False, progress=False)


def probes(split: Split, names: Sequence[str], examples: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Examples of kernels: "train", "test", and "easy" and "difficult" (own and random labels) of the training."""
    chosen = {
        "train": (split.x, split.y),
        "test": (split.held_x, split.held_y),
        "easy": (split.x[~split.random], split.y[~split.random]),
        "difficult": (split.x[split.random], split.y[split.random]),
    }
    found = {name: (chosen[name][0][:examples], chosen[name][1][:examples]) for name in names}
    for name, (x, _) in found.items():
        if len(x) < examples:
            given = f"{len(x)} examples for the kernel {name!r}"
            raise InputError(describe(given, f"examples={examples} of them", "ask for fewer, or train on more"))
    return found


@dataclass(frozen=True, kw_only=True)
class Looks:
    """What is looked at along a training."""

    probes: tuple[str, ...] = ("train", "test")
    examples: int = 100
    """Of each kernel."""
    spectrum: bool = True
    layers: bool = True
    others: tuple[str, ...] = ()
    """Centerings beside "per-output" by which CKA is measured: "test/cka-global"."""
    ratio: float | int = 1.15
    """Of the steps of later snapshots, see `Snapshots`."""


@lru_cache(maxsize=64)  # experiments about one training share it, when they run in one process
def tracked(task: Task, seed: int, looks: Looks = Looks()) -> Mapping[str, list]:  # noqa: B008 (frozen)
    """Losses and accuracies of a training, and measures of its kernels: "step", "fit/loss", "test/cka", …"""
    split = task.split(seed)
    every = Snapshots(ratio=looks.ratio)
    tracker = Tracker(
        None,
        probes(split, looks.probes, looks.examples),
        every,
        examples=looks.examples,
        other_centerings=looks.others,
        spectrum=looks.spectrum,
        layers=looks.layers,
    )
    measures: list[tuple[Schedule, Measure]] = [(every, tracker)]
    measures += [(every, Evaluation(name)) for name in ("fit", "test")]
    try:
        done = train(task.problem(split), task.sgd, seed=seed, measures=measures, device=task.device)
    except (InputError, NumericalError) as error:  # of a kernel
        raise NumericalError(describe(f"a training at lr={task.lr} ({error})", FINITE, "take a smaller lr")) from error
    if done.stopped != BUDGET:
        given = f"a training at lr={task.lr} that ended after {done.steps} steps ({done.stopped})"
        raise NumericalError(describe(given, FINITE, "take a smaller lr"))
    return {name: column for name, column in done.recorder.series().items() if name != "train/batch_loss"}
