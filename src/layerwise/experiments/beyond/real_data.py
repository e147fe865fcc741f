"""Beyond Zhang et al. (2025): the members of the family on real images, with known features and with real labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerwise.experiments.beyond.real_data_claims import (
    SUMMARY,
    known_claims,
    label_claims,
    movement_claims,
    rotated_claims,
    short_label_claims,
)
from layerwise.experiments.beyond.real_data_figures import known_figure, movement_figure, transfer_figure
from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure
from layerwise.experiments.progress import within_cell
from layerwise.experiments.zhang2025 import PAPER
from layerwise.foundations.errors import InputError, unknown
from layerwise.studies.feature_learning.members import MEMBERS
from layerwise.studies.feature_learning.real_data_choices import DAMPED, DATA

if TYPE_CHECKING:
    from torch import Tensor, nn

    from layerwise.studies.feature_learning import label_transfer


LABELS = {
    name: MEMBERS[name].label if name in MEMBERS else f"KFAC, damping {DAMPED:g}"
    for name in ("sgd", "adam", "muon", "shampoo", "soap", "foof", "kfac", "kfac-damped", "ekfac")
}
BASELINES = {"pixels": "pixels", "random": "untrained layer", "target": "Adam on the target itself"}
PARTS = {"known": "pixels", "rotated": "rotated pixels", "labels": "labels 0–4"}
CENTRES: dict[str, tuple[float, float, float]] = {
    "sgd": (-0.25, 0.0, -0.5),
    "adam": (-1.5, -1.5, -2.0),
    "muon": (-1.0, -1.0, -1.5),
    "shampoo": (-1.5, -1.0, -2.0),
    "soap": (-1.5, -1.5, -2.0),
    "foof": (-0.75, -0.5, -1.0),
    "kfac": (-1.0, -1.75, -2.5),
    "kfac-damped": (-1.0, -1.0, -2.0),
    "ekfac": (-1.0, -2.0, -2.5),
}
"""Decimal logarithms of a middle rate: known features, labels of digits, labels of MNIST; from trials on seeds 0–2."""
KNOWN = tuple(name for name in LABELS if name != "kfac-damped")
"""Members that run with known features; the larger damping is there for the labels."""
ROTATED = ("sgd", "adam", "soap", "kfac")
"""Members that run on rotated pixels too: Adam, which knows the axes, and some which do not."""
SOURCE, TARGET = range(5), range(5, 10)
LEARNED, LABELS_LEARNED, MOVED = 100, 50, 8
"""Steps from which on a run is long enough for claims: about distances, about accuracy, about movement by labels."""
CLAIMED = 10
"""Examples of each target label at which accuracies are claimed."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Two-layer networks on real images; each member at the best of its rates."""

    seeds: int = 2
    """Teachers, divisions of the images, initial weights and orders of the batches."""
    data: tuple[str, ...] = ("digits",)
    """"digits" (with scikit-learn) and "mnist" (from the folder LAYERWISE_DATA)."""
    parts: tuple[str, ...] = tuple(PARTS)
    offsets: tuple[float, ...] = (-0.5, 0.0, 0.5)
    """Decimal logarithms of the rates, relative to a member's middle one."""
    steps: int = 150
    """With known features."""
    label_steps: int = 50
    """With real labels."""
    width: int = 32
    batch: int = 256
    k: int = 4
    dy: int = 8
    noise: float | int = 0.02
    each: tuple[int, ...] = (2, 5, 10, 20)
    """Examples of each target label."""
    draws: int = 10
    """Times that these are drawn."""
    mnist_images: int = 10_000
    mnist_pool: int = 2
    """MNIST is averaged over squares of so many pixels a side: 2 makes it 14 × 14."""

    def images(self, name: str) -> tuple[Tensor, Tensor]:
        """Scaled pixels and labels."""
        from layerwise.studies.feature_learning import real_inputs

        limit, pool = (self.mnist_images, self.mnist_pool) if name == "mnist" else (None, 1)
        found = real_inputs.images(name, limit, pool)
        return real_inputs.scaled_pixels(found.flat()), found.y

    def rates(self, member: str, column: int) -> list[float]:
        """The learning rates of a member, around a column of the table of middle ones."""
        return [10.0 ** (CENTRES[member][column] + offset) for offset in self.offsets]


