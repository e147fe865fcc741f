"""Measures of kernels: alignment, CKA, effective rank, trace ratios, spectra.

Two centerings exist and differ ("per-output" and "global", see `Kernel.centered`); every measure takes
``centering=``. Alignment is uncentred by default, as in the study of lazy training; the others centre per output.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.linalg import guarded_eigh
from layerwise.kernel.kernel import Kernel, MatrixKernel, center, check_centering

EIGEN_FLOOR = 1e-12
"""Eigenvalues up to this part of the largest count as zero; of a float32 kernel, up to its precision."""


def alignment(K: Kernel | Tensor, target: Any, centering: str = "none") -> Float[Tensor, ""]:
    """``⟨K, K′⟩ / (‖K‖ ‖K′‖)``: the cosine between two kernels, in [0, 1] for positive semi-definite ones.

    With a target given as labels or values, ``K′`` is the kernel of the target itself: ``Y Yᵀ`` with Y one-hot
    labels ``[N·P]`` or values ``[N, P]`` flattened example-major, centred like K. Where the kernel has one function an
    example and labels are integers, ``K′_nm = 1`` if both have the same label, else 0.

    >>> import torch, layerwise as lw
    >>> K = torch.eye(4, dtype=torch.float64)
    >>> float(lw.alignment(K, torch.ones(4, 4, dtype=torch.float64)))
    0.5

    Args:
        K: a square kernel, or its matrix.
        target: another kernel or matrix; integer labels ``[N]``; or values ``[N, P]`` (``[N]`` where P is 1).
        centering: "none", "per-output" or "global".
    """
    check_centering(centering)
    first = _as_kernel(K, "K")
    kernel = first.centered(centering).matrix().double()
    other = _target(target, first)
    if isinstance(other, Kernel):
        values = other.centered(centering).matrix().double()
        return _cosine((kernel * values).sum(), kernel.norm() * values.norm())
    Y = center(other.double(), first.functions, centering)  # rows: vectors y with K′ = Σ y yᵀ
    inner = torch.einsum("bi,ij,bj->", Y, kernel, Y)
    return _cosine(inner, kernel.norm() * (Y @ Y.mT).norm())


def cka(K: Kernel | Tensor, K2: Any, centering: str = "per-output") -> Float[Tensor, ""]:
    """Centred kernel alignment: the cosine between two centred kernels, or between a kernel and labels.

    As `alignment`, centred: per output by default, or ``centering="global"`` for the mean over examples and
    functions together. The two differ where functions share parameters.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> x, y = torch.randn(20, 4), torch.randint(3, (20,))
    >>> 0 <= float(lw.cka(lw.ntk(model, x), y)) <= 1
    True
    """
    return alignment(K, K2, centering)


def effective_rank(K: Kernel | Tensor, centering: str = "per-output") -> Float[Tensor, ""]:
    """``exp(−Σ μ_j log μ_j)`` with ``μ_j = λ_j / Σ λ``: how many eigenvalues carry the trace.

    Of the centred kernel, per output by default; pass ``centering="none"`` for the kernel as it is. Eigenvalues up
    to 1e-12 of the largest count as zero (1.2e-7 for a kernel in float32: below are its rounding errors).

    >>> import torch, layerwise as lw
    >>> round(float(lw.effective_rank(torch.eye(5), centering="none")), 6)
    5.0
    """
    return spectrum(K, centering).effective_rank()


def trace_ratio(K: Kernel | Tensor, k: int, centering: str = "per-output") -> Float[Tensor, ""]:
    """``T_k = Σ_{j ≤ k} λ_j / Σ λ_j``: the part of the trace in the k largest eigenvalues.

    A large kernel that is not formed needs only its k largest eigenvalues and its trace for this.

    >>> import torch, layerwise as lw
    >>> float(lw.trace_ratio(torch.diag(torch.tensor([3.0, 1.0])), 1, centering="none"))
    0.75
    """
    kernel = _as_kernel(K, "K").centered(centering)
    rows = kernel.shape[0]
    if not 1 <= k <= rows:
        raise InputError(describe(f"k={k}", f"a number from 1 to {rows}", "choose another"))
    total = kernel.trace().double()
    top = kernel.eigenvalues(k).double().sum()
    return _cosine(top, total).clamp_max(1.0)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues of a kernel and what they say."""

    values: Float[Tensor, "rows"]
    """All of them, largest first, in float64; those below the floor are 0."""
    floor: float
    """Up to this an eigenvalue counted as zero."""
    dropped: int
    """How many did."""

    def max(self) -> Float[Tensor, ""]:
        """The largest."""
        return self.values[0]

    def mean(self) -> Float[Tensor, ""]:
        """Their mean."""
        return self.values.mean()

    def median(self) -> Float[Tensor, ""]:
        """Their median."""
        return self.values.quantile(0.5)

    def effective_rank(self) -> Float[Tensor, ""]:
        """``exp(−Σ μ log μ)``; 0 for a kernel that is zero."""
        kept = self.values[self.values > 0]
        if not kept.numel():
            return self.values.new_zeros(())
        mu = kept / kept.sum()
        return torch.exp(-(mu * mu.log()).sum())

    def trace_ratio(self, k: int) -> Float[Tensor, ""]:
        """The part of the trace in the k largest."""
        if not 1 <= k <= self.values.numel():
            raise InputError(describe(f"k={k}", f"a number from 1 to {self.values.numel()}", "choose another"))
        return _cosine(self.values[:k].sum(), self.values.sum())

    def __str__(self) -> str:
        return (
            f"{self.values.numel()} eigenvalues: max {float(self.max()):.4g}, mean {float(self.mean()):.4g}, "
            f"median {float(self.median()):.4g}; effective rank {float(self.effective_rank()):.4g}; "
            f"{self.dropped} at or below the floor {self.floor:.2g}"
        )


