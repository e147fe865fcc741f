"""Both objectives from the same data and the same start, all seeds as one tensor program."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.progress import Progress
from layerwise.foundations.random import stream
from layerwise.selfsup.sparse_coding.data import SparseData, sample_sparse_data, start_dictionary
from layerwise.selfsup.sparse_coding.losses import heldout_masked_loss, hidden_count, reconstruction_loss
from layerwise.selfsup.sparse_coding.recovery import recovery_error
from layerwise.selfsup.sparse_coding.training import Make, train_dictionaries

OBJECTIVES = ("standard", "masked")
PRECISIONS = {"single": torch.float32, "double": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A truth, its samples, and how dictionaries are trained on them."""

    d: int = 50
    p: int = 100
    k: int = 3
    sigma: float | int = 50**-0.5
    n: int = 500
    atoms: int = 200
    """p′ of the text."""
    start: str = "sample"
    hidden_fraction: float | int = 0.1
    batch: int = 100
    epochs: int = 300
    lr: float | int = 1e-3
    held_out: int = 0
    """Samples whose losses are followed; 0: they are not."""
    precision: str = "single"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise InputError(not_one_of("precision", self.precision, PRECISIONS))
        if self.start == "local" and self.atoms < self.p:
            given = f"{self.atoms} atoms from a local start of {self.p}"
            raise InputError(describe(given, "at least as many as the truth has", "take more atoms"))
        if not 1 <= self.k <= min(self.p, self.d - hidden_count(self.d, self.hidden_fraction)):
            given = f"k={self.k} of {self.p} atoms in {self.d} coordinates"
            raise InputError(describe(given, "no more than atoms and than visible coordinates", "take a smaller k"))

    def data(self, seed: int) -> SparseData:
        """The truth, its samples, and held-out ones: first those of the start."""
        random = stream(seed, "sparse coding")
        sizes = (self.d, self.p, self.k, self.n, self.sigma)
        held_out = self.atoms + self.held_out
        return sample_sparse_data(*sizes, held_out=held_out, generator=random, dtype=PRECISIONS[self.precision])


@dataclass
class Curves:
    """What was seen along one training."""

    epoch: list[int] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    """Recovery error (cosine)."""
    masked: list[float] = field(default_factory=list)
    """Masked loss of held-out samples."""
    reconstruction: list[float] = field(default_factory=list)
    """Standard loss of held-out samples."""


def compare(
    setting: Setting,
    seeds: Sequence[int],
    *,
    objectives: Sequence[str] = OBJECTIVES,
    every: int = 25,
    optimizer: Make | None = None,
    progress: Progress | None = None,
) -> dict[str, list[Curves]]:
    """For each objective, the curves of each seed.

    >>> setting = Setting(d=20, p=20, k=2, n=60, atoms=30, batch=30, epochs=2)
    >>> found = compare(setting, [0, 1], every=1)
    >>> found["masked"][1].epoch, found["standard"][0].error[0] == found["masked"][0].error[0]
    ([0, 1, 2], True)
    """
    drawn, times = [setting.data(seed) for seed in seeds], len(objectives)
    A, Y, rest = (_stacked([getattr(one, name) for one in drawn], times, setting) for name in ("A", "Y", "held_out"))
    starts = [start_dictionary(setting.start, setting.atoms, one) for one in drawn]
    others = rest[:, setting.atoms :]
    curves = [Curves() for _ in range(times * len(seeds))]

    def watch(epoch: int, B: Tensor) -> None:
        columns = {"error": recovery_error(A, B)}
        if setting.held_out:
            columns["masked"] = heldout_masked_loss(others, B, setting.k, setting.hidden_fraction)
            columns["reconstruction"] = reconstruction_loss(others, B, setting.k)
        for name, column in columns.items():
            for one, number in zip(curves, column.tolist(), strict=True):
                getattr(one, name).append(number)
        for one in curves:
            one.epoch.append(epoch)

    hidden = hidden_count(setting.d, setting.hidden_fraction)
    with one_thread(setting.device):
        train_dictionaries(
            Y,
            _stacked(starts, times, setting),
            setting.k,
            hidden=[hidden * (objective == "masked") for objective in objectives for _ in seeds],
            generators=[stream(seed, "masks") for _ in objectives for seed in seeds],
            lr=setting.lr,
            batch_size=setting.batch,
            epochs=setting.epochs,
            optimizer=optimizer,
            watch=watch,
            every=every,
            progress=progress,
        )
    return {name: curves[i * len(seeds) : (i + 1) * len(seeds)] for i, name in enumerate(objectives)}


def _stacked(parts: Sequence[Tensor], times: int, setting: Setting) -> Tensor:
    return torch.stack([*parts] * times).to(setting.device)


@contextlib.contextmanager
def one_thread(device: str) -> Iterator[None]:
    """In steps of a millisecond a second thread costs more than it gives."""
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_much_noise_as_signal(d: int) -> float:
    """σ = 1/√d.

    >>> as_much_noise_as_signal(100)
    0.1
    """
    return 1 / math.sqrt(d)
