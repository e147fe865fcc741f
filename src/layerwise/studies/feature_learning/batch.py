"""Batches as sufficient statistics: with a square loss and linear layers, XᵀX, YᵀX and |Y|² say all.

So every algorithm, rate and scale of a seed can use the same draws at the price of one Gram matrix.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

from layerwise.foundations.device import sent
from layerwise.studies.feature_learning.problem import Task


class Samples(NamedTuple):
    """A batch as it was drawn, for what needs more than second moments."""

    x: Float[Tensor, "*s n dx"]
    y: Float[Tensor, "*s n dy"]
    normal: Float[Tensor, "*s n dy"]
    """Standard normal, independent of the rest: turns a model's outputs into labels drawn from the model."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Second moments of a batch. Axes `*s` are seeds (and a place for rates)."""

    Sx: Float[Tensor, "*s dx dx"]
    """XᵀX / n."""
    Syx: Float[Tensor, "*s dy dx"]
    """YᵀX / n."""
    Syy: Float[Tensor, "*s"]
    """tr YᵀY / n."""
    samples: Callable[[], Samples]
    """What it was made of; kept until the batch goes."""

    @functools.cached_property
    def ols(self) -> Float[Tensor, "*s dy dx"]:
        """Least squares of y on x: Syx Sx⁻¹, shared by all that precondition with Sx."""
        return solve_right(self.Sx, self.Syx)


def solve_right(S: Float[Tensor, "*b d d"], A: Float[Tensor, "*c m d"]) -> Float[Tensor, "*e m d"]:
    """A S⁻¹ for S symmetric positive definite, by Cholesky of its lower half; not a number where S is not definite."""
    L, failed = torch.linalg.cholesky_ex(S)
    # on a GPU `cholesky_solve` goes matrix by matrix, or waits
    found = (substituted(A.mT, L) if L.is_cuda else torch.cholesky_solve(A.mT, L)).mT
    return found.masked_fill((failed != 0)[..., None, None], torch.nan)


def substituted(B: Float[Tensor, "*c d m"], L: Float[Tensor, "*b d d"]) -> Float[Tensor, "*e d m"]:
    """(LLᵀ)⁻¹ B for L lower triangular, by two triangular solves."""
    half = torch.linalg.solve_triangular(L, B, upper=False)
    return torch.linalg.solve_triangular(L.mT, half, upper=True)


