"""Decompositions of symmetric matrices that retry in higher precision and fail with words.

What the caller gets back has the precision of what they gave, half types excepted: those are raised to
float32 and stay there, because a decomposition in 8 or 11 bits is of no use.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, NumericalError, describe
from layerwise.foundations.linalg.checks import finite_matrices, require_finite, require_square


def symmetrized(M: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """The symmetric part ``(M + Mᵀ)/2``, in float32 or better.

    >>> symmetrized(torch.tensor([[1.0, 2.0], [0.0, 1.0]])).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    if M.dtype not in (torch.float32, torch.float64):
        M = M.float()
    half = 0.5 * M  # halved before the sum, which could overflow
    return half + half.mT


def guarded_eigh(
    M: Float[Tensor, "*batch n n"], *, name: str = "matrix", clamp: bool = True
) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n n"]]:
    """Eigenvalues, ascending, and eigenvectors of the symmetric part of M.

        (M + Mᵀ)/2 = U diag(s) Uᵀ

    Tries the given precision, then float64, then float64 on the CPU.

    Args:
        M: symmetric up to rounding.
        name: how errors call the matrix.
        clamp: raise negative eigenvalues to 0, where M is known to be positive semi-definite.

    Raises:
        NumericalError: M is not finite, or no attempt converged.

    >>> values, vectors = guarded_eigh(torch.diag(torch.tensor([3.0, 1.0])))
    >>> values.tolist()
    [1.0, 3.0]
    """
    require_square(M, name)
    require_finite(M, name)
    S = symmetrized(M)
    reason = "no attempt was made"
    for device, dtype in _attempts(S):
        try:
            values, vectors = torch.linalg.eigh(S.to(device=device, dtype=dtype))
        except (RuntimeError, TypeError) as error:  # TypeError: a device without float64
            reason = str(error)
            continue
        values, vectors = values.to(S), vectors.to(S)
        if torch.isfinite(values).all() and finite_matrices(vectors).all():
            return (values.clamp_min(0) if clamp else values), vectors
        reason = f"the result in {dtype} on {device} was not finite"
    raise NumericalError(
        describe(
            f"{name} of shape {tuple(M.shape)}, largest entry {_largest(S):.3g}, which does not decompose ({reason})",
            "a symmetric matrix whose eigendecomposition converges",
            "pass more damping, or rescale the matrix",
        )
    )


def null_tolerance(dtype: torch.dtype) -> float:
    """``8 ε``: up to this part of the largest, eigenvalues of a positive semi-definite matrix are rounding.

    LAPACK leaves up to 4.5 ε of zeros (sizes 9 to 1024). A bound for every matrix would grow with its size, and take
    real eigenvalues of large matrices for zeros.

    >>> null_tolerance(torch.float64) == 2.0**-49
    True
    """
    return 8 * torch.finfo(dtype).eps


def settled_eigh(
    M: Float[Tensor, "*batch n n"], *, name: str = "matrix"
) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n n"]]:
    """`guarded_eigh` of a positive semi-definite matrix, with a null space whose basis is chosen, not left to rounding.

    Any basis of the null space is one of eigenvectors, and which of them LAPACK returns depends on the processor. Here
    it is the one that makes ``diag(√1, √2, …)`` diagonal in that space: axes where the space is spanned by axes (inputs
    that are always zero), and the same up to signs on every machine. (Roots, because of sums of plain numbers too many
    are equal.)

    >>> values, vectors = settled_eigh(torch.diag(torch.tensor([0.0, 3.0, 0.0])))
    >>> vectors.abs().tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """
    values, vectors = guarded_eigh(M, name=name)
    n = values.shape[-1]
    if n == 0:
        return values, vectors
    nulls = (values <= null_tolerance(values.dtype) * values[..., -1:]).sum(-1).flatten().tolist()
    grades = torch.arange(1, n + 1, dtype=values.dtype, device=values.device).sqrt().unsqueeze(-1)
    flat = vectors.reshape(-1, n, n)
    for U, k in zip(flat, nulls, strict=True):
        if k > 1:
            N = U[:, :k]
            U[:, :k] = N @ guarded_eigh(N.mT @ (grades * N), name=f"null space of {name}")[1]
    return values, flat.reshape(vectors.shape)