def cells(config: Config) -> list[Cell]:
    """One for each data and part."""
    for kind, given, known in (("part", config.parts, PARTS), ("data", config.data, DATA)):
        for name in given:
            if name not in known:
                raise InputError(unknown(kind, name, known))
    return [
        Cell(key=f"{data}/{part}", options={"data": data, "part": part})
        for data in config.data
        for part in config.parts
    ]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed; the images are read once."""
    x, y = config.images(cell.options["data"])
    for seed in seeds:
        if cell.options["part"] == "labels":
            yield with_labels(config, x, y, seed, column=2 if cell.options["data"] == "mnist" else 1)
        else:
            yield with_features(config, x, seed, rotated=cell.options["part"] == "rotated")


def with_features(config: Config, x: Tensor, seed: int, rotated: bool) -> Row:
    """The distance of each member to the features: the least over its rates, and that at the least held-out loss."""
    import torch

    from layerwise.studies.feature_learning import real_inputs
    from layerwise.studies.feature_learning.features import feature_distance
    from layerwise.studies.feature_learning.real_inputs import hidden_weight

    known = real_inputs.known_features(x, seed, k=config.k, dy=config.dy, noise=config.noise, rotated=rotated)
    problem = known.problem(config.width, config.batch)
    moves = _Movement(known.x)
    values, series = moves.values, moves.series
    moves.add("features", torch.zeros_like(known.G), known.G)
    start = real_inputs.trained(problem, "sgd", 0, seed=seed, steps=0)
    values["start/dist"] = feature_distance(start, known.x, known.G)
    names = ROTATED if rotated else KNOWN
    for name in within_cell().track(names, "members", len(names)):
        tried = []
        for rate in config.rates(name, 0):
            model = real_inputs.trained(problem, name, rate, seed=seed, steps=config.steps)
            dist = feature_distance(model, known.x, known.G)
            tried.append((dist, real_inputs.mean_loss(problem, model, known.held_x, known.held_y), rate, model))
        dist, loss, rate, model = min(tried, key=lambda one: one[0])
        values |= {f"{name}/dist": dist, f"{name}/loss": loss, f"{name}/rate": rate}
        chosen = min(tried, key=lambda one: one[1])
        values |= {f"{name}/dist_by_loss": chosen[0], f"{name}/least_loss": chosen[1]}
        moves.add(name, hidden_weight(start), hidden_weight(model))
    return Row(seed=seed, values=values, series=series)


def with_labels(config: Config, x: Tensor, y: Tensor, seed: int, column: int) -> Row:
    """Accuracy on source and target of each member, at the rate of its least held-out loss on the source."""
    from layerwise.studies.feature_learning import label_transfer, real_inputs
    from layerwise.studies.feature_learning.real_inputs import hidden_weight

    source, target = (label_transfer.task(x, y, labels, seed) for labels in (SOURCE, TARGET))
    moves = _Movement(source.x["train"])

    def shots(model: nn.Sequential | None) -> dict[int, float]:
        return {n: label_transfer.few_shot(target, n, seed=seed, draws=config.draws, model=model) for n in config.each}

    def best(task: label_transfer.Task, name: str) -> tuple[nn.Sequential, float, float]:
        problem, tried = task.problem(config.width, config.batch), []
        for rate in config.rates(name, column):
            model = real_inputs.trained(problem, name, rate, seed=seed, steps=config.label_steps)
            tried.append((real_inputs.mean_loss(problem, model, task.x["held"], task.y["held"]), rate, model))
        loss, rate, model = min(tried, key=lambda one: one[0])
        return model, loss, rate

    start = real_inputs.trained(source.problem(config.width, config.batch), "sgd", 0, seed=seed, steps=0)
    accuracies = {"pixels": shots(None), "random": shots(start), "target": shots(best(target, "adam")[0])}
    for name in within_cell().track(tuple(LABELS), "members", len(LABELS)):
        model, loss, rate = best(source, name)
        accuracies[name] = shots(model)
        right = label_transfer.accuracy(model, source.x["test"], source.y["test"])
        moves.values |= {f"{name}/source": right, f"{name}/held_loss": loss, f"{name}/rate": rate}
        moves.add(name, hidden_weight(start), hidden_weight(model))
    for name, found in accuracies.items():
        moves.values |= {f"{name}/target@{n}": value for n, value in found.items()}
    return Row(seed=seed, values=moves.values, series=moves.series)


class _Movement:
    """Values and series of a row, with where weights moved by eigen-direction of the inputs' covariance."""

    def __init__(self, x: Tensor) -> None:
        from layerwise.studies.feature_learning import real_inputs

        eigenvalues, self.directions = real_inputs.eigen_directions(x)
        self.values: dict[str, float | int] = {"condition": float(eigenvalues[0] / eigenvalues[-1].clamp(min=1e-15))}
        self.series: dict[str, list[float | int]] = {
            "direction": list(range(1, len(eigenvalues) + 1)),
            "eigenvalue": eigenvalues.tolist(),
        }

    def add(self, name: str, start: Tensor, end: Tensor) -> None:
        """The movement of a member, and its sums over thirds of the directions."""
        from layerwise.studies.feature_learning import real_inputs

        parts = real_inputs.movement(start, end, self.directions)
        self.series[f"{name}/movement"] = parts.tolist()
        thirds = zip(("top", "middle", "bottom"), real_inputs.in_thirds(parts), strict=True)
        self.values |= {f"{name}/{third}": value for third, value in thirds}


