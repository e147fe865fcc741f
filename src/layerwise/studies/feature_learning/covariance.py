"""Covariances of the inputs: high and low anisotropy, their scale, and the repair of the printed low one."""

import math
import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe, unknown

ANISOTROPY = ("high", "low")
SCALES = ("none", "trace", "max")
REPAIRS = ("abs", "scaled")


def haar(rows: int, columns: int, generator: torch.Generator) -> Float[Tensor, "rows columns"]:
    """Row-orthonormal and uniform: QR of a Gaussian matrix with the signs of diag(R) made positive.

    >>> G = haar(2, 5, torch.Generator().manual_seed(0))
    >>> torch.allclose(G @ G.T, torch.eye(2, dtype=G.dtype))
    True
    """
    gaussian = torch.randn(columns, rows, generator=generator, dtype=torch.float64)
    Q, R = torch.linalg.qr(gaussian)
    return (Q * R.diagonal().sign()).mT.contiguous()


def covariance(
    dx: int,
    generator: torch.Generator,
    *,
    anisotropy: str = "high",
    scale: str = "none",
    repair: str | None = None,
) -> Float[Tensor, "dx dx"]:
    """Σ of a task. High: O diag(10^linspace(0, 5)) Oᵀ with O Haar. Low: (E + Eᵀ)/2 with E = 5I + N, repaired.

    Printed as it is, the low one is indefinite (its spectrum fills 5 ± √(2dx)). ``repair="abs"`` takes the absolute
    values of its eigenvalues and is the default, with a warning; ``"scaled"`` divides N by √dx.
    `scale` divides by the mean (``"trace"``) or the largest eigenvalue (``"max"``); ``"none"`` is Σ as printed.

    >>> S = covariance(10, torch.Generator().manual_seed(0), scale="trace")
    >>> round(float(S.trace()), 9), round(float(torch.linalg.cond(S)) / 1e5, 6)
    (10.0, 1.0)
    """
    check_covariance(anisotropy, scale, repair)
    Sigma = _high(dx, generator) if anisotropy == "high" else _low(dx, generator, repair)
    if scale == "trace":
        Sigma = Sigma * (dx / Sigma.trace())
    elif scale == "max":
        Sigma = Sigma / torch.linalg.eigvalsh(Sigma)[-1]
    return Sigma


def check_covariance(anisotropy: str, scale: str, repair: str | None) -> None:
    """Refuse names that are none, and a repair that leaves nothing to invert."""
    if anisotropy not in ANISOTROPY:
        raise InputError(unknown("anisotropy", anisotropy, ANISOTROPY))
    if scale not in SCALES:
        raise InputError(unknown("scale", scale, SCALES))
    if repair == "clip":
        raise InputError(
            describe(
                "repair='clip'",
                "a covariance that algorithms can invert; clipped eigenvalues leave about 28 of 100 at zero",
                "use repair='abs' or repair='scaled'",
            )
        )
    if repair not in (None, *REPAIRS):
        raise InputError(unknown("repair", repair, REPAIRS))


def _high(dx: int, generator: torch.Generator) -> Tensor:
    O = haar(dx, dx, generator)
    return _symmetric((O * 10 ** torch.linspace(0, 5, dx, dtype=torch.float64)) @ O.mT)


def _low(dx: int, generator: torch.Generator, repair: str | None) -> Tensor:
    N = torch.randn(dx, dx, generator=generator, dtype=torch.float64)
    if repair == "scaled":
        N = N / dx**0.5
    values, V = torch.linalg.eigh(_symmetric(5 * torch.eye(dx, dtype=torch.float64) + N))
    if repair is None and values[0] <= 0:
        warnings.warn(
            "the low-anisotropy matrix as printed is not positive definite; the absolute values of its eigenvalues "
            "are taken: say repair='abs' to agree, or repair='scaled'",
            stacklevel=3,
        )
    return _symmetric((V * (values if repair == "scaled" else values.abs())) @ V.mT)


def log_spaced(
    dx: int, condition: float | int, generator: torch.Generator, exponent: float | int = 1.0
) -> Float[Tensor, "dx dx"]:
    """A power of Σ = O diag(eigenvalues) Oᵀ with O Haar: logarithms evenly spaced, their ratio `condition`, mean one.

    >>> S = log_spaced(10, 100.0, torch.Generator().manual_seed(0))
    >>> round(float(S.trace()), 9), round(float(torch.linalg.cond(S)), 6)
    (10.0, 100.0)
    """
    if not condition >= 1:
        raise InputError(describe(f"condition={condition}", "a number ≥ 1", "pass largest over smallest eigenvalue"))
    values = torch.logspace(0, math.log10(condition), dx, dtype=torch.float64)
    O = haar(dx, dx, generator)
    return _symmetric((O * (values / values.mean()) ** exponent) @ O.mT)


def power(Sigma: Float[Tensor, "*b d d"], exponent: float) -> Float[Tensor, "*b d d"]:
    """Symmetric power of a positive definite matrix, by its eigenvalues."""
    values, V = torch.linalg.eigh(Sigma)
    return _symmetric((V * values.unsqueeze(-2) ** exponent) @ V.mT)


def _symmetric(A: Tensor) -> Tensor:
    return (A + A.mT) / 2