def guarded_cholesky(
    M: Float[Tensor, "*batch n n"], *, name: str = "matrix", damping: float = 0.0
) -> Float[Tensor, "*batch n n"]:
    """The lower triangular root of the damped symmetric part of M.

        (M + Mᵀ)/2 + λI = L Lᵀ

    Raises:
        InputError: the damping is negative or not finite.
        NumericalError: M is not finite, or M + λI is not positive definite even in float64.

    >>> guarded_cholesky(torch.tensor([[3.0]]), damping=1.0).item()
    2.0
    """
    if not (damping >= 0 and math.isfinite(damping)):
        raise InputError(describe(f"damping={damping}", "a finite number ≥ 0", "pass e.g. damping=1e-3"))
    require_square(M, name)
    require_finite(M, name)
    S = symmetrized(M)
    for device, dtype in _attempts(S):
        try:
            # The damping is added in the precision of the attempt: in float32 it may vanish beside M.
            A = S.to(device=device, dtype=dtype, copy=True)
            A.diagonal(dim1=-2, dim2=-1).add_(damping)
            L, info = torch.linalg.cholesky_ex(A)
        except (RuntimeError, TypeError):
            continue
        if not info.any() and _is_trusted(L, A):
            return L.to(S)
    raise NumericalError(
        describe(
            f"{name} of shape {tuple(M.shape)} with damping={damping:.3g}, not positive definite "
            f"(smallest eigenvalue before damping {_smallest(S)})",
            "a positive definite matrix",
            "pass damping > 0" if damping == 0 else "pass damping > 0 and larger than this",
        )
    )


def guarded_inverse(
    M: Float[Tensor, "*batch n n"], shift: Float[Tensor, "*batch"], *, name: str = "matrix"
) -> Float[Tensor, "*batch n n"]:
    """``(M + shift I)⁻¹`` by Cholesky, of a positive semi-definite M that is symmetric to the last bit, as sums are.

    Raises:
        NumericalError: M is not finite, or ``M + shift I`` is not positive definite even in float64.

    >>> guarded_inverse(torch.tensor([[[3.0]]]), torch.tensor([1.0])).item()
    0.25
    """
    if M.shape[-1] != M.shape[-2]:
        require_square(M, name)
    A = M.mT.clone()  # as LAPACK wants it: one copy, which it is given in the order of its columns
    A.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    if A.dtype in (torch.float32, torch.float64):
        L, info = torch.linalg.cholesky_ex(A)
        if not info.any() and _is_trusted(L, A):
            return torch.cholesky_inverse(L)
    return torch.cholesky_inverse(guarded_cholesky(A, name=name)).to(M)


def _is_trusted(L: Float[Tensor, "*batch n n"], A: Float[Tensor, "*batch n n"]) -> bool:
    """Whether a root is finite with pivots above rounding, or as good as it gets (float64).

    Some LAPACKs report success where a pivot is rounding noise, others failure: without this test the answer would
    depend on the processor. Pivots tell of all entries: what is not finite in a row makes its pivot so.
    """
    pivots, diagonal = L.diagonal(dim1=-2, dim2=-1), A.diagonal(dim1=-2, dim2=-1)
    noise = 4 * torch.finfo(A.dtype).eps * A.shape[-1] ** 0.5 if A.dtype != torch.float64 else 0.0
    return bool((torch.isfinite(pivots) & (pivots.square() > noise * diagonal)).all())


def _attempts(S: Tensor) -> list[tuple[torch.device, torch.dtype]]:
    """The devices and precisions to try, in turn, without repeats."""
    cpu = torch.device("cpu")
    tries = [(S.device, S.dtype), (S.device, torch.float64), (cpu, torch.float64)]
    return list(dict.fromkeys(tries))


def _largest(S: Tensor) -> float:
    return float(S.abs().max()) if S.numel() else 0.0


def _smallest(S: Tensor) -> str:
    """The smallest eigenvalue over the batch, in words, for an error message."""
    try:
        return f"{float(torch.linalg.eigvalsh(S.detach().cpu().double()).min()):.3g}"
    except RuntimeError:
        return "unknown"
