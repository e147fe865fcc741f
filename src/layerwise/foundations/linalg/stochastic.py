"""Trace, diagonal, Frobenius norm and log-determinant of an operator, from products with random columns.

Every estimate carries the standard error of its sampling. Products are made with blocks of at most ``chunk``
columns. Where the number of samples reaches the dimension, trace, diagonal and norm use the columns of the
identity instead: no more products, and exact.
"""

import math
from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import NumericalError, describe
from layerwise.foundations.linalg.checks import MatMul, apply_block, require_at_least
from layerwise.foundations.linalg.draws import Device, rademacher
from layerwise.foundations.linalg.eigh import guarded_eigh
from layerwise.foundations.linalg.estimate import Estimate
from layerwise.foundations.linalg.krylov import lanczos_form
from layerwise.foundations.linalg.norms import squared_norm

HUTCHPP_SAMPLES = 30  # below, a third of the samples is too few for a standard error


def hutchinson_trace(
    matmul: MatMul,
    d: int,
    samples: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
    *,
    method: Literal["auto", "hutchinson", "hutch++"] = "auto",
    chunk: int = 64,
) -> Estimate:
    """The trace from ``samples`` products with random columns.

        hutchinson: tr M = E zᵀMz,  z = ±1
        hutch++:    tr M = tr QᵀMQ + E zᵀ(I−QQᵀ)M(I−QQᵀ)z,  Q = orth(M Z)

    "auto" takes hutch++ from 30 samples on: a third of them sketch the leading space, a third evaluate it
    and a third (those that ``.samples`` counts) the rest.

    Reference: Hutchinson 1990; Meyer, Musco, Musco and Woodruff 2021, Hutch++, Algorithm 1.

    >>> M = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> float(hutchinson_trace(lambda X: M @ X, 2, 2, torch.Generator().manual_seed(0)))
    5.0
    """
    _check(d, samples, chunk)
    if method == "auto":
        method = "hutch++" if samples >= HUTCHPP_SAMPLES else "hutchinson"
        if samples >= d:
            draws = [(E * ME).sum() for E, ME in _identity(matmul, d, dtype, device, chunk)]
            return _exact(draws, d, dtype, device)
    if method == "hutchinson":
        pairs = _pairs(matmul, d, samples, generator, dtype, device, chunk)
        return Estimate.from_samples(torch.cat([(Z * MZ).sum(0) for Z, MZ in pairs]))
    rank = min(d, max(1, samples // 3))
    Z = rademacher(d, rank, generator, dtype, device)
    Q = torch.linalg.qr(_by_chunks(matmul, Z, chunk)).Q
    known = float((Q * _by_chunks(matmul, Q, chunk)).sum())
    rest = rademacher(d, max(1, samples - 2 * rank), generator, dtype, device)
    rest = rest - Q @ (Q.mT @ rest)
    return Estimate.from_samples((rest * _by_chunks(matmul, rest, chunk)).sum(0), offset=known)


def hutchinson_diagonal(
    matmul: MatMul,
    d: int,
    samples: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
    *,
    chunk: int = 64,
) -> tuple[Float[Tensor, "d"], Float[Tensor, "d"]]:
    """The diagonal and the standard error of each entry.

        diag M = E z ⊙ Mz,  z = ±1

    Reference: Bekas, Kokiopoulou and Saad 2007, An estimator for the diagonal of a matrix.

    >>> M = torch.diag(torch.arange(3.0))
    >>> hutchinson_diagonal(lambda X: M @ X, 3, 2, torch.Generator().manual_seed(0))[0].tolist()
    [0.0, 1.0, 2.0]
    """
    _check(d, samples, chunk)
    if samples >= d:
        values = sum((E * ME).sum(1) for E, ME in _identity(matmul, d, dtype, device, chunk))
        values = values if isinstance(values, Tensor) else torch.zeros(d, dtype=dtype, device=device)
        return values, torch.zeros_like(values)
    seen, mean = 0, torch.zeros(d, dtype=dtype, device=device)
    spread = torch.zeros_like(mean)
    for Z, MZ in _pairs(matmul, d, samples, generator, dtype, device, chunk):
        x = Z * MZ
        # Means and squared deviations of two groups are combined (Chan et al. 1979): sums of squares
        # would cancel where an entry is large and its spread small.
        block, here = x.shape[1], x.mean(1)
        shift = here - mean
        seen += block
        spread = spread + ((x - here[:, None]) ** 2).sum(1) + shift**2 * (block * (seen - block) / seen)
        mean = mean + shift * (block / seen)
    if samples == 1:
        return mean, torch.full_like(mean, math.inf)
    return mean, (spread / (samples - 1) / samples).sqrt()


def frobenius_squared(
    matmul: MatMul,
    d: int,
    samples: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
    *,
    chunk: int = 64,
) -> Estimate:
    """The squared Frobenius norm, ``‖M‖_F² = E ‖Mz‖²`` with ``z = ±1``, in float64: squares may not fit in `dtype`.

    Reference: Avron and Toledo 2011, Randomized algorithms for estimating the trace, applied to ``MᵀM``.

    >>> M = torch.tensor([[0.0, 2.0], [2.0, 1.0]])
    >>> float(frobenius_squared(lambda X: M @ X, 2, 2, torch.Generator().manual_seed(0)))
    9.0
    """
    _check(d, samples, chunk)
    if samples >= d:
        squares = [squared_norm(ME) for _, ME in _identity(matmul, d, dtype, device, chunk)]
        return _exact(squares, d, torch.float64, device)
    pairs = _pairs(matmul, d, samples, generator, dtype, device, chunk)
    return Estimate.from_samples(torch.cat([(MZ.double() ** 2).sum(0) for _, MZ in pairs]))


def slq_logdet(
    matmul: MatMul,
    d: int,
    damping: float,
    samples: int,
    steps: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
    *,
    chunk: int = 16,
) -> Estimate:
    """The log-determinant of the damped operator by stochastic Lanczos quadrature.

        log det(M + λI) ≈ d/s Σ_i Σ_k (e₁ᵀu_k)² log(θ_k + λ),  T_i = Σ_k θ_k u_k u_kᵀ from z_i = ±1

    The standard error is that of sampling only; raise ``steps`` to see the error of the quadrature. The
    chunk is small because Lanczos keeps ``steps`` blocks.

    Raises:
        NumericalError: an approximate eigenvalue of M + λI is not positive.

    Reference: Ubaru, Chen and Saad 2017, Fast estimation of tr(f(A)) via stochastic Lanczos quadrature.

    >>> M = torch.eye(3, dtype=torch.float64)
    >>> g = torch.Generator().manual_seed(0)
    >>> round(float(slq_logdet(lambda X: M @ X, 3, 1.0, 2, 3, g, torch.float64)) / math.log(2), 6)
    3.0
    """
    _check(d, samples, chunk)
    require_at_least("steps", steps, 1)
    draws = []
    for start in range(0, samples, chunk):
        Z = rademacher(d, min(chunk, samples - start), generator, dtype, device)
        form = lanczos_form(matmul, Z, steps)
        if form is None:  # d = 0: the determinant of nothing is 1
            return _exact([], 0, dtype, device)
        T = form.matrices().cpu().double()  # small; logarithms of ratios want the digits
        theta, U = guarded_eigh(T, name="Lanczos tridiagonal matrix", clamp=False)
        draws.append(d * (U[:, 0, :] ** 2 * _log_damped(theta, damping, dtype)).sum(-1))
    return Estimate.from_samples(torch.cat(draws).to(device=device, dtype=dtype))


def _log_damped(theta: Float[Tensor, "B k"], damping: float, dtype: torch.dtype) -> Float[Tensor, "B k"]:
    """``log(θ + λ)``, with θ that are negative by rounding alone raised to 0."""
    rounding = 100 * torch.finfo(dtype).eps * float(theta.abs().max())
    damped = torch.where((theta < 0) & (theta > -rounding), 0.0, theta) + damping
    if not (damped > 0).all():
        raise NumericalError(
            describe(
                f"an operator with approximate eigenvalue {float(theta.min()):.3g} and damping={damping:.3g}",
                "a positive definite M + λI",
                "pass damping > 0 and larger than minus the smallest eigenvalue",
            )
        )
    return damped.log()


def _check(d: int, samples: int, chunk: int) -> None:
    require_at_least("d", d, 0)
    require_at_least("samples", samples, 1)
    require_at_least("chunk", chunk, 1)


def _exact(parts: list[Tensor], d: int, dtype: torch.dtype, device: Device) -> Estimate:
    total = sum((float(part) for part in parts), 0.0)
    return Estimate(torch.tensor(total, dtype=dtype, device=device), standard_error=0.0, samples=max(1, d))


def _by_chunks(matmul: MatMul, X: Float[Tensor, "d B"], chunk: int) -> Float[Tensor, "d B"]:
    return torch.cat([apply_block(matmul, part) for part in X.split(chunk, dim=1)], dim=1)


def _pairs(
    matmul: MatMul,
    d: int,
    samples: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: Device,
    chunk: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks Z of random signs with their products M Z."""
    for start in range(0, samples, chunk):
        Z = rademacher(d, min(chunk, samples - start), generator, dtype, device)
        yield Z, apply_block(matmul, Z)


def _identity(
    matmul: MatMul, d: int, dtype: torch.dtype, device: Device, chunk: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks E of columns of the identity with their products M E."""
    for start in range(0, d, chunk):
        E = torch.zeros(d, min(chunk, d - start), dtype=dtype, device=device)
        E[start : start + E.shape[1]].fill_diagonal_(1.0)
        yield E, apply_block(matmul, E)
