"""Easy and difficult examples of cards R2 to R5: C-scores, noisy labels, spurious features; several seeds at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from layerwise import data
from layerwise.data.folder import MissingDataError, root
from layerwise.foundations.errors import FileFormatError, InputError, NameLookupError, describe, unknown, what_is_wrong
from layerwise.foundations.random import stream
from layerwise.regimes.cscores import estimate_cscores
from layerwise.regimes.groups import deciles, label_noise, with_spurious
from layerwise.studies.fisher_geometry.convolutional import standardized
from layerwise.studies.training_regimes.stack import cross_entropy
from layerwise.studies.training_regimes.task import Task

CLASSES = 10
IMAGES = ("digits", "cifar10")
CIFAR10 = 50_000
HELD_OUT = 10_000
"""Of CIFAR-10, at most."""
PUBLISHED = "cifar10/cifar10-cscores-orig-order.npz"
"""Scores of the authors of C-scores (pluskid/structural-regularity), in the folder that LAYERWISE_DATA names."""


@lru_cache(maxsize=1)  # decoding takes as long as an epoch
def photographs(limit: int | None = None) -> data.Images:
    """CIFAR-10's training images; an error that names the folder and its files."""
    try:
        return data.cifar10("train", limit=limit, verify=limit is None)
    except MissingDataError as error:
        given = f"images='cifar10', but {what_is_wrong(error)}"
        do = 'set LAYERWISE_DATA (it is uoft-cs/cifar10 on the Hugging Face hub), or take images="digits"'
        expected = "a folder LAYERWISE_DATA with cifar10/train-00000-of-00001.parquet"
        raise MissingDataError(describe(given, expected, do)) from error


def check_images(images: str, train: int) -> None:
    """Whether they are there, and enough of them; photographs are not read for that."""
    if images == "cifar10" and 0 < train < CIFAR10:
        photographs(1)
    else:
        Split(images, 0, train)


class Split:
    """Examples to train on and others, divided by the seed: digits from 0 to 1, flat; photographs standardized."""

    def __init__(self, images: str, seed: int, train: int, device: str = "cpu") -> None:
        if images not in IMAGES:
            raise NameLookupError(unknown("set of images", images, IMAGES))
        x, y = data.digits() if images == "digits" else photographs()
        if not 0 < train < len(x):
            raise InputError(describe(f"train={train}", f"1 to {len(x) - 1} images", "leave some to test on"))
        order = torch.randperm(len(x), generator=stream(seed, "split"))
        self.seed, self.images = seed, images
        self.index, self.rest = order[:train], order[train:][:HELD_OUT]
        x = x.flatten(1) if images == "digits" else standardized(x, x[self.index])
        self.x, self.y = x[self.index].to(device), y[self.index].to(device)
        self.held_x, self.held_y = x[self.rest].to(device), y[self.rest].to(device)


def noisy(splits: Sequence[Split], fraction: float | int) -> Task:
    """A part of the training labels is wrong: losses of clean and of noisy examples, and of others (clean labels)."""
    made = [label_noise(s.y, CLASSES, fraction, s.seed) for s in splits]
    labels, wrong = torch.stack([m.labels for m in made]), torch.stack([m.noisy for m in made])
    test_y = torch.stack([s.held_y for s in splits])

    def measure(outputs: Mapping[str, Tensor], seed: Int64[Tensor, "R"]) -> dict[str, Tensor]:
        losses, test = cross_entropy(outputs["train"], labels[seed]), outputs["test"]
        return {
            "clean": mean(losses, ~wrong[seed]),
            "noisy": mean(losses, wrong[seed]),
            "test": cross_entropy(test, test_y[seed]).mean(1),
            "accuracy": (test.argmax(2) == test_y[seed]).double().mean(1),
        }

    return Task(
        seeds=tuple(s.seed for s in splits),
        x=torch.stack([s.x for s in splits]),
        y=labels,
        others={"test": torch.stack([s.held_x for s in splits])},
        measure=measure,
        classes=CLASSES,
    )


