"""What training does to the tangent kernel of two classes: are images of one class nearer to each other afterwards?

The function is ``f_c2 − f_c1``, the images are held out. Entries of the normalized kernel are cosines between
gradients; for its principal components it is centred.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from layerwise import data
from layerwise.data.folder import MissingDataError
from layerwise.foundations.errors import InputError, NumericalError, describe, not_one_of, what_is_wrong
from layerwise.foundations.random import stream
from layerwise.kernel.ntk import ntk
from layerwise.studies.fisher_geometry import convolutional
from layerwise.studies.fisher_geometry.classifiers import Classifier

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CLASSES = {"digits": tuple("0123456789"), "cifar10": CIFAR10}
"""Names of the labels 0 to 9."""
NETWORKS = {"digits": ("mlp", "three-convolutions"), "cifar10": ("mlp", "vgg11", "resnet18", "resnet34")}
LOSS_OF = 1000
"""Images of the training data that its loss is measured on."""


class Split(NamedTuple):
    """Images to train on and held-out ones, with their labels."""

    x: Float[Tensor, "N C H W"]
    y: Tensor
    held_x: Float[Tensor, "M C H W"]
    held_y: Tensor


class View(NamedTuple):
    """One pair of classes at one step; images of the first class come first, equally many of both."""

    pair: str
    step: int
    loss: float
    """Of the training data."""
    contrast: float
    accuracy: float
    fisher: float
    plane: Float[Tensor, "N 2"]
    """Coordinates along the two leading components; the second class has the larger mean along both."""
    means: Float[Tensor, "N 2"]
    """The mean cosine with the images of either class."""


@dataclass(frozen=True, kw_only=True)
class TangentFeatures:
    """A network, its training, and the pairs of classes that are looked at."""

    images: str = "digits"
    """"digits" (8 × 8, with scikit-learn) or "cifar10" (held-out images are those of its test files)."""
    pairs: tuple[str, ...] = ("3-8", "4-9", "1-8")
    network: str = "mlp"
    """"mlp", or one of `convolutional.network`, without batch norm, which would make images depend on each other."""
    hidden: tuple[int, ...] = (80, 80, 80)
    """Of the network "mlp": ReLU, weights N(0, 2 / fan_in), biases zero."""
    width: int = 64
    """Of the others."""
    trained_on: int = 1000
    each: int = 50
    """Held-out images of each class."""
    steps: tuple[int, ...] = (0, 50, 200, 600)
    """At which the kernel is looked at."""
    lr: float | int = 0.02
    momentum: float | int = 0.9
    batch: int = 100
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.images not in CLASSES:
            raise InputError(not_one_of("images", self.images, CLASSES))
        known = NETWORKS[self.images]
        if self.network not in known:
            raise InputError(not_one_of("network", self.network, known, where=f"for {self.images}"))
        for pair in self.pairs:
            names = pair.split("-")
            if len(set(names) & set(CLASSES[self.images])) != 2 or len(names) != 2:
                expected = f"two of {', '.join(CLASSES[self.images])}, joined by a dash"
                raise InputError(describe(f"the pair {pair!r} of {self.images}", expected, "name others"))
        if len(self.steps) < 2 or list(self.steps) != sorted(set(self.steps)) or self.steps[0] < 0:
            raise InputError(
                describe(f"steps={self.steps}", "two or more increasing numbers ≥ 0", "pass e.g. (0, 600)")
            )
        if self.each < 3:
            raise InputError(describe(f"each={self.each}", "three images of a class or more", "take e.g. 50"))

    def split(self, seed: int) -> Split:
        """Digits are divided by the seed, and the mean image is taken off; of CIFAR-10 the held-out ones are drawn.

        CIFAR-10 is divided by its deviation, too, channel by channel; means and deviations are those of the training.
        """
        generator = stream(seed, "split")
        if self.images == "digits":
            x, y = data.digits()
            order = torch.randperm(len(x), generator=generator)
            train, held = order[: self.trained_on], order[self.trained_on :]
            x = x - x[train].mean(0)
            return Split(x[train], y[train], x[held], y[held])
        (x, y), (held_x, held_y) = cifar10(self.trained_on)
        order = torch.randperm(len(held_x), generator=generator)
        mean, deviation = (of((0, 2, 3), keepdim=True) for of in (x.mean, x.std))
        return Split((x - mean) / deviation, y, ((held_x - mean) / deviation)[order], held_y[order])

    def model(self, seed: int, pixels: int) -> nn.Module:
        """Drawn anew."""
        if self.network == "mlp":
            classifier = Classifier(hidden=self.hidden, activation="relu", gain=math.sqrt(2))
            return nn.Sequential(nn.Flatten(), *classifier.network(stream(seed, "weights"), pixels)).float()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream(seed, "weights").initial_seed())
            return convolutional.network(self.network, width=self.width)

    def trained(self, x: Tensor, y: Tensor, seed: int) -> Iterator[tuple[int, float, nn.Module]]:
        """SGD; at each of the steps, its number, the loss, and the network as it is then."""
        generator = stream(seed, "batches")
        model = self.model(seed, x[0].numel()).to(self.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)
        for step in range(self.steps[-1] + 1):
            if step in self.steps:
                with torch.no_grad():
                    loss = float(nn.functional.cross_entropy(model(x[:LOSS_OF]), y[:LOSS_OF]))
                if not math.isfinite(loss):
                    given = f"a training loss of {loss} after {step} steps at lr={self.lr}"
                    raise NumericalError(describe(given, "a finite loss", "take a smaller lr"))
                yield step, loss, model
            chosen = torch.randint(len(x), (self.batch,), generator=generator).to(x.device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()

    def views(self, seed: int) -> Iterator[View]:
        """All pairs at each of the steps of one training."""
        x, y, held_x, held_y = self.split(seed)
        held = {pair: self.held_out(pair, held_x, held_y) for pair in self.pairs}
        for step, loss, model in self.trained(x.to(self.device), y.to(self.device), seed):
            for pair, images in held.items():
                c1, c2 = self.labels(pair)
                K = ntk(model, images, outputs=lambda f, c1=c1, c2=c2: f[:, c2] - f[:, c1]).normalized()
                second = torch.arange(2 * self.each) >= self.each
                plane = K.kernel_pca(2).coordinates.double().cpu()
                across = plane[second].mean(0) - plane[~second].mean(0)
                plane = torch.where(across < 0, -plane, plane)  # a component has no sign of its own
                means = class_means(K.matrix().double().cpu(), second)
                accuracy, fisher = separation(plane[~second], plane[second])
                yield View(pair, step, loss, contrast(means, second), accuracy, fisher, plane, means)

    def labels(self, pair: str) -> tuple[int, int]:
        """The numbers of the two classes."""
        c1, c2 = (CLASSES[self.images].index(name) for name in pair.split("-"))
        return c1, c2

    def held_out(self, pair: str, x: Tensor, y: Tensor) -> Tensor:
        """The first images of either class, one class after the other."""
        chosen = [(y == label).nonzero().flatten()[: self.each] for label in self.labels(pair)]
        if min(map(len, chosen)) < self.each:
            given = f"{min(map(len, chosen))} held-out images of a class of {pair!r}"
            raise InputError(describe(given, f"each={self.each}", "ask for fewer, or train on fewer"))
        return x[torch.cat(chosen)].to(self.device)


@lru_cache(maxsize=1)  # decoding takes as long as some hundred steps of training
def cifar10(limit: int) -> tuple[data.Images, data.Images]:
    """The first training images, and the test images; an error that names the folder and its files."""
    try:
        return data.cifar10("train", limit=limit), data.cifar10("test")
    except MissingDataError as error:
        files = "cifar10/train-00000-of-00001.parquet and cifar10/test-00000-of-00001.parquet"
        given = f"images='cifar10', but {what_is_wrong(error)}"
        do = 'set LAYERWISE_DATA (they are uoft-cs/cifar10 on the Hugging Face hub), or take images="digits"'
        raise MissingDataError(describe(given, f"a folder LAYERWISE_DATA with {files}", do)) from error


def class_means(cosines: Float[Tensor, "N N"], second: Bool[Tensor, "N"]) -> Float[Tensor, "N 2"]:
    """The mean cosine of each image with those of the first and of the second class, itself left out."""
    members = torch.stack([~second, second], 1).to(cosines)
    others = 1 - torch.eye(len(second)).to(cosines)
    return (cosines * others) @ members / (others @ members)


def contrast(means: Float[Tensor, "N 2"], second: Bool[Tensor, "N"]) -> float:
    """The mean entry within a class, without the diagonal, minus the mean entry between classes of equal size."""
    own, other = (means.gather(1, column.long().unsqueeze(1)) for column in (second, ~second))
    return float((own - other).mean())


def separation(a: Float[Tensor, "A 2"], b: Float[Tensor, "B 2"]) -> tuple[float, float]:
    """Accuracy of the linear discriminant on the points it is made from, and ``|m_a − m_b|² / (tr S_a + tr S_b)``."""
    across = b.mean(0) - a.mean(0)
    covariances = torch.cov(a.mT, correction=0) + torch.cov(b.mT, correction=0)
    direction, middle = torch.linalg.solve(covariances, across), (a.mean(0) + b.mean(0)) / 2
    right = ((a - middle) @ direction <= 0).sum() + ((b - middle) @ direction > 0).sum()
    return float(right) / (len(a) + len(b)), float(across.square().sum() / covariances.trace())
