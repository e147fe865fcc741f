"""Bounds of one trained network by several methods: which basis of a posterior, and which variances to begin with.

The networks are those of Wu (2023), appendix C.8, on MNIST, and a small one on the digits that come with scikit-learn.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from layerwise import data
from layerwise.bounds.pac_bayes import checkpoint as checkpoints
from layerwise.bounds.pac_bayes.options import Options
from layerwise.bounds.pac_bayes.result import PacBayes
from layerwise.bounds.pac_bayes.run import Run
from layerwise.bounds.pac_bayes.together import optimize_together
from layerwise.foundations.errors import NameLookupError, unknown
from layerwise.foundations.progress import Progress
from layerwise.foundations.random import stream
from layerwise.foundations.replay import Replayed


class Variant(NamedTuple):
    """A method, and how its variances begin."""

    method: str
    initial: str | None
    label: str


VARIANTS = {
    "base": Variant("base", None, "BASE"),
    "appr": Variant("appr", None, "APPR"),
    "iter": Variant("iter", None, "ITER"),
    "iter-d": Variant("iter-d", None, "ITER(D)"),
    "iter-m": Variant("iter-m", None, "ITER.M"),
    "ekfac": Variant("ekfac", None, "EKFAC"),
    "base-curvature": Variant("base", "curvature", "BASE, variances of the Fisher diagonal"),
    "iter-curvature": Variant("iter", "curvature", "ITER, variances of K-FAC"),
    "ekfac-weights": Variant("ekfac", "weights", "EKFAC's basis, variances w²"),
}
"""The first five are the thesis's; the others are ours."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A chain of linear layers with ReLU, its data and its training by SGD."""

    images: str = "digits"
    classes: int = 2
    """2: the digits 0 to 4 against 5 to 9."""
    hidden: tuple[int, ...] = (30,)
    trained_on: int = 1500
    std: float = 0.1
    """Of the weights before training; biases are zero."""
    lr: float = 0.05
    momentum: float = 0.9
    batch: int = 100
    epochs: int = 60


_MNIST = {"images": "mnist", "trained_on": 60_000, "std": 0.04, "lr": 0.01, "momentum": 0.0, "batch": 128}
NETWORKS = {
    "digits-30": Network(),
    "T-600": Network(hidden=(600,), epochs=1000, **_MNIST),
    "T-300-300": Network(hidden=(300, 300), epochs=1000, **_MNIST),
    "T-200-200-10": Network(hidden=(200, 200), classes=10, epochs=1000, **_MNIST),
}
"""The thesis says only that weights begin Gaussian; 0.04 is Dziugaite and Roy's (2017)."""


def network(name: str) -> Network:
    """By its name."""
    if name not in NETWORKS:
        raise NameLookupError(unknown("network", name, NETWORKS))
    return NETWORKS[name]


def check_present(what: Network) -> None:
    """What is missing is said before anything is trained."""
    if what.images == "digits":
        data.digits(limit=1)
    else:
        for split in ("train", "test"):
            data.mnist(split, limit=1, verify=False, progress=False)


class Trained(NamedTuple):
    """A network before and after training, and the data."""

    init: nn.Module
    model: nn.Module
    x: Float[Tensor, "N d"]
    y: Int[Tensor, "N"]
    held_x: Float[Tensor, "M d"]
    held_y: Int[Tensor, "M"]

    def test_error(self) -> float:
        """Of the trained network."""
        with torch.no_grad():
            return float((self.model(self.held_x).argmax(1) != self.held_y).double().mean())