def by_cscore(splits: Sequence[Split], scores: Sequence[Tensor], parts: int) -> Task:
    """Losses of ten parts by C-score, the lowest first, and the mean training loss.

    Scores are of training examples (digits), or of the held-out ones (photographs), whose losses are then measured.
    """
    held = len(scores[0]) != len(splits[0].y)
    y = torch.stack([s.y for s in splits])
    scored_y = torch.stack([s.held_y for s in splits]) if held else y
    part = torch.stack([deciles(s, parts) for s in scores])

    def measure(outputs: Mapping[str, Tensor], seed: Int64[Tensor, "R"]) -> dict[str, Tensor]:
        losses = cross_entropy(outputs["train"], y[seed])
        scored = cross_entropy(outputs["held"], scored_y[seed]) if held else losses
        found = {f"part {k}": mean(scored, part[seed] == k) for k in range(parts)}
        return {"loss": losses.mean(1), "spread": found["part 0"] - found[f"part {parts - 1}"], **found}

    others = {"held": torch.stack([s.held_x for s in splits])} if held else {}
    x = torch.stack([s.x for s in splits])
    return Task(seeds=tuple(s.seed for s in splits), x=x, y=y, others=others, measure=measure, classes=CLASSES)


def cscores(split: Split, trainings: int, fraction: float, published: bool = False) -> Float[Tensor, "N"]:
    """Of the training examples of digits, or of the held-out photographs.

    Digits: 64-64-10 networks, 60 steps of Adam. Photographs: published ones, or those of small convolutional networks
    that are trained on parts of the training and the held-out examples.
    """
    if split.images == "digits":
        data = split.x, split.y
        return estimate_cscores(_perceptron, data, (fraction,), trainings, steps=60, lr=1e-2, seed=split.seed).scores
    if published:
        return published_scores(photographs().y)[split.rest].to(split.x.device)
    both = torch.cat([split.held_x, split.x]), torch.cat([split.held_y, split.y])
    options = {"steps": 1000, "lr": 1e-3, "batch": 250, "seed": split.seed, "stacked": False}
    return estimate_cscores(_convolutions, both, (fraction,), trainings, **options).scores[: len(split.held_y)]


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for fan_in, fan_out in ((3, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(fan_in, fan_out, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 16, CLASSES))


def published_scores(labels: Int64[Tensor, "N"]) -> Float[Tensor, "N"]:
    """The published C-scores of CIFAR-10's training images, which must be in the order of their file."""
    path = root() / PUBLISHED
    if not path.is_file():
        do = "download it from pluskid/structural-regularity, or take published=False, which estimates scores"
        raise MissingDataError(describe(f"no file {path}", f"LAYERWISE_DATA with {PUBLISHED}", do))
    with numpy.load(path) as found:
        if not {"scores", "labels"} <= set(found.files):
            expected = "arrays scores and labels"
            raise FileFormatError(describe(f"{path} with {found.files}", expected, "download it again"))
        scores, theirs = torch.from_numpy(found["scores"]), torch.from_numpy(found["labels"]).long()
    if not torch.equal(theirs, labels.cpu()):
        given = f"{path}, whose labels are not those of the images"
        raise FileFormatError(describe(given, "both in the original order", "download both again"))
    return scores.double()


def spurious(splits: Sequence[Split], agreement: float | int, coordinates: int, amplitude: float | int) -> Task:
    """Even or odd, with coordinates that agree with the label for most training examples.

    Accuracies on other examples where they agree for all ("with") and for none ("without").
    """
    shape = {"coordinates": coordinates, "amplitude": amplitude}
    x = torch.stack([with_spurious(s.x, s.y % 2, agreement, seed=s.seed, **shape).x for s in splits])
    y, test_y = torch.stack([s.y % 2 for s in splits]), torch.stack([s.held_y % 2 for s in splits])
    others = {
        name: torch.stack([with_spurious(s.held_x, s.held_y % 2, part, seed=s.seed, **shape).x for s in splits])
        for name, part in (("with", 1), ("without", 0))
    }

    def measure(outputs: Mapping[str, Tensor], seed: Int64[Tensor, "R"]) -> dict[str, Tensor]:
        right = {name: (outputs[name].argmax(2) == test_y[seed]).double().mean(1) for name in others}
        balanced = {"balanced": (right["with"] + right["without"]) / 2}
        return {"loss": cross_entropy(outputs["train"], y[seed]).mean(1), **right, **balanced}

    seeds = tuple(s.seed for s in splits)
    return Task(seeds=seeds, x=x, y=y, others=others, measure=measure, classes=2)


def mean(values: Float[Tensor, "R N"], where: Tensor) -> Float[Tensor, "R"]:
    """Over a part of each row."""
    return (values * where).sum(1) / where.sum(1)
