"""Groups of examples that are learned at different times: noisy labels, C-score deciles, spurious attributes."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64, Integer
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream


class NoisyLabels(NamedTuple):
    """Labels, some of which are wrong; unpacks as ``labels, noisy``."""

    labels: Int64[Tensor, "N"]
    noisy: Bool[Tensor, "N"]
    """Where they were changed."""


def label_noise(labels: Integer[Tensor, "N"], classes: int, fraction: float | int = 0.15, seed: int = 0) -> NoisyLabels:
    """A fraction of the labels, chosen at random, replaced by a wrong class drawn evenly among the others.

    >>> import torch
    >>> labels, noisy = label_noise(torch.zeros(100, dtype=torch.int64), classes=10, fraction=0.15)
    >>> int(noisy.sum()), bool((labels[noisy] != 0).all())
    (15, True)
    """
    if not 0 <= fraction <= 1 or classes < 2 or classes != int(classes):
        given = f"classes={classes}, fraction={fraction}"
        do = "call label_noise(labels, classes=10, fraction=0.15)"
        raise InputError(describe(given, "a number of classes of two or more, and a fraction from 0 to 1", do))
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        given = f"labels from {int(labels.min())} to {int(labels.max())}"
        raise InputError(describe(given, f"0 to {classes - 1}", "renumber them, or give the number of classes"))
    generator = stream(seed, "label noise")
    n = len(labels)
    chosen = torch.randperm(n, generator=generator)[: round(fraction * n)].to(labels.device)
    shift = torch.randint(1, classes, (len(chosen),), generator=generator).to(labels.device)
    found, noisy = labels.long().clone(), torch.zeros(n, dtype=torch.bool, device=labels.device)
    found[chosen] = (found[chosen] + shift) % classes
    noisy[chosen] = True
    return NoisyLabels(found, noisy)


def deciles(scores: Float[Tensor, "N"], parts: int = 10) -> Int64[Tensor, "N"]:
    """The part that each score is in by rank, from 0 (lowest) to `parts` − 1; all parts are equally large, within one.

    Equal scores are told apart by their order.

    >>> import torch
    >>> deciles(torch.tensor([0.9, 0.1, 0.5, 0.7]), parts=2)
    tensor([1, 0, 0, 1])
    """
    if not 1 <= parts <= len(scores) or not bool(torch.isfinite(scores).all()):
        given = f"{len(scores)} scores in {parts} parts"
        raise InputError(describe(given, "finite scores, one for each part at least", "use fewer parts"))
    rank = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    rank[scores.argsort(stable=True)] = torch.arange(len(scores), device=scores.device)
    return rank * parts // len(scores)


class Spurious(NamedTuple):
    """Inputs with an attribute that is correlated with the label; unpacks as ``x, attribute``."""

    x: Float[Tensor, "N features"]
    attribute: Int64[Tensor, "N"]
    """Which label the attribute speaks for."""


def with_spurious(
    x: Float[Tensor, "N features"],
    labels: Integer[Tensor, "N"],
    agreement: float | int,
    coordinates: int = 2,
    amplitude: float | int = 0.5,
    seed: int = 0,
) -> Spurious:
    """Coordinates of ``± amplitude`` appended to inputs, with the sign of a binary label for a part of the examples.

    ``agreement=1`` and ``agreement=0`` are the groups "with" and "without" the spurious feature: all agree, or none.

    >>> import torch
    >>> x, attribute = with_spurious(torch.zeros(10, 3), torch.arange(10) % 2, agreement=0.9)
    >>> x.shape, int((attribute == torch.arange(10) % 2).sum())
    (torch.Size([10, 5]), 9)
    """
    if not 0 <= agreement <= 1 or coordinates < 1 or not set(labels.unique().tolist()) <= {0, 1}:
        given = f"agreement={agreement}, coordinates={coordinates}, labels {labels.unique().tolist()[:5]}"
        raise InputError(describe(given, "a part from 0 to 1, a coordinate at least, labels 0 and 1", "change them"))
    if not x.is_floating_point():
        raise InputError(describe(f"inputs of {x.dtype}", "floating-point numbers", "pass x.float()"))
    n = len(labels)
    order = torch.randperm(n, generator=stream(seed, "spurious")).to(labels.device)
    attribute = labels.long().clone()
    against = order[round(agreement * n) :]
    attribute[against] = 1 - attribute[against]
    sign = (2 * attribute - 1).to(x) * amplitude
    return Spurious(torch.cat([x, sign.unsqueeze(1).expand(-1, coordinates)], 1), attribute)


def balanced(
    labels: Integer[Tensor, "N"], attribute: Integer[Tensor, "N"], each: int = 180, seed: int = 0
) -> Int64[Tensor, "M"]:
    """Indices of equally many examples of each pair of a label and an attribute, drawn at random.

    `each`, or as many as the rarest pair has.

    >>> import torch
    >>> label, attribute = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 0, 1, 1, 0])
    >>> chosen = balanced(label, attribute, each=5)
    >>> sorted((2 * label + attribute)[chosen].tolist())
    [0, 1, 2, 3]
    """
    pairs = [(int(a), int(b)) for a in labels.unique() for b in attribute.unique()]
    cells = [((labels == a) & (attribute == b)).nonzero().flatten() for a, b in pairs]
    missing = [pair for pair, cell in zip(pairs, cells, strict=True) if not len(cell)]
    if missing or each < 1:
        given = f"each={each}, no example of the pairs {missing}" if missing else f"each={each}"
        raise InputError(describe(given, "an example of each label with each attribute", "take more examples"))
    count = min(each, *map(len, cells))
    generator = stream(seed, "balanced")
    drawn = [cell[torch.randperm(len(cell), generator=generator).to(cell.device)[:count]] for cell in cells]
    return torch.cat(drawn)
