"""Kernel regression: the linearized model's fit to targets, in closed form or by products alone."""

import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, NumericalError, describe
from layerwise.foundations.linalg import conjugate_gradient, guarded_cholesky
from layerwise.kernel.jacobian import read_functions
from layerwise.kernel.kernel import DENSE_EIGH, Kernel


def solve(
    K: Kernel,
    y: Tensor,
    ridge: int | float,
    *,
    method: str = "auto",
    tol: float | None = None,
    max_iterations: int = 1000,
) -> Tensor:
    """``α = (K + ridge I)⁻¹ y``, in the shape of y.

    The linearized model ``f₀(x) + J(x) w`` that minimizes ``‖y − J w‖² + ridge ‖w‖²`` has ``w = Jᵀ α``, and
    ``K.predict(x, α)`` is what it adds to ``f₀`` at new points. y is usually ``targets − f₀(x)``.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> x, y = torch.randn(16, 4), torch.randn(16, 3)
    >>> K = lw.ntk(model, x)
    >>> alpha = K.solve(y - model(x), ridge=1e-2)
    >>> K.predict(torch.randn(5, 4), alpha).shape
    torch.Size([5, 3])

    Args:
        K: a square kernel.
        y: ``[N, *out]``, ``[N·P]`` or columns ``[N·P, B]``.
        ridge: a number ≥ 0; 0 needs a positive definite kernel.
        method: "dense" (Cholesky of the matrix), "cg" (products only, for large N), or "auto": dense where the
            matrix is there or has at most 4096 rows.
        tol: relative residual at which "cg" stops; default 1e-10 in float64 and 1e-5 in float32.
        max_iterations: of "cg".
    """
    K.require_square("solve()")
    if not (ridge >= 0 and ridge < float("inf")):
        raise InputError(describe(f"ridge={ridge}", "a finite number ≥ 0", "pass e.g. ridge=1e-3"))
    if method not in ("auto", "dense", "cg"):
        raise InputError(describe(f"method={method!r}", '"auto", "dense" or "cg"', "choose one of them"))
    columns, kind = read_functions(y, K.n, K.out_shape, K.dtype, K.device)
    if method == "dense" or (method == "auto" and (K.has_matrix() or K.shape[0] <= DENSE_EIGH)):
        found = _dense(K, columns, ridge)
    else:
        found = _iterated(K, columns, ridge, tol, max_iterations)
    return K._written(found, kind, y.dtype)


def _dense(K: Kernel, columns: Float[Tensor, "B NP"], ridge: int | float) -> Float[Tensor, "B NP"]:
    try:
        root = guarded_cholesky(K.matrix(), name="tangent kernel", damping=ridge)
    except NumericalError as error:
        raise NumericalError(
            describe(
                f"a kernel of {K.shape[0]} rows that is not positive definite with ridge={ridge}",
                "a positive definite K + ridge I",
                f"pass ridge > {ridge:g}",
            )
        ) from error
    return torch.cholesky_solve(columns.mT.to(root), root).mT.to(columns.dtype)


def _iterated(K: Kernel, columns: Tensor, ridge: int | float, tol: float | None, max_iterations: int) -> Tensor:
    if tol is None:
        tol = 1e-10 if K.dtype == torch.float64 else 1e-5

    def product(X: Tensor) -> Tensor:
        return K.apply(X.mT.contiguous()).mT + ridge * X

    result = conjugate_gradient(product, columns.mT, tol=tol, max_iterations=max_iterations)
    if not bool(torch.isfinite(result.solution).all()):
        raise NumericalError(
            describe(
                f"a kernel for which conjugate gradients broke down (ridge={ridge})",
                "a positive definite K + ridge I",
                'raise ridge=, or use method="dense"',
            )
        )
    if not result.converged:
        warnings.warn(
            f"conjugate gradients stopped after {result.iterations} products above the residual {tol:g}; "
            "raise ridge=, tol= or max_iterations=",
            stacklevel=3,
        )
    return result.solution.mT
