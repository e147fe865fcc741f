"""Checks at the boundary of this package: counts, finite matrices, what a matrix-vector product returns.

The convention owned here: an operator is a callable ``matmul`` that takes a block of columns ``[d, B]`` and
returns a block of the same shape.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.foundations.errors import InputError, NumericalError, describe

MatMul = Callable[[Tensor], Tensor]


def require_at_least(name: str, value: int, least: int) -> None:
    """Raise `InputError` unless ``value ≥ least``.

    >>> require_at_least("samples", 8, 1)
    """
    if value < least:
        raise InputError(describe(f"{name}={value}", f"an integer ≥ {least}", f"pass {name}={least} or more"))


def require_square(M: Tensor, name: str) -> None:
    """Raise `InputError` unless the last two axes of ``M`` have the same length."""
    if M.ndim < 2 or M.shape[-1] != M.shape[-2]:
        raise InputError(describe(f"{name} of shape {tuple(M.shape)}", "square matrices [..., n, n]", "check its axes"))


def finite_matrices(X: Float[Tensor, "*batch m n"]) -> Bool[Tensor, "*batch"]:
    """Which matrices have no entry that is NaN or infinite.

    On a CPU a sum is twenty times faster than `torch.isfinite`, and not finite if an entry is not; only a sum that
    overflows needs the entries themselves.

    >>> finite_matrices(torch.tensor([[[1.0, 3e38], [3e38, 1.0]], [[1.0, torch.inf], [-torch.inf, 1.0]]])).tolist()
    [True, False]
    """
    if X.device.type == "cpu":
        found = torch.isfinite(X.sum((-2, -1)))
        if bool(found.all()):
            return found
    return torch.isfinite(X).all(-1).all(-1)


def require_finite(M: Tensor, name: str) -> None:
    """Raise `NumericalError` with a count if ``M`` has entries that are NaN or infinite."""
    if M.ndim > 1 and bool(finite_matrices(M).all()):
        return
    finite = torch.isfinite(M)
    if not finite.all():
        bad = int((~finite).sum())
        raise NumericalError(
            describe(
                f"{name} of shape {tuple(M.shape)} with {bad} of {M.numel()} entries not finite",
                "finite entries",
                "look for an overflow upstream (half precision, a diverged loss) and leave that batch out",
            )
        )


def apply_block(matmul: MatMul, X: Float[Tensor, "d B"]) -> Float[Tensor, "d B"]:
    """The product ``M X``, cut from the autograd graph, its shape checked.

    The operator runs with gradients as the caller left them, because many operators differentiate inside.
    """
    MX = matmul(X)
    if MX.shape != X.shape:
        raise InputError(
            describe(
                f"a matmul that maps {tuple(X.shape)} to {tuple(MX.shape)}",
                "a block of columns [d, B] of the same shape",
                "check the axes of the operator",
            )
        )
    return MX.detach().to(X.dtype)