@lru_cache(maxsize=2)
def _images(name: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    if name == "digits":
        x, y = data.digits()
        return (x.flatten(1), y), None
    (x, y), (held_x, held_y) = data.mnist("train"), data.mnist("test")
    return (x.flatten(1), y), (held_x.flatten(1), held_y)


def trained(what: Network, seed: int, device: str = "cpu", keep: Path | None = None) -> Trained:
    """Data, first weights and order of the batches by the seed.

    The trained weights are written to the file `keep`, and read from it if they are there: a checkpoint after the last
    epoch. One of another network, other data or another seed is refused.
    """
    (x, y), held = _images(what.images)
    order = torch.randperm(len(x), generator=stream(seed, "split"))
    chosen, rest = order[: what.trained_on], order[what.trained_on :]
    held_x, held_y = (x[rest], y[rest]) if held is None else held
    labels = [(part >= 5).long() if what.classes == 2 else part for part in (y[chosen], held_y)]
    x, y, held_x, held_y = (part.to(device) for part in (x[chosen], labels[0], held_x, labels[1]))
    sizes = (x.shape[1], *what.hidden, what.classes)
    init = nn.Sequential(*chain(sizes, what.std, stream(seed, "weights"))).to(device)
    model = copy.deepcopy(init)
    if keep is None:
        _train(model, x, y, what, seed)
        return Trained(init, model, x, y, held_x, held_y)
    name = checkpoints.fingerprint({**init.state_dict(), "x": x, "y": y}, {**asdict(what), "seed": seed})
    stage = checkpoints.load(keep, name, x.device)
    if stage is None:
        _train(model, x, y, what, seed)
        checkpoints.save(keep, name, checkpoints.Stage(what.epochs, model.state_dict(), []))
    else:
        model.load_state_dict(stage.tensors)
    return Trained(init, model, x, y, held_x, held_y)


def _train(model: nn.Module, x: Float[Tensor, "N d"], y: Int[Tensor, "N"], what: Network, seed: int) -> None:
    generator = stream(seed, "batches")
    optimizer = torch.optim.SGD(model.parameters(), lr=what.lr, momentum=what.momentum)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()

    replayed = Replayed(step)
    for _ in range(what.epochs):
        for batch in torch.randperm(len(x), generator=generator).to(x.device).split(what.batch):
            replayed(batch)


def chain(sizes: Sequence[int], std: float, generator: torch.Generator) -> list[nn.Module]:
    """Linear layers with ReLU between them: weights N(0, std²), biases zero."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        with torch.random.fork_rng(devices=[]):  # weights are drawn twice, first from torch's own state
            layer = nn.Linear(fan_in, fan_out)
        nn.init.normal_(layer.weight, std=std, generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return layers[:-1]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How posteriors are optimized, and how many networks are drawn in the end."""

    epochs: int = 500
    lr: float | int = 1e-3
    decay: float | int = 0.3
    milestones: tuple[float | int, ...] = (0.5, 0.75)
    interval: int = 10
    batch: int = 100
    draws: int = 2000
    per_draw: int | None = None
    every: int = 10
    """Epochs between two entries of the histories."""
    tf32: bool = False
    """Whether the steps' products may be rounded on a GPU; bases and bounds are not."""

    def options(self, variant: str, cap: float | int, seed: int) -> Options:
        """Of one posterior."""
        if variant not in VARIANTS:
            raise NameLookupError(unknown("variant", variant, VARIANTS))
        method, initial, _ = VARIANTS[variant]
        return Options(
            method=method,
            initial=initial,
            cap=cap,
            seed=seed,
            delta=0.025,
            delta_draws=0.01,
            precision=100,
            epochs=self.epochs,
            batch_size=self.batch,
            lr=self.lr,
            decay=self.decay,
            milestones=self.milestones,
            interval=self.interval,
            draws=self.draws,
            per_draw=self.per_draw,
        )


def compared(
    what: Network,
    seeds: Sequence[int],
    variants: Sequence[str],
    cap: float | int,
    schedule: Schedule,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
    keep: Path | None = None,
) -> Iterator[tuple[int, dict[str, float], dict[str, list[float]]]]:
    """For each seed, numbers by variant ("iter/bound", …) and histories; all are optimized as one tensor program.

    A call that was stopped goes on from what is in the folder `keep`: each network that was trained, and the stack of
    posteriors as it was when an entry of the histories was last made.
    """
    weights = {seed: None if keep is None else keep / f"{seed}.trained" for seed in seeds}
    found = {seed: trained(what, seed, device, path) for seed, path in weights.items()}
    runs = [
        Run(net.model, net.init, (net.x, net.y), schedule.options(variant, cap, seed))
        for seed, net in found.items()
        for variant in variants
    ]
    stack = None if keep is None else keep / f"{checkpoints.fingerprint({}, {'seeds': list(seeds)})[:16]}.stack"
    results = iter(optimize_together(runs, schedule.every, progress, schedule.tf32, stack, save_every=schedule.every))
    rows = []  # none is given away before all are there: with some of the seeds recorded, the rest are another stack
    for seed, net in found.items():
        held, values, series = (net.held_x, net.held_y), {"test_error": net.test_error()}, {}
        for variant in variants:
            result = next(results)
            values["mean_error"] = result.mean_error
            values |= {f"{variant}/{name}": value for name, value in numbers(result).items()}
            values[f"{variant}/test"] = result.error_on(held, draws=100, seed=seed)
            series["epoch"] = [float(row["epoch"]) for row in result.history]
            series[f"{variant}/bound"] = [float(row["bound"]) for row in result.history]
        rows.append((seed, values, series))
    yield from rows


def numbers(result: PacBayes) -> dict[str, float]:
    """What is recorded of a bound."""
    layers = {f"kl/{name}": value for name, value in result.layer_kl.items()}
    return {
        "bound": result.bound,
        "uncorrected": result.bound_without_correction,
        "kl": result.kl,
        "error": result.error,
        "half_log_lambda": result.half_log_lambda,
        "j": float(result.j),
        **layers,
    }
