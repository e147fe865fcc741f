"""A teacher with k non-linear features, and inputs that are anisotropic and Gaussian or only sub-Gaussian.

y = F⋆ tanh(G⋆x) + ε with orthonormal rows of G⋆, and x = Σ^½u with independent entries of u. Tasks share G⋆; covariance
and head are a task's own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe, unknown
from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.covariance import haar, log_spaced


def gaussian(n: int, dx: int, random: torch.Generator) -> Tensor:
    """Standard normal entries."""
    return torch.randn(n, dx, generator=random, dtype=torch.float64)


def _rademacher(n: int, dx: int, random: torch.Generator) -> Tensor:
    return torch.randint(2, (n, dx), generator=random).double() * 2 - 1


def _uniform(n: int, dx: int, random: torch.Generator) -> Tensor:
    return (torch.rand(n, dx, generator=random, dtype=torch.float64) * 2 - 1) * 3**0.5


def _sparse(n: int, dx: int, random: torch.Generator) -> Tensor:
    """±√5 with probability 1/10 each, else 0."""
    drawn = torch.rand(n, dx, generator=random, dtype=torch.float64)
    return 5**0.5 * ((drawn < 0.1).double() - (drawn > 0.9).double())


LAWS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "gaussian": gaussian,
    "rademacher": _rademacher,
    "uniform": _uniform,
    "sparse": _sparse,
}
"""Laws of the entries of u, all independent with mean zero and variance one; all but the first are bounded."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Teacher, inputs and student.

    >>> Network(depth=3, dh=5).student(0)
    Sequential(
      (0): Linear(in_features=40, out_features=5, bias=False)
      (1): Tanh()
      (2): Linear(in_features=5, out_features=5, bias=False)
      (3): Tanh()
      (4): Linear(in_features=5, out_features=8, bias=False)
    )
    """

    dx: int = 40
    k: int = 4
    """Features of the teacher."""
    dy: int = 8
    condition: float | int = 1e3
    """Largest over smallest eigenvalue of Σ, with logarithms evenly spaced; the mean eigenvalue is one."""
    law: str = "gaussian"
    """Of the entries of u; see `LAWS`."""
    noise: float | int = 0.1
    """Standard deviation of ε."""
    dh: int = 32
    """Width of the student's hidden layers."""
    depth: int = 2
    """Layers of the student."""
    batch: int = 256

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise InputError(unknown("law", self.law, LAWS))
        if not 1 <= self.k <= min(self.dx - 1, self.dy, self.dh) or self.depth < 2:
            raise InputError(
                describe(
                    f"k={self.k}, dx={self.dx}, dy={self.dy}, dh={self.dh}, depth={self.depth}",
                    "1 ≤ k < dx, k ≤ dy, dh and two layers or more",
                    "change the sizes",
                )
            )
        if not (1 <= self.condition < math.inf and 0 <= self.noise < math.inf and self.batch >= 1):
            raise InputError(
                describe(
                    f"condition={self.condition}, noise={self.noise}, batch={self.batch}",
                    "finite numbers, condition ≥ 1, noise ≥ 0 and batch ≥ 1",
                    "change them",
                )
            )

    def student(self, seed: int) -> nn.Module:
        """A tanh network without biases, with torch's usual initial weights drawn from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream(seed, "networks", "student").initial_seed())
            return self._student()

    def _student(self) -> nn.Module:
        widths = [self.dx, *[self.dh] * (self.depth - 1)]
        layers: list[nn.Module] = []
        for rows, columns in zip(widths[1:], widths[:-1], strict=True):
            layers += [nn.Linear(columns, rows, bias=False, dtype=torch.float64), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(self.dh, self.dy, bias=False, dtype=torch.float64))


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned: the features are shared between tasks, covariance and head are a task's own."""

    network: Network
    root: Float[Tensor, "dx dx"]
    """Σ^½."""
    G: Float[Tensor, "k dx"]
    F: Float[Tensor, "dy k"]

    def inputs(self, n: int, random: torch.Generator) -> Float[Tensor, "n dx"]:
        """x = Σ^½u."""
        return LAWS[self.network.law](n, self.network.dx, random) @ self.root

    def clean(self, x: Float[Tensor, "n dx"]) -> Float[Tensor, "n dy"]:
        """F⋆ tanh(G⋆x)."""
        return torch.tanh(x @ self.G.mT) @ self.F.mT

    def sample(self, n: int, random: torch.Generator) -> tuple[Float[Tensor, "n dx"], Float[Tensor, "n dy"]]:
        """Inputs and noisy labels."""
        x = self.inputs(n, random)
        return x, self.clean(x) + self.network.noise * gaussian(n, self.network.dy, random)


def draw_task(network: Network, seed: int) -> Task:
    """The task of a seed.

    >>> task = draw_task(Network(dx=6, k=2, dy=3), 0)
    >>> round(float((task.root @ task.root).trace()), 9)
    6.0
    """
    random = stream(seed, "networks", "task")
    F = torch.randn(network.dy, network.k, generator=random, dtype=torch.float64) / network.k**0.5
    G = haar(network.k, network.dx, random)
    return Task(network=network, root=_root(network, random), G=G, F=F)


def _root(network: Network, random: torch.Generator) -> Float[Tensor, "dx dx"]:
    return log_spaced(network.dx, network.condition, random, 0.5)


def other_task(task: Task, seed: int) -> Task:
    """A task with the same features, and a covariance and a head of its own."""
    random = stream(seed, "networks", "other")
    F = torch.randn(task.F.shape, generator=random, dtype=torch.float64) / task.network.k**0.5
    return replace(task, root=_root(task.network, random), F=F)
