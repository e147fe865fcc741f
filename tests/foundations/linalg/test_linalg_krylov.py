import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.foundations.errors import InputError, NumericalError
from layerwise.foundations.linalg import conjugate_gradient, lanczos, lanczos_function

F64 = torch.float64


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def symmetric(s, seed=1, dtype=F64):
    """A matrix with eigenvalues s."""
    Q = torch.linalg.qr(draw(len(s), len(s), seed=seed)).Q
    return ((Q * s) @ Q.T).to(dtype)


def times(M):
    return lambda X: M @ X


@given(d=st.integers(1, 12), B=st.integers(0, 4), seed=st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_cg_solves(d, B, seed):
    M = symmetric(torch.linspace(0.5, 3.0, d, dtype=F64), seed)
    b = draw(d, B, seed=seed + 1)
    result = conjugate_gradient(times(M), b)
    assert result.converged
    assert result.residuals.shape == (B,)
    torch.testing.assert_close(result.solution, torch.linalg.solve(M, b))


def test_cg_preconditioner_saves_iterations():
    D = torch.logspace(0, 5, 100, dtype=F64)
    root = D.sqrt()
    M = root[:, None] * symmetric(torch.linspace(1, 2, 100, dtype=F64)) * root
    b = draw(100, 3)
    plain = conjugate_gradient(times(M), b, tol=1e-8, max_iterations=3000)
    fast = conjugate_gradient(times(M), b, tol=1e-8, preconditioner=lambda R: R / D[:, None])
    assert fast.converged
    assert fast.iterations < 40 < plain.iterations
    torch.testing.assert_close(fast.solution, torch.linalg.solve(M, b), rtol=1e-6, atol=1e-9)


def test_cg_residuals_are_true_ones_and_columns_are_independent():
    M = symmetric(torch.logspace(-3, 0, 60, dtype=F64))
    b = draw(60, 3)
    b[:, 1] = 0.0
    b[:, 2] *= 1e-30
    short = conjugate_gradient(times(M), b, max_iterations=5)
    assert not short.converged
    assert short.iterations == 5
    true = torch.linalg.vector_norm(b - M @ short.solution, dim=0) / torch.linalg.vector_norm(b, dim=0)
    torch.testing.assert_close(short.residuals[[0, 2]], true[[0, 2]])
    assert short.residuals[1] == 0
    full = conjugate_gradient(times(M), b)
    assert full.converged
    alone = conjugate_gradient(times(M), b[:, :1])
    torch.testing.assert_close(alone.solution[:, 0], full.solution[:, 0], rtol=1e-6, atol=1e-6)


def test_cg_in_ill_conditioned_float32_tells_the_truth():
    M = symmetric(torch.logspace(-6, 2, 80, dtype=F64), dtype=torch.float32) + 1e-4 * torch.eye(80)
    b = draw(80, 2, dtype=torch.float32)
    result = conjugate_gradient(times(M), b, tol=1e-10, max_iterations=2000)
    true = torch.linalg.vector_norm(b - M @ result.solution, dim=0) / torch.linalg.vector_norm(b, dim=0)
    torch.testing.assert_close(result.residuals, true, rtol=0.1, atol=1e-6)
    assert result.converged == bool((result.residuals <= 100 * torch.finfo(torch.float32).eps).all())
    easy = conjugate_gradient(times(M + torch.eye(80)), b)
    assert easy.converged
    assert (easy.residuals < 5e-6).all()  # it went on as far as rounding allows


def test_cg_raises_nothing():
    b = torch.ones(2, 1, dtype=F64)
    indefinite = conjugate_gradient(times(torch.diag(torch.tensor([1.0, -2.0], dtype=F64))), b)
    assert not indefinite.converged
    nan = conjugate_gradient(times(torch.eye(2, dtype=F64)), b * float("nan"))
    assert not nan.converged
    none = conjugate_gradient(times(torch.eye(2, dtype=F64)), b, max_iterations=0)
    assert (none.converged, none.iterations, none.residuals.item()) == (False, 0, 1.0)


def test_cg_runs_an_operator_that_differentiates():
    def matmul(X):
        x = X.detach().requires_grad_()
        return torch.autograd.grad((x**2).sum(), x, create_graph=True)[0]

    result = conjugate_gradient(matmul, torch.ones(3, 2))
    assert not result.solution.requires_grad
    torch.testing.assert_close(result.solution, torch.full((3, 2), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_lanczos_of_an_indefinite_matrix(dtype):
    M = symmetric(torch.linspace(-3, 2, 50, dtype=F64), dtype=dtype)
    alphas, betas, Q = lanczos(times(M), draw(50, dtype=dtype), 20)
    T = torch.diag(alphas) + torch.diag(betas, 1) + torch.diag(betas, -1)
    tight = 1e-12 if dtype == F64 else 1e-5
    torch.testing.assert_close(Q.T @ Q, torch.eye(20, dtype=dtype), rtol=0, atol=tight)
    torch.testing.assert_close(Q.T @ M @ Q, T, rtol=0, atol=tight)


def test_lanczos_stops_when_the_space_is_exhausted():
    s = torch.tensor([1.0, 1.0, 1.0, 4.0, 4.0, 9.0], dtype=F64)
    alphas, betas, Q = lanczos(times(symmetric(s)), draw(6), 6)
    assert (alphas.shape, betas.shape, Q.shape) == ((3,), (2,), (6, 3))
    T = torch.diag(alphas) + torch.diag(betas, 1) + torch.diag(betas, -1)
    torch.testing.assert_close(torch.linalg.eigvalsh(T), torch.tensor([1.0, 4.0, 9.0], dtype=F64))
    assert lanczos(times(torch.zeros(3, 3, dtype=F64)), draw(3), 3)[0].tolist() == [0.0]
    assert lanczos(times(torch.eye(1, dtype=F64)), draw(1), 5)[0].shape == (1,)


@pytest.mark.parametrize("fn", [torch.exp, lambda t: (t + 1).log(), lambda t: (t + 0.1).rsqrt(), lambda t: 1 / t])
def test_lanczos_function(fn):
    s = torch.logspace(-1, 1, 60, dtype=F64)
    M, V = symmetric(s), draw(60, 3)
    V[:, 1] = M @ M @ V[:, 0]
    values, U = torch.linalg.eigh(M)
    V[:, 2] = U[:, 7]  # exhausted after one step, while the others go on
    expected = (U * fn(values)) @ U.T @ V
    torch.testing.assert_close(lanczos_function(times(M), V, fn, 60), expected, rtol=1e-7, atol=1e-7)


def test_lanczos_function_stops_early_and_handles_zero_columns():
    calls = []
    M = symmetric(torch.linspace(1, 2, 100, dtype=F64))

    def matmul(X):
        calls.append(X.shape)
        return M @ X

    V = draw(100, 2)
    V[:, 0] = 0
    Y = lanczos_function(matmul, V, torch.sqrt, 100, tol=1e-8)
    assert len(calls) < 30
    assert torch.equal(Y[:, 0], V[:, 0])
    values, U = torch.linalg.eigh(M)
    torch.testing.assert_close(Y[:, 1], (U * values.sqrt()) @ U.T @ V[:, 1], rtol=1e-7, atol=1e-7)
    assert lanczos_function(times(M[:0, :0]), V[:0], torch.sqrt, 3).shape == (0, 2)


def test_lanczos_function_that_is_not_finite_says_where():
    M = symmetric(torch.linspace(-1, 2, 10, dtype=F64))
    with pytest.raises(NumericalError, match=r"not finite on \[-0\.\d+, "):
        lanczos_function(times(M), draw(10, 1), torch.sqrt, 10)


def test_wrong_arguments_are_explained():
    with pytest.raises(InputError, match="steps=0"):
        lanczos(times(torch.eye(2)), torch.ones(2), 0)
    with pytest.raises(InputError, match=r"maps \(3, 2\) to \(2, 3\)"):
        conjugate_gradient(lambda X: X.T, torch.ones(3, 2))
