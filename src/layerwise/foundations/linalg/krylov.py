"""Krylov methods for a symmetric operator given only by its products: solves, tridiagonal form, functions.

Leading eigenpairs live in `lanczos_top`. All columns of a block are independent problems that share the
products, and a column that has finished is held still while the others go on.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import NumericalError, describe
from layerwise.foundations.linalg.checks import MatMul, apply_block, require_at_least
from layerwise.foundations.linalg.eigh import guarded_eigh


class CGResult(NamedTuple):
    """What `conjugate_gradient` found; the residuals are recomputed, not those of the recurrence."""

    solution: Float[Tensor, "d B"]
    residuals: Float[Tensor, "B"]
    iterations: int
    converged: bool


def conjugate_gradient(
    matmul: MatMul,
    b: Float[Tensor, "d B"],
    *,
    tol: float = 1e-10,
    max_iterations: int = 1000,
    preconditioner: MatMul | None = None,
) -> CGResult:
    """Solve ``M x = b`` for a positive definite M and each column of b, to ``‖b − M x‖ ≤ tol ‖b‖``.

    When the recurrence claims convergence the residual is recomputed, and the iteration restarts from there
    if the claim was false (in low precision it drifts), as long as that helps. Nothing is raised when it
    stops short: ``converged`` says whether all residuals are ``≤ max(tol, 100 ε)``, ε the machine precision.

    Reference: Hestenes and Stiefel 1952; Golub and Van Loan, Matrix Computations, §11.5.

    >>> M = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    >>> result = conjugate_gradient(lambda X: M @ X, torch.eye(2, dtype=torch.float64))
    >>> bool(torch.allclose(result.solution, torch.linalg.inv(M))), result.iterations
    (True, 2)
    """
    eps = torch.finfo(b.dtype).eps
    aim = max(tol, 10 * eps)  # an aim that rounding forbids would only burn restarts
    x = torch.zeros_like(b)
    r = b.clone()
    scale = torch.linalg.vector_norm(b, dim=0)
    goal = aim * scale
    # A column of zeros is solved by zeros: 0/0 counts as 0, while NaN stays NaN.
    best = torch.where(scale == 0, 0.0, scale / scale)
    iterations, going = 0, True
    while going and iterations < max_iterations:
        y, iterations = _cg_run(matmul, x, r, goal, iterations, max_iterations, preconditioner)
        s = b - apply_block(matmul, y)
        relative = torch.where(scale == 0, 0.0, torch.linalg.vector_norm(s, dim=0) / scale)
        # A restart that does not halve a residual will not reach the goal: this is what M allows.
        going = bool(((relative > aim) & (relative < 0.5 * best)).any())
        better = relative < best
        x, r, best = torch.where(better, y, x), torch.where(better, s, r), torch.where(better, relative, best)
    return CGResult(x, best, iterations, bool((best <= max(tol, 100 * eps)).all()))


def _cg_run(
    matmul: MatMul,
    x: Float[Tensor, "d B"],
    r: Float[Tensor, "d B"],
    goal: Float[Tensor, "B"],
    iterations: int,
    max_iterations: int,
    preconditioner: MatMul | None,
) -> tuple[Float[Tensor, "d B"], int]:
    """One run of the recurrence from the residual r, until every column meets its goal by its own count."""
    z = r if preconditioner is None else apply_block(preconditioner, r)
    p, rz = z, (r * z).sum(0)
    active = torch.linalg.vector_norm(r, dim=0) > goal
    while iterations < max_iterations and bool(active.any()):
        Mp = apply_block(matmul, p)
        iterations += 1
        pMp = (p * Mp).sum(0)
        active = active & (pMp > 0)  # a direction of no or negative curvature: M is not definite, stop there
        step = torch.where(active, rz / pMp, 0.0)
        x = torch.where(active, x + step * p, x)
        r = torch.where(active, r - step * Mp, r)
        z = r if preconditioner is None else apply_block(preconditioner, r)
        rz_next = (r * z).sum(0)
        active = active & (torch.linalg.vector_norm(r, dim=0) > goal)
        p = torch.where(active, z + (rz_next / rz) * p, p)
        rz = rz_next
    return x, iterations


class Tridiagonal(NamedTuple):
    """Lanczos coefficients of every column so far: diagonals, off-diagonals, orthonormal basis."""

    alphas: list[Float[Tensor, "B"]]
    betas: list[Float[Tensor, "B"]]
    basis: Float[Tensor, "k d B"]

    def matrices(self) -> Float[Tensor, "B k k"]:
        """The tridiagonal matrix of each column."""
        T = torch.diag_embed(torch.stack(self.alphas, -1))
        k = len(self.alphas)
        if k > 1:
            off = torch.stack(self.betas[: k - 1], -1)
            T = T + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
        return T


def lanczos_steps(matmul: MatMul, V: Float[Tensor, "d B"], steps: int) -> Iterator[Tridiagonal]:
    """Yield the growing tridiagonal forms of M seen from each column, ``Qᵀ M Q = T`` with ``Q e₁ = v/‖v‖``.

    Every vector is orthogonalized twice against all before it. A column whose Krylov space is exhausted
    continues with zero vectors, a zero coupling, and its first diagonal entry as padding: any function that
    is finite on the spectrum is finite on the padding too, and the padding never reaches ``e₁``.
    """
    eps = torch.finfo(V.dtype).eps
    norms = torch.linalg.vector_norm(V, dim=0)
    active = norms > 0
    q = torch.where(active, V / norms, 0.0)
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    largest = torch.zeros_like(norms)
    most = min(steps, V.shape[0])
    basis = V.new_empty(most, *V.shape)  # untouched pages cost nothing if the iteration stops early
    for step in range(most):
        w = apply_block(matmul, q)
        alpha = (q * w).sum(0)
        alphas.append(torch.where(active, alpha, alphas[0]) if alphas else alpha)
        basis[step] = q
        Q = basis[: step + 1]
        size = torch.linalg.vector_norm(w, dim=0)
        for _ in range(2):
            w = w - torch.einsum("kdb,kb->db", Q, torch.einsum("kdb,db->kb", Q, w))
        beta = torch.linalg.vector_norm(w, dim=0)
        largest = torch.maximum(largest, size)
        # What is left after the projection is rounding once it falls to the precision of the product.
        active = active & (beta > 32 * eps * largest) & (step + 1 < V.shape[0])
        betas.append(torch.where(active, beta, 0.0))
        q = torch.where(active, w / beta, 0.0)
        yield Tridiagonal(alphas, betas, Q)
        if not bool(active.any()):
            return


def lanczos_form(matmul: MatMul, V: Float[Tensor, "d B"], steps: int) -> Tridiagonal | None:
    """The last of `lanczos_steps`, or None where there are no rows."""
    last = None
    for form in lanczos_steps(matmul, V, steps):
        last = form
    return last


def lanczos(
    matmul: MatMul, start: Float[Tensor, "d"], steps: int
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k_less_1"], Float[Tensor, "d k"]]:
    """The tridiagonal form of M in the Krylov space of ``start``: diagonal, off-diagonal and basis.

        Qᵀ M Q = T,   Q e₁ = start / ‖start‖,   k ≤ steps

    Fewer than ``steps`` columns come back when the Krylov space is exhausted before.

    Reference: Golub and Van Loan, Matrix Computations, §10.1, with full reorthogonalization.

    >>> M = torch.diag(torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64))
    >>> alphas, betas, Q = lanczos(lambda X: M @ X, torch.ones(3, dtype=torch.float64), 3)
    >>> Q.shape  # two distinct eigenvalues, so two steps
    torch.Size([3, 2])
    """
    require_at_least("steps", steps, 1)
    require_at_least("length of start", start.numel(), 1)
    form = lanczos_form(matmul, start[:, None], steps)
    assert form is not None
    alphas, betas = torch.cat(form.alphas), torch.cat(form.betas)
    return alphas, betas[:-1], form.basis[:, :, 0].T.contiguous()


def lanczos_function(
    matmul: MatMul,
    V: Float[Tensor, "d B"],
    fn: Callable[[Tensor], Tensor],
    steps: int,
    *,
    tol: float = 1e-10,
    check_every: int = 4,
) -> Float[Tensor, "d B"]:
    """Apply a function of a symmetric operator to each column.

        f(M) v ≈ ‖v‖ Q f(T) e₁

    Stops early once ``check_every`` further steps change every column by less than ``tol``, relatively.

    Raises:
        NumericalError: ``fn`` is not finite at an approximate eigenvalue.

    Reference: Saad 1992, Analysis of some Krylov subspace approximations to the matrix exponential operator.

    >>> M = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
    >>> lanczos_function(lambda X: M @ X, torch.ones(2, 1, dtype=torch.float64), torch.sqrt, 2).round().mT
    tensor([[1., 2.]], dtype=torch.float64)
    """
    require_at_least("steps", steps, 1)
    form, before = None, None
    for form in lanczos_steps(matmul, V, steps):
        k = len(form.alphas)
        if k % check_every:
            continue
        c = _coefficients(form, fn)
        # Q has orthonormal columns, so the change of the result is the change of its coefficients.
        if before is not None:
            change = torch.linalg.vector_norm(c - torch.nn.functional.pad(before, (0, check_every)), dim=-1)
            if bool((change <= tol * torch.linalg.vector_norm(c, dim=-1)).all()):
                break
        before = c
    if form is None:  # no rows at all
        return V.clone()
    Y = torch.einsum("kdb,bk->db", form.basis, _coefficients(form, fn))
    return Y * torch.linalg.vector_norm(V, dim=0)


def _coefficients(form: Tridiagonal, fn: Callable[[Tensor], Tensor]) -> Float[Tensor, "B k"]:
    """The columns ``f(T) e₁``."""
    theta, U = guarded_eigh(form.matrices(), name="Lanczos tridiagonal matrix", clamp=False)
    f = fn(theta)
    if not torch.isfinite(f).all():
        raise NumericalError(
            describe(
                f"a function that is not finite on [{float(theta.min()):.3g}, {float(theta.max()):.3g}]",
                "a function finite on the spectrum of the operator",
                "clamp or damp its argument",
            )
        )
    return torch.einsum("bik,bk,bk->bi", U, f, U[:, 0, :])
