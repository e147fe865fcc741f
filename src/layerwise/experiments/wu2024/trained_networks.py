"""What experiments about layer Hessians of trained networks share: settings, cells, rows and quantities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Record, Row
from layerwise.experiments.figures import Curve, Panel
from layerwise.experiments.over_seeds import band, combined
from layerwise.experiments.progress import within_cell
from layerwise.foundations.errors import InputError, describe

if TYPE_CHECKING:
    from layerwise.studies.hessian_structure.networks import Task

FULL = 200
"""Passes: of a training of fewer on the digits less is claimed."""
TRAINED, START, RANDOM, NORMED = "trained", "start", "random labels", "batch norm"
STATES = {TRAINED: "trained", START: "before training", RANDOM: "trained on random labels", NORMED: "with batch norm"}
EXPLORED = "Limits are those of seeds 100 to 109, with a margin, unless said otherwise. "


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Networks and their training by SGD, without momentum or weight decay."""

    seeds: int = 3
    """Weights and orders of the steps; the images are the same."""
    settings: tuple[str, ...] = ("digits/20-20",)
    """Images ("digits", "mnist" or "cifar10", the latter two in the folder that LAYERWISE_DATA names) and a network:
    hidden widths such as "200-200", or "lenet5" for CIFAR-10."""
    centred: bool = True
    """Whether pixels of MNIST and CIFAR-10 have mean 0 and deviation 1; otherwise they are from 0 to 1."""
    trained_on: int | None = 1400
    """Images; None: all."""
    lr: float | int = 0.05
    batch: int = 64
    epochs: int = 200
    leading: int = 60
    """Eigenvectors of each layer, at most."""
    device: str = "cpu"

    def task(self, setting: str, state: str = TRAINED) -> Task:
        """A training."""
        from layerwise.studies.hessian_structure.networks import MOST, Task

        images, _, network = setting.partition("/")
        widths = network.split("-")
        plain = all(width.isdigit() for width in widths)
        return Task(
            images=images,
            network="mlp" if plain else network,
            hidden=tuple(map(int, widths)) if plain else (1,),
            batch_norm=state == NORMED,
            random_labels=state == RANDOM,
            centred=self.centred,
            trained_on=MOST.get(images, 1) if self.trained_on is None else self.trained_on,
            lr=self.lr,
            batch=self.batch,
            epochs=self.epochs,
            device=self.device,
        )

    def layers(self, setting: str) -> tuple[str, ...]:
        """Names of layers, as the study has them; said here, so that claims can be made without torch."""
        network = setting.partition("/")[2]
        fully = 3 if network == "lenet5" else len(network.split("-")) + 1
        convolutions = ("conv1", "conv2") if network == "lenet5" else ()
        return (*convolutions, *(f"fc{k}" for k in range(1, fully + 1)))

    def short(self, setting: str) -> bool:
        """Whether less is claimed of it."""
        return setting.startswith("digits") and self.epochs < FULL


SMOKE: dict[str, Any] = {"seeds": 1, "settings": ("digits/12-12",), "trained_on": 200, "epochs": 30, "leading": 12}
PAPER_SIZES: dict[str, Any] = {
    "seeds": 5,
    "settings": ("mnist/200-200", "mnist/600-600", "cifar10/lenet5"),
    "centred": False,
    "trained_on": None,
    "lr": 0.01,
    "batch": 128,
    "epochs": 1000,
    "device": "cuda",
}
"""Pixels from 0 to 1, of which the thesis says nothing: with them γ₁/γ₂ of inputs is what it prints, not otherwise."""
COST = "on two cores: smoke a second, laptop {laptop}; paper {paper} on a GPU"


def check(config: Networks) -> None:
    """What does not go together, or is not there, is said before anything is trained."""
    from layerwise.studies.hessian_structure.networks import CLASSES, check_present

    for setting in config.settings:
        check_present(config.task(setting).images)
    if config.leading < CLASSES:
        given = f"leading={config.leading}"
        raise InputError(describe(given, f"at least {CLASSES}, one more than there are outliers", "take e.g. 60"))