def signs(n: int, d: int, random: np.random.Generator, device: torch.device | str = "cpu") -> Float[Tensor, "n d"]:
    """Uniform on {−1, +1}^(n×d), from random bits.

    >>> sorted(signs(4, 4, np.random.default_rng(0)).unique().tolist())
    [-1.0, 1.0]
    """
    octets = np.frombuffer(random.bytes(-(-n * d // 8)), dtype=np.uint8)
    return signs_of(sent(torch.from_numpy(octets.copy()), device), n, d)


def signs_of(octets: Integer[Tensor, "*s b"], n: int, d: int) -> Float[Tensor, "*s n d"]:
    """Random bits as signs."""
    found = shifted_out(octets) if octets.is_cuda else looked_up(octets)
    return found.view(*octets.shape[:-1], -1)[..., : n * d].unflatten(-1, (n, d))


def looked_up(octets: Integer[Tensor, "*s b"]) -> Float[Tensor, "m eight"]:
    """The eight signs of every octet, from a table: fast where a cache holds it."""
    return _octets(str(octets.device)).index_select(0, octets.flatten().int())


def shifted_out(octets: Integer[Tensor, "*s b"]) -> Float[Tensor, "m eight"]:
    """The eight signs of every octet, bit by bit: fast on a GPU, where a table is read octet by octet."""
    bits = octets.reshape(-1, 1) >> torch.arange(8, dtype=octets.dtype, device=octets.device) & 1
    return bits.to(torch.get_default_dtype()).mul_(2.0).sub_(1.0)


def random_octets(count: int, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """What `random.bytes` gives, five times faster, for generators of 64 bits such as SFC64.

    >>> one, other = (np.random.Generator(np.random.SFC64(0)) for _ in range(2))
    >>> random_octets(7, one).tobytes() == other.bytes(7)
    True
    """
    words = random.bit_generator.random_raw(-(-count // 8))
    return words.astype("<u8", copy=False).view(np.uint8)[:count]


@functools.cache
def _octets(device: str) -> Tensor:
    """The eight signs of every octet."""
    return torch.stack([(torch.arange(256) >> bit & 1) * 2.0 - 1.0 for bit in range(8)], dim=1).to(device)


class Numbers(NamedTuple):
    """The random numbers of a batch, as they come, on the host."""

    u: Shaped[Tensor, "*u"]
    """Octets of random bits, or normal numbers [n, dx]."""
    noise: Float[Tensor, "n dy"]
    seed: int


class Draws(NamedTuple):
    """What a batch is made of: x = Σ^½ u, y = F⋆G⋆x + noise."""

    u: Float[Tensor, "n dx"]
    noise: Float[Tensor, "n dy"]
    seed: int


def draw_numbers(task: Task, n: int, generator: torch.Generator) -> Numbers:
    """Draw on the CPU whatever the device, so that devices agree."""
    dy, dx = task.map.shape[-2:]
    noise = torch.empty(n, dy, dtype=torch.float64)
    u = torch.empty(-(-n * dx // 8), dtype=torch.uint8) if task.uniform else noise.new_empty(n, dx)
    return Numbers(u, noise, draw_into(u, noise, task, generator))


def draw_into(u: Shaped[Tensor, "*u"], noise: Float[Tensor, "n dy"], task: Task, generator: torch.Generator) -> int:
    """Fill memory of the host with a batch's numbers; returns their seed.

    Numbers come from numpy, seeded by one draw of the generator, since it makes normal ones three times faster.
    """
    seed = int(torch.randint(2**62, (), generator=generator))
    random = np.random.Generator(np.random.SFC64(seed))
    if task.uniform:
        u.numpy()[:] = random_octets(len(u), random)
    else:
        random.standard_normal(out=u.numpy())
    numbers = noise.numpy()
    random.standard_normal(out=numbers)
    numbers *= task.deviation
    return seed


def draw(task: Task, n: int, generator: torch.Generator) -> Draws:
    """One batch's numbers, on the task's device."""
    (u, noise, seed), device = draw_numbers(task, n, generator), task.root.device
    u = sent(u, device)
    return Draws(signs_of(u, n, task.map.shape[-1]) if task.uniform else u, sent(noise, device), seed)


def draw_batch(task: Task, n: int, generator: torch.Generator, *, dtype: torch.dtype = torch.float64) -> Batch:
    """The statistics of n samples. The Gram matrix of signs holds integers up to n, exact in single precision."""
    u, noise, seed = draw(task, n, generator)
    root, A = task.root, task.map
    exact = u.dtype == torch.float64 or n < 2**24
    Su = (u.mT @ u if exact else u.double().mT @ u.double()).double() / n
    wide = u.double()
    Sx = root @ Su @ root
    Sx = (Sx + Sx.mT) / 2
    Snx = (noise.mT @ wide) @ root / n
    A_Sx = A @ Sx

    def samples() -> Samples:
        x = wide @ root
        normal = sent(label_noise(n, len(A), seed), x.device)
        return Samples(x.to(dtype), (x @ A.mT + noise).to(dtype), normal.to(dtype))

    return Batch(
        Sx=Sx.to(dtype),
        Syx=(A_Sx + Snx).to(dtype),
        Syy=(((A_Sx + 2 * Snx) * A).sum() + noise.square().sum() / n).to(dtype),
        samples=samples,
    )


def label_noise(n: int, dy: int, seed: int) -> Float[Tensor, "n dy"]:
    """Standard normal numbers of a batch, independent of those that it is made of."""
    return _normal(n, dy, np.random.Generator(np.random.SFC64([seed, 1])))


def _normal(n: int, d: int, random: np.random.Generator) -> Float[Tensor, "n d"]:
    return torch.from_numpy(random.standard_normal((n, d)))


def stack(batches: Sequence[Batch]) -> Batch:
    """Batches of several seeds as one, with a place for rates, `[seed, 1, …]`; a single one is left as it is."""
    if len(batches) == 1:
        return batches[0]

    def samples() -> Samples:
        drawn = [b.samples() for b in batches]
        return Samples(*(torch.stack(parts).unsqueeze(1) for parts in zip(*drawn, strict=True)))

    names = ("Sx", "Syx", "Syy")
    stacked = {name: torch.stack([getattr(b, name) for b in batches]).unsqueeze(1) for name in names}
    return Batch(**stacked, samples=samples)
