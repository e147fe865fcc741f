"""The problem y = F⋆G⋆x + ε: a representation G⋆ that tasks share, with inputs, heads and noise of their own."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe, unknown
from layerwise.studies.feature_learning.covariance import check_covariance, covariance, haar, power

DATA = ("uniform", "gaussian")
NOISE_IS = ("sd", "var")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes and laws of the experiments of arXiv 2502.01763, Appendix F.1: eq. (13) and (38).

    >>> Setting(scale="trace").batch
    1024
    """

    dx: int = 100
    dy: int = 15
    k: int = 8
    batch: int = 1024
    test_batch: int = 1024
    data: str = "uniform"
    """"uniform": x = Σ^½ u with u uniform on {−1, +1}^dx, eq. (13). "gaussian": x ~ N(0, Σ), eq. (38)."""
    anisotropy: str = "high"
    scale: str = "none"
    """"none": Σ as printed. "trace": Σ dx / tr Σ. "max": Σ over its largest eigenvalue."""
    repair: str | None = None
    noise: float = 0.1
    test_noise: float = 1.0
    noise_is: str = "sd"
    """What the noise's numbers are: standard deviations, as in (13), or variances, as printed in (38)."""
    head_shift: float = 0.005
    """How far heads of tasks differ: F⋆ = expm(head_shift (B − Bᵀ)) F₀."""

    def __post_init__(self) -> None:
        if not 1 <= self.k <= min(self.dx, self.dy):
            raise InputError(describe(f"k={self.k}, dx={self.dx}, dy={self.dy}", "1 ≤ k ≤ min(dx, dy)", "choose a k"))
        if min(self.batch, self.test_batch) < self.k:
            given = f"batch={self.batch}, test_batch={self.test_batch}"
            raise InputError(describe(given, f"at least k={self.k} samples for a head", "give larger batches"))
        if self.data not in DATA:
            raise InputError(unknown("data", self.data, DATA))
        check_covariance(self.anisotropy, self.scale, self.repair)
        if self.noise_is not in NOISE_IS:
            raise InputError(unknown("meaning of noise", self.noise_is, NOISE_IS))
        if min(self.noise, self.test_noise) < 0:
            raise InputError(describe(f"noise={self.noise}, {self.test_noise}", "numbers ≥ 0", "leave the sign away"))

    def deviation(self, noise: int | float) -> float:
        """The noise's standard deviation."""
        return float(noise) if self.noise_is == "sd" else float(noise) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Task:
    """One law of (x, y): x = Σ^½ u, y = F⋆G⋆x + ε with ε ~ N(0, deviation² I)."""

    Sigma: Float[Tensor, "*s dx dx"]
    root: Float[Tensor, "*s dx dx"]
    """The symmetric square root; another root would change the higher moments of x."""
    map: Float[Tensor, "*s dy dx"]
    """F⋆G⋆."""
    deviation: float
    uniform: bool


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What one seed learns: the shared representation, the training task and the task it is transferred to."""

    G: Float[Tensor, "k dx"]
    train: Task
    test: Task


def draw_problem(setting: Setting, generator: torch.Generator) -> Problem:
    """G⋆ Haar, heads near one another, an independent covariance for each task.

    >>> from layerwise.foundations.random import stream
    >>> p = draw_problem(Setting(dx=6, dy=3, k=2), stream(0, "problem"))
    >>> p.train.map.shape
    torch.Size([3, 6])
    """
    G = haar(setting.k, setting.dx, generator)
    F0 = torch.randn(setting.dy, setting.k, generator=generator, dtype=torch.float64)

    def task(noise: float) -> Task:
        B = torch.randn(setting.dy, setting.dy, generator=generator, dtype=torch.float64)
        head = torch.linalg.matrix_exp(setting.head_shift * (B - B.mT)) @ F0
        Sigma = covariance(
            setting.dx,
            generator,
            anisotropy=setting.anisotropy,
            scale=setting.scale,
            repair=setting.repair,
        )
        return Task(
            Sigma=Sigma,
            root=power(Sigma, 0.5),
            map=head @ G,
            deviation=setting.deviation(noise),
            uniform=setting.data == "uniform",
        )

    return Problem(G=G, train=task(setting.noise), test=task(setting.test_noise))