def key(setting: str, state: str) -> str:
    """The cell of a training."""
    return f"{setting}/{state}"


def cells_of(config: Networks, states: Sequence[str]) -> list[Cell]:
    """One a setting and a state."""
    return [
        Cell(key=key(setting, state), options={"setting": setting, "state": state})
        for setting in config.settings
        for state in states
    ]


def rows(
    config: Networks, cell: Cell, seeds: Sequence[int], names: Sequence[str], spectra: Sequence[str]
) -> Iterator[Row]:
    """All networks are trained first; then their layers are measured, seed by seed: "fc1/spectral", …"""
    from layerwise.studies.hessian_structure.measures import columns, measured
    from layerwise.studies.hessian_structure.networks import fit, trained

    setting, state = cell.options["setting"], cell.options["state"]
    task, at_start = config.task(setting, state), state == START
    models = None if at_start else trained(task, seeds, within_cell())
    for k, seed in enumerate(seeds):
        values: dict[str, Any] = {} if models is None else {**fit(task, models[k], seed)}
        series: dict[str, list[float]] = {}
        for layer in task.layers:
            found = measured(task, seed, layer, at_start, config.leading)
            values |= {f"{layer}/{name}": found.values[name] for name in names if name in found.values}
            for name, column in columns(found.spectra, spectra).items() if spectra else ():
                series[name if name == "index" else f"{layer}/{name}"] = column
        yield Row(seed=seed, values=values, series=_padded(series))


def _padded(series: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """To one length: layers have different numbers of eigenvectors."""
    length = max((len(column) for column in series.values()), default=0)
    found = {name: [*column, *[math.nan] * (length - len(column))] for name, column in series.items()}
    return found | ({"index": [float(k) for k in range(1, length + 1)]} if series else {})


def over_layers(
    cell: str, layers: Sequence[str], name: str, function: Callable[..., float | int]
) -> Callable[[Sequence[Mapping]], dict[int, float | int]]:
    """A claim's quantity: a function of one measure of several layers, such as the least.

    >>> records = [{"cell": "a", "seed": 0, "values": {"fc1/ratio": 5.0, "fc2/ratio": 4.0}}]
    >>> over_layers("a", ["fc1", "fc2"], "ratio", min)(records)
    {0: 4.0}
    """
    return combined(cell, [f"{layer}/{name}" for layer in layers], lambda *values: function(values))


def least(cell: str, layers: Sequence[str], name: str, target: float | int, statement: str, **others: Any) -> Claim:
    """The claim that a measure of all layers is at least so much."""
    quantity = over_layers(cell, layers, name, min)
    return Claim(name=f"{cell}/{name}", statement=statement, quantity=quantity, relation=">=", target=target, **others)


def most(cell: str, layers: Sequence[str], name: str, target: float | int, statement: str, **others: Any) -> Claim:
    """The claim that a measure of all layers is at most so much."""
    quantity = over_layers(cell, layers, name, max)
    return Claim(name=f"{cell}/{name}", statement=statement, quantity=quantity, relation="<=", target=target, **others)


def panel(
    records: Sequence[Record],
    cell: str,
    layers: Sequence[str],
    name: str,
    title: str,
    y_scale: str = "linear",
    x_scale: str = "linear",
) -> Panel:
    """A spectrum of every layer, by its index."""
    curves: list[Curve] = [band(records, cell, "index", f"{layer}/{name}", layer) for layer in layers]
    return Panel(title=title, x_label="index", y_label=title, curves=curves, y_scale=y_scale, x_scale=x_scale)


def file_name(cell: str) -> str:
    """Of the figure of a cell.

    >>> file_name("digits/20-20/random labels")
    'digits-20-20-random-labels'
    """
    return cell.replace("/", "-").replace(" ", "-")
