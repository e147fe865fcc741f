"""Above 2048 parameters: answers without a closed form are matrix-free, and the random ones say how far off."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import close
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError, NumericalError
from layerwise.foundations.linalg import Estimate

DAMPING = 0.05
CLOSED = ("dense", "block", "diag", "quasidiag", "kfac", "ekfac", "lowrank")


@cache
def _problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(31, 60), nn.Tanh(), nn.Linear(60, 3)).double()
        return model, (torch.randn(6, 31).double(), torch.randint(3, (6,)))


@cache
def _fisher(structure: str) -> Any:
    model, data = _problem()
    return lw.fisher(model, data, structure=structure, estimator="exact")


@cache
def _hessian() -> Any:
    model, data = _problem()
    return lw.hessian(model, data, loss=F.cross_entropy)


@cache
def _subject(kind: str) -> Any:
    if kind == "implicit":
        return _fisher("implicit")
    if kind == "hessian":
        return _hessian()
    if kind == "sum":
        return _fisher("lowrank") + 0.5 * _fisher("kfac")
    return _fisher("implicit").layer("0") if kind == "layer" else _hessian().layer("2") + _fisher("diag").layer("2")


@cache
def _dense(kind: str) -> Tensor:
    if kind == "hessian":
        model, data = _problem()
        return lw.hessian(model, data, loss=F.cross_entropy, structure="dense").to_dense()
    if kind == "sum":
        return _fisher("dense").to_dense() + 0.5 * _fisher("kfac").to_dense()
    return _fisher("dense").to_dense() if kind == "implicit" else _fisher("dense").layer("0").to_dense()


RANDOM = ("implicit", "hessian", "sum")


def _within(found: Any, expected: Tensor) -> None:
    assert isinstance(found, Estimate)
    assert found.standard_error > 0
    assert abs(float(found) - float(expected)) <= 5 * found.standard_error


def test_the_model_is_above_the_limit_contract():
    assert _fisher("implicit").numel() > 2048


@pytest.mark.parametrize("structure", CLOSED)
def test_closed_forms_are_no_estimates_contract(structure: str):
    matrix = _fisher(structure)
    for answer in (matrix.trace(), matrix.frobenius()):
        assert not isinstance(answer, Estimate)
    assert matrix.diagonal().standard_error is None


def test_trace_and_diagonal_of_a_fisher_are_exact_without_forming_it():
    expected = _dense("implicit")
    for kind in ("implicit", "sum"):
        found, M = _subject(kind), _dense(kind)
        assert not isinstance(found.trace(), Estimate)
        close(found.trace(), M.trace())
        close(found.diagonal().flat(), M.diagonal())
    layer = _subject("layer")
    assert not isinstance(layer.trace(), Estimate)
    close(layer.trace(), expected[: layer.numel(), : layer.numel()].trace())


def test_the_trace_of_a_hessian_is_within_its_standard_error_contract():
    _within(_hessian().trace(samples=60), _dense("hessian").trace())
    lazy = _hessian() + _fisher("kfac")
    _within(lazy.trace(samples=60), _dense("hessian").trace() + _fisher("kfac").trace())


@pytest.mark.parametrize("kind", RANDOM)
def test_the_norm_is_within_its_standard_error_contract(kind: str):
    _within(_subject(kind).frobenius(samples=64), _dense(kind).norm())


@pytest.mark.parametrize("kind", ["implicit", "sum"])
def test_the_log_determinant_is_within_its_standard_error_contract(kind: str):
    M = _dense(kind)
    expected = torch.linalg.slogdet(M + DAMPING * torch.eye(len(M), dtype=M.dtype))[1]
    _within(_subject(kind).logdet(DAMPING, samples=5), expected)


def test_the_diagonal_of_a_hessian_is_within_its_standard_error_contract():
    expected = _dense("hessian").diagonal()
    model, data = _problem()
    structured = lw.hessian(model, data, loss=F.cross_entropy, structure="diag")
    for found in (_hessian().diagonal(samples=64), structured.diagonal()):
        assert found.standard_error is not None
        error = found.standard_error.flat()
        assert error.shape == expected.shape
        off = (found.flat() - expected).abs()
        assert ((off <= 5 * error + 1e-12).double().mean()) >= 0.999  # 2043 entries, few of them beyond
        assert (off <= 8 * error + 1e-12).all()


def test_standard_errors_follow_multiples_sums_and_layers_contract():
    model, data = _problem()
    H: Any = lw.hessian(model, data, loss=F.cross_entropy, structure="diag")
    error = H.diagonal().standard_error
    close((-3.0 * H).diagonal().standard_error.flat(), 3 * error.flat())
    close((H + H).diagonal().standard_error.flat(), 2**0.5 * error.flat())
    layer = H.layer("2").diagonal()
    close(layer.standard_error.flat(), error.restrict(["2.weight", "2.bias"]).flat())
    close(layer.flat(), H.diagonal().restrict(["2.weight", "2.bias"]).flat())


@pytest.mark.parametrize("kind", RANDOM)
def test_solves_by_conjugate_gradients_contract(kind: str):
    M, F_ = _dense(kind), _subject(kind)
    damping = DAMPING if kind != "hessian" else 2 * float(_hessian().frobenius(samples=16))
    v = torch.randn(len(M), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = F_.solve(v, damping)
    close(M @ found + damping * found, v, 1e-8)


def test_a_solve_that_does_not_converge_is_an_error_contract():
    v = torch.ones(_fisher("implicit").numel(), dtype=torch.float64)
    with pytest.raises(NumericalError, match="max_iterations"):
        _fisher("implicit").solve(v, 1e-9, max_iterations=2)
    with pytest.raises(NumericalError, match="damping > 0"):
        _hessian().solve(v)
    with pytest.raises(NumericalError, match="damping > 0"):
        _fisher("implicit").logdet()
    with pytest.raises(InputError, match="Kronecker"):
        _fisher("implicit").solve(v, DAMPING, damping_split="trace")


@pytest.mark.parametrize("kind", ["implicit", "sum"])
def test_powers_by_lanczos_contract(kind: str):
    M, F_ = _dense(kind), _subject(kind)
    v = torch.randn(len(M), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    half = F_.power(v, -0.5, DAMPING)
    close(F_.power(half, -0.5, DAMPING), F_.solve(v, DAMPING), 1e-5)
    close(F_.power(v, 2.0, DAMPING), M @ (M @ v) + 2 * DAMPING * (M @ v) + DAMPING**2 * v, 1e-5)


@pytest.mark.parametrize("kind", ["implicit", "sum", "hessian"])
def test_the_largest_eigenvalues_by_lanczos_contract(kind: str):
    M, F_ = _dense(kind), _subject(kind)
    values, vectors = F_.eigh(3)
    expected = torch.lobpcg(M, k=3, tol=1e-10, niter=500)[0] if kind != "hessian" else torch.linalg.eigvalsh(M)[-3:]
    close(values, expected.sort().values, 1e-4)
    close(M @ vectors, vectors * values, 1e-3)


def test_samples_have_the_inverse_as_covariance_contract():
    """zᵀ(M + λI)z is a sum of d squared normal numbers, and the variance along u is uᵀ(M + λI)⁻¹u."""
    matrix, n = _subject("sum"), 30
    d = matrix.numel()
    z = torch.stack([v.flat() for v in matrix.sample(n, damping=DAMPING, generator=0)], 1)
    lengths = matrix.quad(z) + DAMPING * z.square().sum(0)
    assert abs(float(lengths.mean()) - d) <= 5 * (2 * d / n) ** 0.5
    values, u = matrix.eigh(2)
    expected = 1 / (values + DAMPING)
    assert (((u.mT @ z).square().mean(1) - expected).abs() <= 5 * expected * (2 / n) ** 0.5).all()


def test_to_scipy_above_the_limit_contract():
    from scipy.sparse.linalg import eigsh

    found = eigsh(_fisher("implicit").to_scipy(), k=2, return_eigenvectors=False, tol=1e-8)
    close(torch.as_tensor(found.copy()).sort().values, _fisher("lowrank").eigenvalues(2), 1e-6)
