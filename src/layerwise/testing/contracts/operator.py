"""`check_operator`: a `BlockOperator` is the matrix it says it is, in every operation."""

import json
from dataclasses import replace

import torch
from torch import Tensor

from layerwise.foundations.kronecker import SPLITS, Kronecker
from layerwise.foundations.operators import OPERATORS, BlockOperator
from layerwise.foundations.quasi_diagonal import QuasiDiagonal
from layerwise.testing.contracts.agreement import Agreement

DRAWS = 4000
"""Samples that the covariance is estimated from."""
DEVIATIONS = 5.0
"""Standard errors that an entry of the covariance may be off."""


def check_operator(op: BlockOperator, *, seed: int = 0, tol: float = 1e-8) -> None:
    """Check every operation of an operator against dense linear algebra on ``op.as_matrix()``.

    It must be linear and symmetric, positive semi-definite where `is_psd` says so, and its trace, norm, diagonal,
    eigenpairs, damped powers, determinant, samples, sums and stored form must be those of the matrix. Keep it
    small (D up to about 100) and in float64.

    >>> from layerwise.foundations.operators import Diagonal
    >>> check_operator(Diagonal(torch.rand(1, 2, 3, dtype=torch.float64)))

    Raises:
        AssertionError: naming the operator and what differs.
    """
    agree = Agreement(f"operator {type(op).__name__} {op.shape}", tol)
    generator = torch.Generator().manual_seed(seed)
    with agree.step("as_matrix"):
        M = op.as_matrix().detach()
    agree.require(M.shape == (op.numel(), op.numel()), f"as_matrix has shape {tuple(M.shape)}, D is {op.numel()}")
    scale = float(M.abs().max()) or 1.0
    agree.close(M / scale, M.mT / scale, "as_matrix, which should be symmetric, and its transpose")
    for check in (_products, _numbers, _eigenpairs, _arithmetic, _stored_form):
        with agree.step(check.__name__.strip("_").replace("_", " ")):
            check(op, M, agree, generator)
    damping = _enough_damping(M)
    with agree.step("the damped matrix"):
        R = _damped(op, M, damping)
        _powers(op, R, damping, agree, generator)
        _sample(op, R, damping, agree, generator)


def _columns(op: BlockOperator, M: Tensor, generator: torch.Generator, *lead: int) -> Tensor:
    drawn = torch.randn(*lead, *op.shape, generator=generator, dtype=torch.float64)
    return drawn.to(device=M.device, dtype=M.dtype)


def _times(matrix: Tensor, X: Tensor) -> Tensor:
    return (X.flatten(-3) @ matrix.mT).view(X.shape)


def _products(op: BlockOperator, M: Tensor, agree: Agreement, generator: torch.Generator) -> None:
    X, Y = _columns(op, M, generator, 2, 3), _columns(op, M, generator, 2, 3)
    agree.close(op.mv(X), _times(M, X), "mv, against as_matrix,")
    agree.close(op.mv(2 * X - 3 * Y), 2 * op.mv(X) - 3 * op.mv(Y), "mv, which should be linear,")
    agree.close(op.mv(X)[1, 2], op.mv(X[1, 2]), "mv of many columns, against one at a time,")
    agree.close(BlockOperator.as_matrix(op), M, "as_matrix, against products with the identity,")


def _numbers(op: BlockOperator, M: Tensor, agree: Agreement, generator: torch.Generator) -> None:
    agree.close(op.trace(), M.diagonal().sum(), "trace")
    agree.close(op.frobenius_squared(), M.square().sum(), "frobenius_squared")
    agree.close(op.diagonal(), M.diagonal().view(op.shape), "diagonal")


def _eigenpairs(op: BlockOperator, M: Tensor, agree: Agreement, generator: torch.Generator) -> None:
    expected = torch.linalg.eigvalsh(M)
    if op.is_psd:
        lowest = float(expected.min())
        bound = -agree.tol * max(1.0, float(expected.max()))
        agree.require(lowest >= bound, f"is_psd is True, but the smallest eigenvalue is {lowest:.3g}")
    values = op.eigenvalues()
    agree.close(values, expected, "eigenvalues")
    for chosen in (torch.arange(op.numel()), torch.tensor([op.numel() - 1, 0])):
        chosen = chosen.to(M.device)
        U = op.eigenvectors(chosen)
        rows = U.flatten(1)
        agree.close(_times(M, U), U * values[chosen].view(-1, 1, 1, 1), "M u = s u for the eigenvectors")
        if op.numel() > 1:
            eye = torch.eye(len(chosen), dtype=M.dtype, device=M.device)
            agree.close(rows @ rows.mT, eye, "orthonormality of the eigenvectors")


