"""One step of SGD or KFAC on a single-index problem: which direction does the first layer learn?

y = σ⋆(β⋆ᵀx) + ε with x ~ N(0, Σ), eq. (12) of arXiv 2502.01763, is learned by fᵀσ(Gx). From small random weights one
full-batch step adds nearly a rank-one matrix a η f₀bᵀ to G (Theorem 3.9); `one_step` measures what it learned. The
inputs are Gaussian, β⋆ and G₀ rotation invariant, so Σ is diagonal without loss.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe, unknown
from layerwise.foundations.random import stream

CHUNK = 1000
"""Samples whose hidden units are held at once."""


def hermite_link(z: Tensor) -> Tensor:
    """σ⋆(z) = z + (z² − 1)/√2, with E σ⋆ = 0, E σ⋆′ = 1 and E σ⋆² = 2 for z ~ N(0, 1).

    The paper's coefficient of z² − 1 cannot be read with certainty; 1/√2 normalises the second Hermite polynomial.

    >>> hermite_link(torch.tensor([1.0, -1.0])).tolist()
    [1.0, -1.0]
    """
    return z + (z * z - 1) / 2**0.5


def _tanh(h: Tensor) -> tuple[Tensor, Tensor]:
    value = torch.tanh(h)
    return value, 1 - value.square()


def _relu(h: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(h), (h > 0).to(h.dtype)


def _identity(h: Tensor) -> tuple[Tensor, Tensor]:
    return h, torch.ones_like(h)


ACTIVATIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "tanh": _tanh,
    "relu": _relu,
    "identity": _identity,
}
"""σ and σ′ of the student; the paper does not name its own."""


@dataclass(frozen=True, kw_only=True)
class SingleIndex:
    """Sizes and laws of eq. (12) and (14); the defaults are those of Figure 3, left.

    >>> SingleIndex(dx=4, n=10, dh=5, anisotropy=0.5).eigenvalues.tolist()
    [1.5, 1.5, 0.5, 0.5]
    """

    dx: int = 900
    n: int = 5000
    dh: int = 1000
    anisotropy: float | int = 0.5
    """e of eq. (14): half of the eigenvalues of Σ are 1 + e, half are 1 − e."""
    spectrum: tuple[float | int, ...] | None = None
    """The eigenvalues of Σ, if they are not those of eq. (14); their mean must be one, so that E σ⋆ = 0."""
    noise: float | int = 1.0
    """Standard deviation of ε."""
    activation: str = "tanh"

    def __post_init__(self) -> None:
        if min(self.n, self.dh) < 1 or self.dx < 2 or (self.spectrum is None and self.dx % 2):
            raise InputError(
                describe(f"dx={self.dx}, n={self.n}, dh={self.dh}", "n, dh ≥ 1 and an even dx ≥ 2", "change the sizes")
            )
        if not 0 <= self.anisotropy < 1:
            raise InputError(describe(f"anisotropy={self.anisotropy}", "a number in [0, 1)", "pass e.g. 0.5"))
        if self.noise < 0:
            raise InputError(describe(f"noise={self.noise}", "a number ≥ 0", "leave the sign away"))
        if self.activation not in ACTIVATIONS:
            raise InputError(unknown("activation", self.activation, ACTIVATIONS))
        if self.spectrum is not None:
            self._check_spectrum(self.spectrum)

    def _check_spectrum(self, spectrum: tuple[float | int, ...]) -> None:
        mean = sum(spectrum) / max(len(spectrum), 1)
        if len(spectrum) != self.dx or not min(spectrum) > 0 or not abs(mean - 1) < 1e-9:
            raise InputError(
                describe(
                    f"a spectrum of {len(spectrum)} numbers with mean {mean:.6g}",
                    f"dx={self.dx} positive numbers with mean 1",
                    "divide by the mean",
                )
            )

    @property
    def eigenvalues(self) -> Float[Tensor, "dx"]:
        """The diagonal of Σ."""
        if self.spectrum is not None:
            return torch.tensor(self.spectrum, dtype=torch.float64)
        half = torch.ones(self.dx // 2, dtype=torch.float64)
        return torch.cat([(1 + self.anisotropy) * half, (1 - self.anisotropy) * half])


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Inputs and labels."""

    x: Float[Tensor, "n dx"]
    y: Float[Tensor, "n"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one seed draws: β⋆ ~ N(0, I/dx), a sample, and initial weights f₀ ~ N(0, I/dh), G₀ ~ N(0, 1/dx)."""

    setting: SingleIndex
    index: Float[Tensor, "dx"]
    sample: Sample
    f0: Float[Tensor, "dh"]
    G0: Float[Tensor, "dh dx"]


def draw_sample(setting: SingleIndex, index: Float[Tensor, "dx"], n: int, random: np.random.Generator) -> Sample:
    """n samples of eq. (12)."""
    x = _normal(n, setting.dx, random) * setting.eigenvalues.sqrt()
    return Sample(x=x, y=hermite_link(x @ index) + setting.noise * _normal(n, 1, random)[:, 0])


def draw_trial(setting: SingleIndex, seed: int) -> Trial:
    """The problem, the sample and the weights of a seed; settings of one seed do not share draws.

    >>> draw_trial(SingleIndex(dx=4, n=10, dh=5), 0).G0.shape
    torch.Size([5, 4])
    """
    random = randomness(setting, seed, "trial")
    index = _normal(setting.dx, 1, random)[:, 0] / setting.dx**0.5
    return Trial(
        setting=setting,
        index=index,
        sample=draw_sample(setting, index, setting.n, random),
        f0=_normal(setting.dh, 1, random)[:, 0] / setting.dh**0.5,
        G0=_normal(setting.dh, setting.dx, random) / setting.dx**0.5,
    )


def randomness(setting: SingleIndex, seed: int, name: str) -> np.random.Generator:
    """A generator for one purpose of one seed of one setting."""
    drawn = torch.randint(2**62, (), generator=stream(seed, "single-index", name, repr(setting)))
    return np.random.Generator(np.random.SFC64(int(drawn)))


def _normal(rows: int, columns: int, random: np.random.Generator) -> Float[Tensor, "rows columns"]:
    return torch.from_numpy(random.standard_normal((rows, columns)))


def one_step(trial: Trial) -> Float[Tensor, "dh dx"]:
    """(G_SGD − G₀)/η = −√dh ∇_G L̂ at f = f₀/√dh: diag(f₀) [σ′(G₀Xᵀ) diag(y − ŷ)] X / n, eq. (24).

    KFAC's change is this times (Sx + λI)⁻¹. Samples are taken a thousand at a time.

    >>> one_step(draw_trial(SingleIndex(dx=4, n=10, dh=5), 0)).shape
    torch.Size([5, 4])
    """
    activation = ACTIVATIONS[trial.setting.activation]
    total = torch.zeros_like(trial.G0)
    for x, y in zip(trial.sample.x.split(CHUNK), trial.sample.y.split(CHUNK), strict=True):
        value, slope = activation(x @ trial.G0.mT)
        residual = y - value @ trial.f0 / trial.setting.dh**0.5
        total += (slope * residual[:, None]).mT @ x
    return trial.f0[:, None] * total / len(trial.sample.y)