def claims(config: Config) -> list[Claim]:
    """Of the parts that ran, each where its own steps were enough."""
    needed, found = min(config.seeds, 3), []
    long = {
        "known": config.steps >= LEARNED,
        "rotated": config.steps >= LEARNED,
        "labels": config.label_steps >= LABELS_LEARNED and CLAIMED in config.each,
    }
    parts = {part for part in config.parts if long[part]}
    for data in config.data:
        known, rotated, labels = (f"{data}/{part}" for part in PARTS)
        if "labels" in config.parts and config.label_steps >= MOVED:
            found += movement_claims(labels, needed)
            found += [] if "labels" in parts else short_label_claims(labels, needed)
        if "labels" in parts:
            least = 0.97 if data == "digits" else 0.9
            found += label_claims(labels, tuple(LABELS), each=CLAIMED, least=least, width=config.width, seeds=needed)
        if "known" in parts:
            found += known_claims(known, needed)
        if {"known", "rotated"} <= parts:
            found += rotated_claims(rotated, known, needed)
    return found


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Distances by member, accuracy by examples, movement by eigen-direction."""

    def of(*parts: str) -> dict[str, str]:
        return {f"{d}/{p}": f"{d}, {PARTS[p]}" for d in config.data for p in config.parts if p in parts}

    with_truth = {**LABELS, "features": "target: the features"}
    found = [known_figure(records, of("known", "rotated"), LABELS)] if of("known", "rotated") else []
    if of("labels"):
        found.append(transfer_figure(records, of("labels"), LABELS, config.each, BASELINES))
    if of("known", "labels"):
        found.append(movement_figure(records, of("known", "labels"), with_truth))
    return found


EXPERIMENT = Experiment(
    name="real-data",
    title="Real images: who finds features, and whose features serve other labels",
    paper=PAPER,
    figure="beyond the paper",
    summary=SUMMARY,
    presets={
        "smoke": Config(offsets=(0.0,), steps=5, label_steps=8, draws=2, each=(2, 10)),
        "laptop": Config(),
        "paper": Config(seeds=3, data=("digits", "mnist"), steps=250, label_steps=100, each=(2, 5, 10, 20, 50)),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="processor time on one busy core: smoke some 6 s, laptop 70 s, paper (with MNIST) an estimated nine minutes",
    ranges={"noise": (0, math.inf)},
)
