"""Transfer across labels: a hidden layer trained on some classes, then a new head from few examples of the others."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.real_inputs import network
from layerwise.training import Problem, tensor_batches

RIDGES = tuple(10.0**exponent for exponent in range(-6, 2))
"""Ridges that are tried, as parts of the mean square norm of the features."""
SPLITS = {"train": 0.6, "held": 0.2, "test": 0.2}


@dataclass(frozen=True, kw_only=True)
class Task:
    """Images of some classes in three splits, labelled 0, 1, …"""

    x: dict[str, Float[Tensor, "_ d"]]
    y: dict[str, Int64[Tensor, "_"]]
    classes: int

    def problem(self, width: int, batch: int) -> Problem:
        """A two-layer ReLU network on minibatches of the split "train"."""
        dx = self.x["train"].shape[1]
        return Problem(
            name="classes",
            model=lambda seed: network(dx, width, self.classes, nn.ReLU),
            batches=tensor_batches({"train": (self.x["train"], self.y["train"])}, batch),
            likelihood="categorical",
        )


def task(x: Float[Tensor, "N d"], y: Int64[Tensor, "N"], labels: Sequence[int], seed: int) -> Task:
    """The images with these labels, divided at random: 60 % to train, 20 % held out to choose, 20 % to test.

    >>> y = torch.arange(10).repeat(10)
    >>> halves = task(torch.zeros(100, 3).double(), y, [5, 6, 7, 8, 9], seed=0)
    >>> {split: len(x) for split, x in halves.x.items()}, int(halves.y["train"].max())
    ({'train': 30, 'held': 10, 'test': 10}, 4)
    """
    missing = sorted(set(labels) - set(y.tolist()))
    if missing:
        raise InputError(
            describe(f"no image with the label {missing[0]}", f"images of each of {list(labels)}", "pass more images")
        )
    place = torch.full((int(y.max()) + 1,), -1)
    place[list(labels)] = torch.arange(len(labels))
    chosen = (place[y] >= 0).nonzero()[:, 0]
    chosen = chosen[torch.randperm(len(chosen), generator=stream(seed, "division", *labels))]
    sizes = [round(part * len(chosen)) for part in SPLITS.values()]
    parts = dict(zip(SPLITS, chosen.split([*sizes[:-1], len(chosen) - sum(sizes[:-1])]), strict=True))
    seen = place[y[parts["train"]]].unique()
    if len(seen) < len(labels) or not all(len(rows) for rows in parts.values()):
        raise InputError(
            describe(
                f"{len(chosen)} images of {len(labels)} labels",
                "every label among the 60 % to train on, and images left to choose and to test",
                "pass more images",
            )
        )
    return Task(
        x={split: x[rows] for split, rows in parts.items()},
        y={split: place[y[rows]] for split, rows in parts.items()},
        classes=len(labels),
    )


def hidden(model: nn.Sequential, x: Float[Tensor, "N d"]) -> Float[Tensor, "N m"]:
    """σ(Gx): all but the last layer."""
    with torch.no_grad():
        return model[:-1](x)


def accuracy(model: nn.Module, x: Float[Tensor, "N d"], y: Int64[Tensor, "N"]) -> float:
    """The part of the examples whose largest output is at their label."""
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def few(y: Int64[Tensor, "N"], each: int, seed: int, draw: int) -> Int64[Tensor, "_"]:
    """Rows of so many examples of each class, drawn at random.

    >>> y = torch.tensor([0, 1, 0, 1, 0, 1])
    >>> y[few(y, 2, seed=0, draw=0)]
    tensor([0, 0, 1, 1])
    """
    if each < 1:
        raise InputError(describe(f"{each} examples of a class", "at least 1", "pass e.g. each=5"))
    found = []
    for label in range(int(y.max()) + 1):
        rows = (y == label).nonzero()[:, 0]
        if len(rows) < each:
            raise InputError(
                describe(f"{each} examples of a class with {len(rows)}", "no more than there are", "ask for fewer")
            )
        found.append(rows[torch.randperm(len(rows), generator=stream(seed, "few", draw, each, label))[:each]])
    return torch.cat(found)


def ridge_accuracy(
    features: Float[Tensor, "n m"],
    labels: Int64[Tensor, "n"],
    test_features: Float[Tensor, "t m"],
    test_labels: Int64[Tensor, "t"],
) -> float:
    """Accuracy of a least-squares head on one-hot labels, with a bias and the ridge of the least leave-one-out error.

    The head sees products of features alone, so that neither a rotation of them nor their scale matters.

    >>> x, y = torch.eye(3).double().repeat(4, 1), torch.arange(3).repeat(4)
    >>> ridge_accuracy(x, y, x, y)
    1.0
    """
    centre = features.mean(0)
    Z, T = features - centre, test_features - centre
    Y = nn.functional.one_hot(labels, int(labels.max()) + 1).to(Z)
    K, cross, bias = Z @ Z.mT, T @ Z.mT, Y.mean(0)
    scale = float(K.diagonal().mean())
    if not 0 < scale < torch.inf:  # constant features, or such as overflowed
        return float((test_labels == 0).double().mean())
    values, vectors = torch.linalg.eigh(K)
    best, coefficients = torch.inf, torch.zeros_like(Y)
    for ridge in RIDGES:
        inverse = (vectors / (values.clamp(min=0) + ridge * scale)) @ vectors.mT
        dual = inverse @ (Y - bias)
        # leave-one-out: residual_i / (1 − hat_ii) = dual_i / inverse_ii, where the centre 11ᵀ/n adds to the hat
        left_out = ridge * scale * dual / (ridge * scale * inverse.diagonal() - 1 / len(Y)).clamp(min=1e-12)[:, None]
        error = float(left_out.square().mean())
        if error < best:
            best, coefficients = error, dual
    return float(((cross @ coefficients + bias).argmax(1) == test_labels).double().mean())


def few_shot(target: Task, each: int, *, seed: int, draws: int, model: nn.Sequential | None = None) -> float:
    """Test accuracy on the target from so many examples of each class, averaged over draws of them.

    Args:
        target: whose split "train" examples are drawn from, and whose split "test" is predicted.
        each: examples a class.
        seed: of the draws; the same for every model.
        draws: how many times examples are drawn.
        model: its hidden layer gives the features; None takes the pixels.
    """
    if draws < 1:
        raise InputError(describe(f"draws={draws}", "at least 1", "pass e.g. draws=10"))
    (x, t) = (target.x[split] if model is None else hidden(model, target.x[split]) for split in ("train", "test"))
    found = []
    for draw in range(draws):
        rows = few(target.y["train"], each, seed, draw)
        found.append(ridge_accuracy(x[rows], target.y["train"][rows], t, target.y["test"]))
    return sum(found) / len(found)
