"""The stable meta-gradient against autograd, and where only the stable one is left."""

import math

import pytest
import torch

from error_sentences import THREE
from layerwise.foundations.errors import InputError
from layerwise.meta import Quadratic


def descended(problem, eta, steps):
    w = problem.c.to(eta.dtype)
    for _ in range(steps):
        w = w - eta[..., None] * problem.eigenvalues.to(eta.dtype) * w
    return w


@pytest.mark.parametrize("steps", [1, 7, 40])
@pytest.mark.parametrize("size", [0.003, 0.03, 0.3])
def test_both_derivatives_agree_with_autograd(steps, size):
    problem = Quadratic.random(4, 6)
    eta = torch.full((4,), size, dtype=torch.float64, requires_grad=True)
    naive = problem.loss(descended(problem, eta, steps))
    (expected,) = torch.autograd.grad((naive.log() / steps).sum(), eta, retain_graph=True)
    torch.testing.assert_close(problem.gradient(size, steps), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(problem.objective(size, steps), naive.detach().log() / steps, rtol=1e-9, atol=1e-12)
    (expected,) = torch.autograd.grad(naive.sum(), eta)
    torch.testing.assert_close(problem.naive_gradient(size, steps), expected, rtol=1e-9, atol=0)


def test_of_a_matrix_is_descent_on_that_matrix():
    X = torch.randn(5, 5, dtype=torch.float64)
    H, start = X.T @ X, torch.randn(5, dtype=torch.float64)
    w = start
    for _ in range(6):
        w = w - 0.02 * H @ w
    assert float(Quadratic.of(H, start).objective(0.02, 6)) == pytest.approx(float((0.5 * w @ H @ w).log() / 6))


def test_a_huge_number_of_steps_gives_numbers():
    problem = Quadratic.random(3, 10)
    assert torch.isfinite(problem.gradient(1.0, 100_000)).all()
    sign, logabs = problem.naive_log_gradient(1.0, 100_000)
    assert (sign == 1).all()
    assert (logabs > 1e5).all()
    assert torch.isinf(problem.naive_gradient(1.0, 100_000)).all()


def test_best_step_is_the_minimum_between_the_inverse_eigenvalues():
    problem = Quadratic.random(6, 8)
    best = problem.best_step(15)
    assert (best >= 1 / problem.eigenvalues[:, -1]).all()
    assert (best <= 1 / problem.eigenvalues[:, 0]).all()
    for factor in (0.99, 1.01):
        assert (problem.objective(best, 15) < problem.objective(best * factor, 15)).all()


def test_meta_descent_comes_to_the_best_step_and_never_below_zero():
    problem = Quadratic(torch.tensor([[1.0, 2.0, 4.0]]).double(), torch.ones(1, 3).double())
    path = problem.learn(1.5, 10, meta_steps=800)
    assert path.shape == (801, 1)
    assert float(path.min()) >= 0
    assert float(path[-1]) == pytest.approx(float(problem.best_step(10)), rel=1e-2)


def test_a_derivative_that_is_not_a_number_stays_visible():
    problem = Quadratic.random(1, 4)
    path = problem.learn(0.1, 10, meta_steps=3, gradient=lambda eta: eta * torch.nan)
    assert torch.isnan(path[1:]).all()


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_coordinates_of_zero_do_not_count_and_tiny_ones_for_what_they_are():
    whole = Quadratic(doubles(0.01, 1.0, 2.0), doubles(0.0, 1.0, 1.0))
    rest = Quadratic(doubles(1.0, 2.0), doubles(1.0, 1.0))
    torch.testing.assert_close(whole.best_step(400), rest.best_step(400))
    torch.testing.assert_close(whole.learn(0.6, 400, 3), rest.learn(0.6, 400, 3))
    for tiny in (0.0, 1e-200):
        problem = Quadratic(doubles(1.0, 2.0), doubles(tiny, 1.0))  # (0.9/0.8)^10000 is 10⁵¹¹, above 10⁴⁰⁰
        small = tiny == 0.0
        assert float(problem.gradient(0.1, 5000)) == pytest.approx(-5.0 if small else -2 / 0.9)
        share = 2 * math.log(0.8) if small else 2 * math.log(0.9) + (2 * math.log(tiny) - math.log(2)) / 5000
        assert float(problem.objective(0.1, 5000)) == pytest.approx(share)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_the_scale_of_the_start_does_not_matter(scale):
    lam, c = doubles(1.0, 2.0, 4.0), doubles(1.0, -2.0, 0.5)
    scaled, plain = Quadratic(lam, c * scale), Quadratic(lam, c)
    torch.testing.assert_close(scaled.gradient(0.1, 10), plain.gradient(0.1, 10))
    torch.testing.assert_close(scaled.normalized().c, plain.normalized().c)
    logs = scaled.naive_log_gradient(0.1, 10).logabs - plain.naive_log_gradient(0.1, 10).logabs
    assert float(logs) == pytest.approx(2 * math.log(scale))


def test_eigenvalues_may_come_in_any_order_and_precision():
    found = Quadratic(torch.tensor([2.0, 1.0]), torch.tensor([0.8, 0.6]))
    assert found.eigenvalues.tolist() == [1.0, 2.0]
    assert found.c.dtype == torch.float64
    expected = Quadratic(doubles(1.0, 2.0), doubles(0.6, 0.8)).best_step(5)
    torch.testing.assert_close(found.best_step(5), expected, rtol=1e-6, atol=0)


def test_a_start_that_is_gone_after_one_step_has_numbers():
    problem = Quadratic.of(torch.eye(3), torch.ones(3))
    assert float(problem.gradient(1.0, 3)) == 0
    assert float(problem.naive_gradient(1.0, 3)) == 0
    assert float(problem.naive_objective(1.0, 3)) == 0
    assert float(problem.objective(1.0, 3)) == -math.inf


@pytest.mark.parametrize(
    "call",
    [
        lambda q: q.gradient(-0.1, 5),
        lambda q: q.gradient(float("nan"), 5),
        lambda q: q.gradient(0.1, 0),
        lambda q: q.learn(0.0, 5),
        lambda q: q.learn(0.1, 5, meta_steps=0),
        lambda q: Quadratic(torch.tensor([0.0, 1.0]), torch.ones(2)),
        lambda q: Quadratic(torch.tensor([1.0, 2.0]), torch.ones(3)),
        lambda q: Quadratic(torch.tensor([1.0, 2.0]), torch.zeros(2)),
        lambda q: Quadratic.of(torch.ones(2, 3), torch.ones(2)),
        lambda q: Quadratic.of(torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.ones(2)),
        lambda q: Quadratic.of(torch.eye(2) * torch.nan, torch.ones(2)),
    ],
)
def test_bad_input_is_refused_in_one_sentence(unchecked, call):
    with pytest.raises(InputError, match=THREE):
        call(Quadratic.random(1, 3))