def _arithmetic(op: BlockOperator, M: Tensor, agree: Agreement, generator: torch.Generator) -> None:
    agree.close(op.scaled(2.5).as_matrix(), 2.5 * M, "scaled(2.5)")
    agree.require(op.scaled(2.5).is_psd == op.is_psd, "scaled(2.5) changes is_psd")
    total = op.plus(op.scaled(2.0))
    if total is not None:
        agree.close(total.as_matrix(), 3 * M, "M.plus(2 M)")


def _stored_form(op: BlockOperator, M: Tensor, agree: Agreement, generator: torch.Generator) -> None:
    agree.require(OPERATORS.get(op.kind) is type(op), f"kind {op.kind!r} loads another class")
    options = json.loads(json.dumps(op.options()))
    again = type(op).from_tensors({k: t.clone() for k, t in op.tensors().items()}, options)
    agree.close(again.as_matrix(), M, "from_tensors(tensors(), options())", tol=0.0)
    agree.require(again.shape == op.shape, "from_tensors(tensors(), options()) has another shape")
    agree.require(again.is_psd == op.is_psd, "from_tensors(tensors(), options()) changes is_psd")
    agree.close(op.to(dtype=torch.float32).as_matrix(), M, "to(float32)", tol=1e-5)


def _enough_damping(M: Tensor) -> float:
    """λ that makes M well conditioned, whether it is definite or not."""
    values = torch.linalg.eigvalsh(M)
    return 0.2 * (float(values.abs().mean()) or 1.0) + 1.5 * max(0.0, -float(values[0]))


def _damped(op: BlockOperator, M: Tensor, damping: float) -> Tensor:
    """``M + λI``; for a quasi-diagonal matrix, the completion of the damped statistics."""
    if isinstance(op, QuasiDiagonal) and op.completion != "arrow":
        return replace(op, D=op.D + damping, f=op.f + damping, completion="psd").as_matrix()
    return M + damping * torch.eye(len(M), dtype=M.dtype, device=M.device)


def _powers(op: BlockOperator, R: Tensor, damping: float, agree: Agreement, generator: torch.Generator) -> None:
    values, vectors = torch.linalg.eigh(R)
    X = _columns(op, R, generator, 2, 3)
    for exponent in (1.0, 0.5, -0.5, -1.0):
        expected = _times((vectors * values**exponent) @ vectors.mT, X)
        got = op.power(X, exponent, damping)
        agree.close(got, expected, f"power({exponent}, damping={damping:.3g})")
        agree.close(got[1, 2], op.power(X[1, 2], exponent, damping), f"power({exponent}) of many columns, against one")
    agree.close(_times(R, op.solve(X, damping, "exact")), X, f"(M + λI) solve(X, damping={damping:.3g})")
    if hasattr(op, "solve_split"):
        for split in SPLITS:
            same = op.power(X, -1.0, damping, split)
            agree.close(op.solve(X, damping, split), same, f"solve against power(-1), both with split {split!r},")
            if isinstance(op, Kronecker) and split != "exact":
                factored = _factored(op, damping, split)
                agree.close(
                    _times(factored, op.solve(X, damping, split)), X, f"the factors damped by {split!r}, solved,"
                )
    agree.close(op.logdet(damping), torch.linalg.slogdet(R).logabsdet, f"logdet(damping={damping:.3g})")


def _factored(op: Kronecker, damping: float, split: str) -> Tensor:
    """``(G + √λ/π I) ⊗ (A + π√λ I)``, group by group."""
    blocks = []
    for A, G in zip(op.A.dense(), op.G, strict=True):
        pi = float((A.diagonal().mean() / G.diagonal().mean()).sqrt()) if split == "trace" else 1.0
        left = G + damping**0.5 / pi * torch.eye(len(G), dtype=G.dtype, device=G.device)
        right = A + damping**0.5 * pi * torch.eye(len(A), dtype=A.dtype, device=A.device)
        blocks.append(torch.kron(left, right))
    return torch.block_diag(*blocks)


def _sample(op: BlockOperator, R: Tensor, damping: float, agree: Agreement, generator: torch.Generator) -> None:
    """The covariance of draws: entry ij of n draws has standard error ``√((Σ_ii Σ_jj + Σ_ij²) / n)``."""
    draws = op.sample(DRAWS, damping, generator)
    agree.require(draws.shape == (DRAWS, *op.shape), f"sample has shape {tuple(draws.shape)}")
    z, cov = draws.flatten(1), torch.linalg.inv(R)
    variance = cov.diagonal()
    off = (z.mean(0).abs() / (variance / DRAWS).sqrt()).max()
    agree.require(float(off) <= DEVIATIONS, f"the mean of the samples is {float(off):.1f} standard errors from 0")
    error = ((variance.unsqueeze(0) * variance.unsqueeze(1) + cov.square()) / DRAWS).sqrt()
    off = ((z.mT @ z / DRAWS - cov).abs() / error).max()
    agree.require(
        float(off) <= DEVIATIONS,
        f"the covariance of the samples is {float(off):.1f} standard errors from (M + λI)⁻¹",
    )
