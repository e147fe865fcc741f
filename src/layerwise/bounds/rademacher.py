"""Empirical Rademacher complexity of linear classes and of learning flows: bounds, and values by Monte Carlo.

R̂ = E_σ sup_f (1/n) Σ_i σ_i f(x_i), without an absolute value (6.4.1), of scalar functions f(x) = ⟨w, Φ(x)⟩ with
‖w‖_A ≤ M, where ‖w‖²_A = wᵀAAᵀw. Everything is a function of the kernel K_A = Φ(AAᵀ)⁻¹Φᵀ on the n examples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream
from layerwise.kernel.kernel import Kernel

Number = int | float
DRAWS_AT_ONCE = 4096


class Estimate(NamedTuple):
    """A mean of independent draws."""

    value: float
    standard_error: float


def rescaled_kernel(features: Float[Tensor, "n P"], A: Float[Tensor, "P P"]) -> Float[Tensor, "n n"]:
    """K_A = Φ(AAᵀ)⁻¹Φᵀ, the kernel of features A⁻¹φ.

    >>> rescaled_kernel(torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 1.0]])).tolist()
    [[0.25, 0.0], [0.0, 1.0]]
    """
    scaled = torch.linalg.solve(A, features.mT)
    return scaled.mT @ scaled


def rademacher_bound(kernel: Tensor | Kernel, radius: Number) -> float:
    """R̂ ≤ (M/n) √Tr K of functions with ‖w‖ ≤ M = `radius` (6.4.3); needs no more than the diagonal of K.

    >>> rademacher_bound(4 * torch.eye(100), radius=3.0)
    0.6
    """
    n, trace = _trace(kernel)
    return float(_radius(radius) / n * trace**0.5)


def rademacher(kernel: Tensor | Kernel, radius: Number, *, draws: int = 10_000, seed: int = 0) -> Estimate:
    """R̂ = (M/n) E_σ √(σᵀKσ) itself, by Monte Carlo over the signs σ.

    >>> K = torch.ones(2, 2)  # σᵀKσ is 4 or 0, each half of the time
    >>> abs(rademacher(K, radius=1.0).value - 0.5) < 0.02
    True
    """
    return flow_rademacher([kernel], [radius], draws=draws, seed=seed)


def flow_rademacher_bound(kernels: Sequence[Tensor | Kernel], radii: Sequence[Number]) -> float:
    """R̂ ≤ Σ_t (m_t/n) √Tr K_t of functions Σ_t ⟨δw_t, Φ_t⟩ with ‖δw_t‖ ≤ m_t (Theorem 6.4.1).

    The sequence of kernels is fixed: for one that depends on the labels the bound is a heuristic, see `FlowComplexity`.

    >>> flow_rademacher_bound([torch.eye(4), 4 * torch.eye(4)], [1.0, 0.5])
    1.0
    """
    _same_examples(kernels, radii)
    return sum(rademacher_bound(kernel, radius) for kernel, radius in zip(kernels, radii, strict=True))


def flow_rademacher(
    kernels: Sequence[Tensor | Kernel], radii: Sequence[Number], *, draws: int = 10_000, seed: int = 0
) -> Estimate:
    """R̂ = (1/n) E_σ Σ_t m_t √(σᵀK_tσ) itself, by Monte Carlo over the signs σ.

    Args:
        kernels: one matrix ``[n, n]`` (or kernel of one function) for each step.
        radii: m_t ≥ 0, one for each step.
        draws: of σ.
        seed: of the draws; torch's own random state is left alone.
    """
    _same_examples(kernels, radii)
    if draws < 2:
        raise InputError(describe(f"draws={draws}", "two or more", "take e.g. 10000"))
    matrices = [_matrix(kernel).double().cpu() for kernel in kernels]
    n, generator = len(matrices[0]), stream(seed, "rademacher")
    found = []
    for start in range(0, draws, DRAWS_AT_ONCE):
        signs = torch.randint(2, (min(DRAWS_AT_ONCE, draws - start), n), generator=generator).double() * 2 - 1
        total = torch.zeros(len(signs), dtype=torch.float64)
        for K, radius in zip(matrices, radii, strict=True):
            total += _radius(radius) * ((signs @ K) * signs).sum(1).clamp_min(0).sqrt()
        found.append(total / n)
    values = torch.cat(found)
    return Estimate(float(values.mean()), float(values.std() / draws**0.5))


def multiclass_bound(kernel: Tensor | Kernel, radius: Number, margin: Number, classes: int | None = None) -> float:
    """R̂ of the margin loss ≤ (c^(3/2) M / γn) √Tr K, with the kernel ``[nc, nc]`` of all outputs (B.2.27).

    Args:
        kernel: of n examples and c outputs: from `lw.ntk`, or a matrix with `classes` outputs an example.
        radius: M.
        margin: γ > 0.
        classes: c, where the kernel is a matrix.

    >>> round(multiclass_bound(torch.eye(30), radius=1.0, margin=0.5, classes=3), 6)
    5.6921
    """
    c = kernel.functions if isinstance(kernel, Kernel) else classes
    rows = kernel.shape[0]
    if c is None or c < 1 or rows % c or (classes not in (None, c)):
        given = f"a kernel of {rows} rows with classes={classes}"
        raise InputError(describe(given, "a number of classes that divides the rows", "pass classes= of the matrix"))
    if not margin > 0:
        raise InputError(describe(f"margin={margin}", "a number > 0", "take e.g. a percentile of `margins`"))
    trace = float(kernel.trace())
    return float(c**1.5 * _radius(radius) / (margin * (rows // c)) * trace**0.5)


def _matrix(kernel: Tensor | Kernel) -> Tensor:
    _check(kernel)
    return kernel.matrix() if isinstance(kernel, Kernel) else kernel


def _trace(kernel: Tensor | Kernel) -> tuple[int, float]:
    _check(kernel)
    return kernel.shape[0], float(kernel.trace())


def _check(kernel: Tensor | Kernel) -> None:
    if isinstance(kernel, Kernel):
        kernel.require_square("the Rademacher complexity")
        if kernel.functions != 1:
            given = f"a kernel of {kernel.functions} functions an example"
            do = "take one with outputs=, or `multiclass_bound`"
            raise InputError(describe(given, "one scalar function", do))
    elif kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1] or not len(kernel):
        raise InputError(describe(f"a kernel of shape {tuple(kernel.shape)}", "a square matrix", "pass K = ΦΦᵀ"))


def _radius(radius: Number) -> Number:
    if not 0 <= radius < float("inf"):
        raise InputError(describe(f"radius={radius}", "a number ≥ 0", "pass the norm of the weights, or a bound of it"))
    return radius


def _same_examples(kernels: Sequence[Tensor | Kernel], radii: Sequence[Number]) -> None:
    rows = {kernel.shape[0] for kernel in kernels}
    if len(kernels) != len(radii) or len(rows) != 1:
        given = f"{len(kernels)} kernels of {sorted(rows)} rows and {len(radii)} radii"
        raise InputError(describe(given, "one radius for each kernel, all on the same examples", "pass equally many"))
