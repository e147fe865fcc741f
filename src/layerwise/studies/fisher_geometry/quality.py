"""How near the structures of a Fisher matrix are to the matrix itself, at some points of a training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from layerwise import data
from layerwise.curvature.build import fisher
from layerwise.curvature.matrix import ParamMatrix
from layerwise.foundations.columns import from_flat, to_flat
from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.random import stream
from layerwise.kernel.jacobian import full_precision
from layerwise.studies.fisher_geometry.classifiers import Classifier
from layerwise.studies.fisher_geometry.convolutional import BLOCKS, ResNet, standardized

TRUTHS = ("dense", "implicit", "products")
BY_LAYER = ("diag", "quasidiag", "kfac", "ekfac")
"""Structures that need no dense block."""
ALL = ("diag", "quasidiag", "block", "kfac", "ekfac")
FACTORED = "kfac-trace"
"""K-FAC whose solve adds the damping to its factors; as "kfac" it adds it to their product."""
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """A network at one step of its training, and the examples of its Fisher matrix."""

    step: int
    model: nn.Module
    batch: Batch

    def loss(self) -> float:
        """Mean cross-entropy on the examples."""
        x, y = self.batch
        with torch.no_grad():
            return float(cross_entropy(self.model(x).flatten(0, -2), y.flatten()))


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What is asked of structures, and what they are compared with.

    F is the exact Fisher matrix of the model's labels: "dense"; or never formed, "implicit" (as `lw.fisher` has it) or
    "products" (those below, for convolutions on a GPU). Structures are exact too where `samples` is 0, and of so many
    drawn labels an example otherwise.
    """

    structures: Sequence[str] = ALL
    truth: str = "dense"
    samples: int = 0
    directions: int = 20
    """Uniform on the unit sphere; what is a mean over them has its standard error beside it, "…/se"."""
    together: int = 20
    """Directions that are multiplied at once: vectors are as large as the network."""
    dampings: Sequence[float] = (1e-4, 1e-3, 1e-2, 1e-1)
    memory: int | None = None
    """Bytes that the examples taken at once may need; None: half of what is free."""

    def __post_init__(self) -> None:
        if self.truth not in TRUTHS:
            raise InputError(not_one_of("truth", self.truth, TRUTHS))
        if self.directions < 2 or self.together < 1:
            given = f"directions={self.directions}, together={self.together}"
            raise InputError(describe(given, "two directions at least, one at a time at least", "raise them"))

    def of(self, model: nn.Module, batch: Batch, seed: int) -> dict[str, float]:
        """Values by name: "kfac/trace" and "kfac/quad" (relative errors), "kfac/cos", "kfac/solve/0.01", …

        Of a dense matrix there is "kfac/frobenius", too. A trace is compared with that of the matrix of the same
        labels, all else with F.
        """
        with full_precision():
            truth = "dense" if self.truth == "dense" else "implicit"
            F = fisher(model, batch, structure=truth, estimator="exact", memory=self.memory)
            times = F.__matmul__ if self.truth != "products" else lambda v: products(model, batch[0], v)
            pairs = [(v, times(v)) for v in self._directions(F, seed)]
            labels = self._labels(seed)
            same = fisher(model, batch, structure="implicit", **labels) if self.samples else F
            trace, whole = same.trace(), F.to_dense() if self.truth == "dense" else None
            found: dict[str, float] = {}
            for name in self.structures:
                # In float32 a small damping would be lost beside the largest eigenvalues of a large network.
                M = fisher(model, batch, structure=name, **labels).to(dtype=torch.float64)
                found[f"{name}/trace"] = float((M.trace() - trace).abs() / trace)
                if whole is not None:
                    found[f"{name}/frobenius"] = float((M.to_dense() - whole).norm() / whole.norm())
                found |= self._products(name, M, pairs) | self._solves(name, M, pairs)
        return found

    def _labels(self, seed: int) -> dict[str, Any]:
        """Arguments of all matrices that have the same labels."""
        drawn = {"estimator": "sampled", "samples": self.samples, "seed": seed}
        return {**(drawn if self.samples else {"estimator": "exact"}), "memory": self.memory}

    def _directions(self, F: ParamMatrix, seed: int) -> Iterator[Tensor]:
        """Columns of length 1, in float64 as all that is done with them but for ``Fv``."""
        generator = stream(seed, "directions", device=F.device)
        for start in range(0, self.directions, self.together):
            count = min(self.together, self.directions - start)
            v = torch.randn(F.numel(), count, generator=generator, dtype=torch.float64, device=F.device)
            yield v / v.norm(dim=0)

    def _products(self, name: str, M: ParamMatrix, pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """How far ``vᵀMv`` is from ``vᵀFv``, and the cosine of ``Mv`` and ``Fv``."""
        off, cos = [], []
        for v, Fv in pairs:
            Mv, true = M @ v, (v * Fv).sum(0)
            off.append(((v * Mv).sum(0) - true).abs() / true)
            cos.append(torch.cosine_similarity(Mv, Fv, dim=0))
        return _mean(f"{name}/quad", off) | _mean(f"{name}/cos", cos)

    def _solves(self, name: str, M: ParamMatrix, pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """The cosine of v and ``(M + λI)⁻¹ (F + λI) v``."""
        splits = {"kfac": "exact", FACTORED: "trace"} if name == "kfac" else {name: None}
        found: dict[str, float] = {}
        for label, split in splits.items():
            for damping in self.dampings:
                cos = []
                for v, Fv in pairs:
                    solved = M.solve(Fv + damping * v, damping=damping, damping_split=split)
                    cos.append(torch.cosine_similarity(solved, v, dim=0))
                found |= _mean(f"{label}/solve/{damping:g}", cos)
        return found


def products(model: nn.Module, x: Tensor, v: Tensor, at_once: int = 250) -> Tensor:
    """``Fv`` for columns v, ``F = 1/N Σ_n J_nᵀ (diag p − ppᵀ) J_n`` of softmax outputs, some examples at a time.

    The same as ``lw.fisher(…, structure="implicit", estimator="exact") @ v``, which goes without cuDNN, for the second
    derivatives that recurrent layers do not have there: on a GPU its convolutions take example by example.
    """
    params = {name: p.detach() for name, p in model.named_parameters()}
    shapes = {name: tuple(p.shape) for name, p in params.items()}
    columns = from_flat(v.mT.to(next(iter(params.values())).dtype), shapes)
    total = {name: torch.zeros_like(t) for name, t in columns.items()}
    for part in x.split(at_once):

        def outputs(params: dict[str, Tensor], part: Tensor = part) -> Tensor:
            return torch.func.functional_call(model, params, (part,))

        f, pull = torch.func.vjp(outputs, params)[:2]
        p = f.softmax(-1)
        for column in range(v.shape[1]):
            tangent = {name: t[column] for name, t in columns.items()}
            with warnings.catch_warnings():  # torch's own: forward mode loads scripts at its first use
                warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
                Jv = torch.func.jvp(outputs, (params,), (tangent,))[1]
            for name, g in pull(p * (Jv - (p * Jv).sum(-1, keepdim=True)))[0].items():
                total[name][column] += g
    return to_flat(total, shapes).mT.to(v.dtype) / len(x)


def _mean(name: str, parts: Sequence[Tensor]) -> dict[str, float]:
    """Over directions, with its standard error."""
    every = torch.cat(list(parts)).double()
    return {name: float(every.mean()), f"{name}/se": float(every.std() / len(every) ** 0.5)}


def memory_peak(device: str) -> dict[str, float]:
    """GB that tensors on a GPU took at most since the last call, as "memory/peak"; nothing of a CPU."""
    if torch.device(device).type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device) / 1e9
    torch.cuda.reset_peak_memory_stats(device)
    return {"memory/peak": peak}


@contextmanager
def seeded(seed: int, *names: str) -> Iterator[None]:
    """Weights of modules that are made here are drawn from a seed; torch's own random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream(seed, *names).initial_seed())
        yield


def along(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    draw: Callable[[], Batch],
    steps: Sequence[int],
    batch: Batch,
) -> Iterator[Snapshot]:
    """Train on drawn batches; the network itself, not a copy, after each of `steps`."""
    for step in range(max(steps) + 1):
        if step > 0:
            x, y = draw()
            optimizer.zero_grad()
            cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            optimizer.step()
        if step in steps:
            yield Snapshot(step, model, batch)


def digits(steps: Sequence[int], examples: int, seed: int, device: str = "cpu") -> Iterator[Snapshot]:
    """64-20-10 tanh in float64, by SGD, on digits with the mean image taken off; the first `examples` of them."""
    classifier = Classifier(hidden=(20,), activation="tanh", gain=1.0, lr=0.5, momentum=0.0)
    x, y = classifier.data()
    x = x - x.mean(0)
    batch = x[:examples].to(device), y[:examples].to(device)
    for step, model in classifier.trained(x, y, steps, seed):
        yield Snapshot(step, model.to(device), batch)


@dataclass(frozen=True, kw_only=True)
class ResNet18:
    """A residual network without batch norm on CIFAR-10, by SGD with momentum."""

    blocks: Sequence[int] = BLOCKS[18]
    channels: int = 64
    """Of the first stage."""
    images: int = 10_000
    """That it is trained on: the first ones."""
    lr: float = 0.01
    momentum: float = 0.9
    batch: int = 128

    def snapshots(self, steps: Sequence[int], examples: int, seed: int, device: str = "cpu") -> Iterator[Snapshot]:
        """The network after each of `steps`; its Fisher matrix is of the first `examples` images."""
        found = data.cifar10("train", limit=max(self.images, examples), progress=False)
        x, y = standardized(found.x).to(device), found.y.to(device)
        with seeded(seed, "resnet18"):
            model = ResNet(self.blocks, self.channels).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)
        generator = stream(seed, "resnet18", "batches")

        def draw() -> Batch:
            chosen = torch.randint(self.images, (self.batch,), generator=generator).to(device)
            return x[chosen], y[chosen]

        yield from along(model, optimizer, draw, steps, (x[:examples], y[:examples]))