def spectrum(K: Kernel | Tensor, centering: str = "per-output") -> Spectrum:
    """All eigenvalues of a kernel, centred per output by default, with their summaries.

    >>> import torch, layerwise as lw
    >>> print(lw.spectrum(torch.eye(2), centering="none"))
    2 eigenvalues: max 1, mean 1, median 1; effective rank 2; 0 at or below the floor 1.2e-07
    """
    kernel = _as_kernel(K, "K").centered(centering)
    values = guarded_eigh(kernel.matrix().double(), name="tangent kernel")[0].flip(0)
    precision = torch.finfo(kernel.dtype).eps if kernel.dtype != torch.float64 else 0.0
    floor = max(EIGEN_FLOOR, precision) * float(values[0])
    kept = torch.where(values > floor, values, 0.0)
    return Spectrum(kept, floor, int((values <= floor).sum()))


def _cosine(inner: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale > 0, inner / scale.clamp_min(torch.finfo(scale.dtype).tiny), torch.zeros_like(inner))


def _as_kernel(K: Any, what: str) -> Kernel:
    if isinstance(K, Kernel):
        K.require_square("a measure")
        return K
    if isinstance(K, Tensor) and K.ndim == 2 and K.shape[0] == K.shape[1] and K.is_floating_point():
        return MatrixKernel(K.detach())
    given = f"a tensor of shape {tuple(K.shape)}, {K.dtype}" if isinstance(K, Tensor) else f"a {type(K).__name__}"
    raise InputError(describe(f"{what}= {given}", "a square kernel, or its matrix", "see lw.ntk"))


def _target(target: Any, kernel: Kernel) -> Kernel | Float[Tensor, "B NP"]:
    """Another kernel of the same size, or vectors y with ``K′ = Σ y yᵀ``."""
    n, P, rows = kernel.n, kernel.functions, kernel.shape[0]
    if isinstance(target, Kernel):
        target.require_square("a measure")
        _same_size(target.shape[0], rows)
        return target
    if isinstance(target, Tensor):
        t = target.detach().to(kernel.device)
        if not t.is_floating_point() and t.ndim == 1 and t.shape[0] == n:
            return _one_hot(t, P)
        if t.is_floating_point() and tuple(t.shape) in ((n, *kernel.out_shape), (rows,), (n, P)):
            return t.reshape(1, rows)
        if t.is_floating_point() and tuple(t.shape) == (rows, rows):
            return MatrixKernel(t, kernel.out_shape)
    given = f"a tensor of shape {tuple(target.shape)}, {target.dtype}" if isinstance(target, Tensor) else repr(target)
    raise InputError(
        describe(
            f"a target that is {given}",
            f"a kernel or matrix of {rows} rows, integer labels ({n},), or values ({n}, {P})",
            "pass labels as integers, values as floating-point numbers",
        )
    )


def _one_hot(labels: Tensor, P: int) -> Tensor:
    """One vector ``[1, N·P]`` of one-hot labels, or, for one function an example, one vector a class ``[C, N]``."""
    if bool((labels < 0).any()) or (P > 1 and int(labels.max()) >= P):
        raise InputError(
            describe(
                f"labels from {int(labels.min())} to {int(labels.max())}",
                f"labels from 0 to {P - 1}, one for each function" if P > 1 else "labels ≥ 0",
                "renumber them, or pass one-hot values",
            )
        )
    if P == 1:
        classes = torch.nn.functional.one_hot(torch.unique(labels, return_inverse=True)[1])
        return classes.mT.double()
    return torch.nn.functional.one_hot(labels.long(), P).double().reshape(1, -1)


def _same_size(given: int, expected: int) -> None:
    if given != expected:
        raise InputError(
            describe(f"two kernels of {expected} and {given} rows", "the same examples and outputs", "use one set")
        )
